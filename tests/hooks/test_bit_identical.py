from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kamui.hooks import HookManager, HookRegistry
from kamui.model import ModelConfig, Transformer

EXTRA = [f"blocks.0.attn.{io}" for io in ("q", "k", "v", "z", "input")] + ["output", "final_ln.output"]

MODES: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "grad": nullcontext,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def points_of(model: Transformer) -> list[str]:
    return [*HookRegistry.all_points(model), *EXTRA]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_observing_any_point_leaves_the_logits_as_they_are(
    model: Transformer, token_ids: Tensor, dtype: torch.dtype, mode: str
) -> None:
    model = model.to(dtype)
    with MODES[mode]():
        bare = model(token_ids)
        for point in points_of(model):
            with HookManager(model) as hooks:
                hooks.use("cache", at=point)
                assert torch.equal(model(token_ids), bare), point
                assert hooks.report().rows[0].calls == 1
        with HookManager(model) as hooks:
            for point in points_of(model):
                hooks.use("cache", at=point)
            assert torch.equal(model(token_ids), bare)
        assert torch.equal(model(token_ids), bare)


def gradients(model: Transformer, token_ids: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    F.cross_entropy(model(token_ids)[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten()).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("training", [False, True])
def test_observing_leaves_every_gradient_as_it_is(token_ids: Tensor, training: bool) -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(2, 16, 2, 24, 31, 24, dropout=0.2)).train(training)
    torch.manual_seed(7)
    bare = gradients(model, token_ids)
    with HookManager(model) as hooks:
        hooks.use("cache", at=points_of(model))
        torch.manual_seed(7)
        observed = gradients(model, token_ids)
    assert bare.keys() == observed.keys()
    assert all(torch.equal(bare[name], observed[name]) for name in bare)


def test_a_model_trained_while_it_is_observed_becomes_the_same_model(model: Transformer, token_ids: Tensor) -> None:
    def train(one: Transformer) -> None:
        optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
        for _ in range(4):
            gradients(one, token_ids)
            optimizer.step()

    twin = copy.deepcopy(model)
    train(twin)
    with HookManager(model) as hooks:
        hooks.use("cache", at=points_of(model))
        train(model)
    for trained, expected in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(trained, expected)


@pytest.mark.parametrize("point", ["blocks.1.output", "blocks.0.attn.q", "blocks.0.attn.z", "blocks.0.ffn.mid"])
def test_putting_a_value_in_its_own_place_changes_nothing(model: Transformer, token_ids: Tensor, point: str) -> None:
    bare = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use(lambda value: value.clone(), at=point)
        assert torch.equal(model(token_ids), bare)
        assert hooks.report().rows[0].changed == 1


@pytest.mark.parametrize("point", ["blocks.0.attn.weights", "blocks.0.attn.pre_softmax"])
def test_putting_attention_in_its_own_place_changes_no_more_than_the_explicit_form_does(
    model: Transformer, token_ids: Tensor, point: str
) -> None:
    bare = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use(lambda value: value.clone(), at=point)
        torch.testing.assert_close(model(token_ids), bare, atol=1e-5, rtol=1e-5)


def test_generation_is_the_same_while_it_is_observed(model: Transformer, token_ids: Tensor) -> None:
    bare = model.generate(token_ids, 5)
    with HookManager(model) as hooks:
        hooks.use("cache", at=points_of(model))
        assert torch.equal(model.generate(token_ids, 5), bare)
        assert hooks.report().finished == 5
