"""`kamui points` shows the points of a model that it never makes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from kamui.cli.points import describe, find_config
from kamui.errors import ConfigError
from kamui.hooks import HookManager, HookRegistry
from kamui.model import ModelConfig, Transformer

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    Run = Callable[..., Result]

TINY = ModelConfig(n_layers=2, d_model=12, n_heads=3, d_ff=20, vocab_size=17, context_length=8)


def test_shapes_are_those_of_a_real_run() -> None:
    torch.manual_seed(0)
    model = Transformer(TINY)
    described = {each.point: each for each in describe(TINY, 2, 5)}
    points = HookRegistry.all_points(TINY)
    with HookManager(model) as hooks:
        for point in points:
            hooks.attach(point.module, point.io)
        model(torch.zeros(2, 5, dtype=torch.long))
    for point in points:
        value = hooks.get(point)
        assert (described[point].shape, described[point].dtype) == (tuple(value.shape), value.dtype)


def test_canonical_points_are_shown_in_firing_order(run: Run, tmp_path: Path) -> None:
    TINY.to_yaml(tmp_path / "tiny.yaml")
    result = run("points", str(tmp_path / "tiny.yaml"), "--batch", "2", "--length", "5")
    assert result.exit_code == 0
    shown = [line.split()[0] for line in result.output.splitlines() if "float32" in line]
    assert shown == HookRegistry.all_points(TINY)
    assert "(2, 3, 5, 5)" in result.output


def test_all_shows_every_addressable_point(run: Run, tmp_path: Path) -> None:
    TINY.to_yaml(tmp_path / "tiny.yaml")
    result = run("points", str(tmp_path / "tiny.yaml"), "--all")
    for point in ("blocks.1.attn.q", "blocks.0.ln1.input", "output"):
        assert any(line.split()[:1] == [point] for line in result.output.splitlines())


@pytest.mark.parametrize("name", ["small", "configs/small.yaml"])
def test_a_config_that_comes_along_is_found_by_name(
    run: Run, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = run("points", name)
    assert result.exit_code == 0
    assert "6 layers, D 256" in result.output


def test_a_file_wins_over_a_config_that_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("small").write_text("model: {}")
    assert find_config("small") == Path("small")
    with pytest.raises(ConfigError, match="these come along"):
        find_config("smal")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing.yaml"], "Error: no file 'nothing.yaml'"),
        (["."], "Error: .: cannot be read"),
        (["small", "--length", "257"], "257 is more than the context of 256 positions"),
        (["small", "--batch", "0"], "'--batch'"),
    ],
)
def test_what_cannot_be_shown_is_said_on_standard_error(run: Run, arguments: list[str], message: str) -> None:
    result = run("points", *arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr
