"""What the wheel holds, and that it does its work from an empty folder."""

from __future__ import annotations

import zipfile
from importlib.metadata import distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Environment

PACKAGES = ("kamui", "kamui_cache", "kamui_patching", "kamui_steering", "kamui_logit_lens", "kamui_transformers")

IN_USE = """
import torch
import kamui
from kamui.hooks import HookManager, HookRegistry
from kamui.model import ModelConfig, Transformer

config = ModelConfig.from_yaml("configs/small.yaml")
model = Transformer(config)
assert HookRegistry.all_points(config)[:2] == ["embed.output", "blocks.0.attn.pre_softmax"]
assert HookRegistry.all_points(config)[-1] == "unembed.input"
token_ids = torch.randint(0, config.vocab_size, (2, 7))
clean, v = torch.zeros(2, 7, config.d_model), torch.ones(config.d_model)

with HookManager(model) as hooks:
    hooks.attach("blocks.3.attn", point="output")
    hooks.attach("blocks.3.attn", point="weights")
    hooks.attach("blocks.4.attn", point="output", replace_with=clean)
    steering = kamui.use("steering", alpha=0.5, vector=v, at="blocks.3.output")
    lens = hooks.use("logit_lens")
    logits = model(token_ids)
    assert hooks.get("blocks.3.attn.output").shape == (2, 7, 256)
    assert hooks.get("blocks.3.attn.weights").shape == (2, 8, 7, 7)
assert hooks.get("blocks.3.attn.output").shape == (2, 7, 256)
assert kamui.hooks.inspect(model) == []
print(kamui.__file__)
"""


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.mark.parametrize("package", PACKAGES)
def test_each_package_says_that_it_is_typed(names: set[str], package: str) -> None:
    assert f"{package}/py.typed" in names


def test_the_trained_model_comes_along(names: set[str]) -> None:
    assert "kamui/model/checkpoints/nano.safetensors" in names


@pytest.mark.parametrize("config", ["nano", "small", "medium", "gpt2"])
def test_the_configs_come_along(names: set[str], config: str) -> None:
    assert f"kamui/configs/{config}.yaml" in names


def test_nothing_else_comes_along(names: set[str]) -> None:
    roots = {name.partition("/")[0] for name in names}
    assert roots == {*PACKAGES, f"kamui_core-{distribution('kamui-core').version}.dist-info"}
    assert not [name for name in names if name.endswith(".pyc") or "/tests/" in name]


def test_the_example_of_the_readme_runs_from_an_empty_folder(environment: Environment, tmp_path: Path) -> None:
    where = environment.run("-W", "error", "-c", IN_USE, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(environment.folder)


def test_the_command_finds_the_interventions_that_come_along(environment: Environment, tmp_path: Path) -> None:
    listed = environment.run("-m", "kamui", "plugins", cwd=tmp_path)
    assert all(name in listed for name in ("cache", "patching", "steering", "logit_lens"))
