from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kamui.errors import UnsupportedModelError
from kamui.hooks import HookManager, HookRegistry, PointDescription
from kamui.model import ModelConfig, Transformer
from kamui.testing import leaves_no_trace


def test_the_canonical_points_come_in_firing_order(model: Transformer) -> None:
    expected = ["embed.output"]
    for layer in (0, 1):
        inner = ("attn.pre_softmax", "attn.weights", "attn.output", "ffn.mid", "ffn.output")
        expected += [f"blocks.{layer}.{name}" for name in inner]
    expected.append("unembed.input")
    assert HookRegistry.all_points(model) == HookRegistry.all_points(model.config) == expected


def test_all_points_takes_anything_that_says_how_many_layers_it_has() -> None:
    config = ModelConfig(12, 16, 2, 24, 31, 24)
    assert len(HookRegistry.all_points(config)) == 2 + 5 * 12
    for source in (3, None, "small"):
        with pytest.raises(UnsupportedModelError, match="all_points takes a model or a config with n_layers, not"):
            HookRegistry.all_points(source)  # type: ignore[arg-type]


def test_a_name_or_pattern_is_resolved_to_each_place_once(model: Transformer) -> None:
    resolve = HookRegistry.resolve
    assert resolve(model, "blocks.-1.ffn.mid") == ["blocks.1.ffn.mid"]
    assert resolve(model, "blocks.*.attn.weights") == ["blocks.0.attn.weights", "blocks.1.attn.weights"]
    assert set(resolve(model, "blocks.0.attn.*")) == {
        f"blocks.0.attn.{io}" for io in ("input", "output", "q", "k", "v", "pre_softmax", "weights", "z")
    }
    assert resolve(model, "*.output") == ["embed.output", "final_ln.output", "unembed.output"]
    assert HookRegistry.validate(model, "blocks.0.ln1.input") == "blocks.0.ln1.input"


def described(model: nn.Module, *example: Any) -> dict[str, PointDescription]:
    return {description.point: description for description in HookRegistry.describe(model, *example)}


def test_shapes_are_told_without_running_or_touching_the_model(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model):
        found = described(model, token_ids)
    shapes = {
        "embed.output": (2, 7, 16),
        "blocks.0.attn.pre_softmax": (2, 2, 7, 7),
        "blocks.1.attn.weights": (2, 2, 7, 7),
        "blocks.1.attn.q": (2, 2, 7, 8),
        "blocks.0.ffn.mid": (2, 7, 24),
        "unembed.input": (2, 7, 16),
        "output": (2, 7, 31),
    }
    assert {point: found[point].shape for point in shapes} == shapes
    assert found["embed.input"].dtype is torch.int64
    assert found["output"].dtype is torch.float32
    with HookManager(model) as hooks:
        hooks.attach("blocks.*.attn", "*")
        model(token_ids)
        for point, value in hooks.get_all().items():
            assert found[point].shape == value.shape


def test_a_model_that_cannot_be_run_so_is_described_with_the_reason() -> None:
    class Decides(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.before(x)
            return self.after(x) if x.sum().item() > 0 else x

    found = described(Decides(), torch.ones(1, 2))
    assert found["before.output"].shape == (1, 2)
    assert found["after.output"].shape is None
    assert "could not be run without real data" in found["after.output"].reason
    assert described(Decides())["before.output"].reason == "no example was given to run the model with"


def test_a_scope_that_is_open_neither_acts_on_nor_sees_a_description(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.use(lambda value: 1 / 0, at="blocks.0.attn.weights")
        assert described(model, token_ids)["blocks.0.attn.weights"].shape == (2, 2, 7, 7)
        assert hooks.report().finished == hooks.report().foreign == 0
    assert described(copy.deepcopy(model), token_ids)["output"].shape == (2, 7, 31)
