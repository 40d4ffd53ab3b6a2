from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from kamui import Intervention, hookimpl
from kamui.errors import InPlaceEditError, NotCapturedError, ReplacementError, ScopeError, ValueStructureError
from kamui.hooks import Call, HookManager, HookPoint, HookRegistry
from kamui.model import Transformer
from kamui.testing import leaves_no_trace

Edit = Callable[[str, Tensor], Tensor]


def by_hand(model: Transformer, token_ids: Tensor, edit: Edit) -> Tensor:
    """The reference model written out, with `edit` at every canonical point and at every block."""
    length = token_ids.shape[1]
    x = edit("embed.output", model.embed.tokens(token_ids) + model.embed.positions(torch.arange(length)))
    causal = torch.ones(length, length).tril() == 1
    for layer in range(model.config.n_layers):
        name = f"blocks.{layer}"
        block: Any = model.blocks[layer]
        x = edit(f"{name}.input", x)
        qkv = block.attn.qkv(edit(f"{name}.attn.input", block.ln1(x))).chunk(3, dim=-1)
        q, k, v = (
            edit(f"{name}.attn.{io}", part.unflatten(-1, (model.config.n_heads, -1)).transpose(1, 2))
            for io, part in zip("qkv", qkv, strict=True)
        )
        scores = edit(f"{name}.attn.pre_softmax", q @ k.mT / model.config.d_head**0.5)
        weights = edit(f"{name}.attn.weights", scores.masked_fill(~causal, -torch.inf).softmax(-1))
        z = edit(f"{name}.attn.z", weights @ v)
        x = x + edit(f"{name}.attn.output", block.attn.out(z.transpose(1, 2).flatten(2)))
        mid = edit(f"{name}.ffn.mid", F.gelu(block.ffn.up(block.ln2(x)), approximate="tanh"))
        x = edit(f"{name}.output", x + edit(f"{name}.ffn.output", block.ffn.down(mid)))
    return model.unembed(edit("unembed.input", model.final_ln(x)))


BLOCK = ("input", "attn.input", *(f"attn.{io}" for io in ("q", "k", "v", "pre_softmax", "weights", "z", "output")))
POINTS = ["embed.output", "unembed.input"]
POINTS += [f"blocks.{layer}.{io}" for layer in (0, 1) for io in (*BLOCK, "ffn.mid", "ffn.output", "output")]


def rotate(value: Tensor) -> Tensor:
    return value.roll(1, -1) * 0.7


@pytest.mark.parametrize("point", POINTS)
def test_an_edit_gives_what_the_model_written_out_gives(model: Transformer, token_ids: Tensor, point: str) -> None:
    expected = by_hand(model, token_ids, lambda name, value: rotate(value) if name == point else value)
    with HookManager(model) as hooks:
        hooks.use("cache", at=point, raw=True)
        hooks.use(rotate, at=point)
        torch.testing.assert_close(model(token_ids), expected, atol=2e-5, rtol=1e-4)
    seen: dict[str, Tensor] = {}
    by_hand(model, token_ids, lambda name, value: seen.setdefault(name, value))
    torch.testing.assert_close(hooks.get(point), seen[point], atol=2e-5, rtol=1e-4)


def test_edits_at_every_point_at_once_give_what_the_model_written_out_gives(
    model: Transformer, token_ids: Tensor
) -> None:
    expected = by_hand(model, token_ids, lambda name, value: value * 0.9)
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        hooks.use(lambda value: value * 0.9, at=POINTS)
        torch.testing.assert_close(run(token_ids), expected, atol=2e-5, rtol=1e-4)
        assert {(row.calls, row.changed) for row in hooks.report().rows} == {(1, 1)}


def test_gradients_flow_through_an_edit_as_through_the_model_written_out(model: Transformer, token_ids: Tensor) -> None:
    parameters = list(model.parameters())
    written = by_hand(model, token_ids, lambda name, value: rotate(value) if "blocks.0" in name else value)
    expected = torch.autograd.grad(written.square().mean(), parameters)
    with HookManager(model) as hooks:
        hooks.use(rotate, at=[point for point in POINTS if "blocks.0" in point])
        found = torch.autograd.grad(model(token_ids).square().mean(), parameters)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


def test_points_fire_in_the_order_in_which_the_registry_lists_them(model: Transformer, token_ids: Tensor) -> None:
    fired: list[str] = []
    with HookManager(model) as hooks:
        hooks.use(lambda value, point: fired.append(point), at=sorted(HookRegistry.all_points(model)))
        model(token_ids)
    assert fired == HookRegistry.all_points(model)


def test_a_replacement_of_another_kind_names_intervention_point_and_difference() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())

    def wrong(value: Tensor) -> Tensor:
        return value[:1].double()

    message = (
        r"intervention 'wrong' cannot replace the value at point '0.output': shape \(1, 3\) where \(2, 3\) is "
        r"expected, dtype torch.float64 where torch.float32 is expected"
    )
    with HookManager(net) as hooks:
        hooks.use(wrong, at="0.output")
        with pytest.raises(ReplacementError, match=message):
            net(torch.randn(2, 3))
    with HookManager(net) as hooks:
        hooks.use(lambda value: (value,), at="1.output")
        with pytest.raises(ReplacementError, match=r"returned a tuple at point '1.output', not a tensor of shape"):
            net(torch.randn(2, 3))


class Writes(Intervention):
    at: str

    @hookimpl
    def points(self) -> str:
        return self.at

    @hookimpl
    def activation(self, value: Tensor) -> None:
        value.mul_(2)


@pytest.mark.parametrize(
    ("mode", "strict"), [(nullcontext, False), (torch.no_grad, False), (torch.inference_mode, True)]
)
def test_writing_to_the_live_value_is_told_at_once(
    mode: Callable[[], AbstractContextManager[object]], strict: bool
) -> None:
    net = nn.Sequential(nn.Identity(), nn.Tanh())
    with HookManager(net, strict=strict) as hooks, mode():
        hooks.use(Writes, at="1.output")
        with pytest.raises(InPlaceEditError, match=r"'Writes' wrote to the live value at point '1\.output'; clone it"):
            net(torch.randn(2, 3))


def test_a_function_may_write_to_its_copy_where_the_live_value_is_a_view() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.pick = nn.Linear(4, 12), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split(4, dim=-1)
            return (self.pick(q) * k * v).sum()

    def without_the_first(value: Tensor) -> None:
        value[:, 0] = 0.0

    net = Split()
    with HookManager(net) as hooks:
        hooks.use(without_the_first, at="pick.output")
        net(torch.randn(2, 4)).backward()
    gradient = net.qkv.weight.grad
    assert gradient is not None
    assert gradient[0].abs().sum() == 0
    assert gradient[1].abs().sum() > 0


def test_a_capture_is_what_passed_and_not_what_a_later_module_made_of_it() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True))
    x = torch.randn(1, 3, 6, 6)
    with torch.no_grad(), HookManager(net) as hooks:
        hooks.attach("0")
        net(x)
    assert torch.equal(hooks.get("0.output"), net[0](x))
    assert (hooks.get("0.output") < 0).any()


def test_a_capture_made_under_inference_mode_can_be_used_outside() -> None:
    net = nn.Linear(3, 3)
    with HookManager(net) as hooks, torch.inference_mode():
        hooks.attach("")
        net(torch.randn(2, 3))
    captured = hooks.get("output")
    assert not captured.is_inference()
    captured.add_(1)


def test_hooks_of_others_stay_and_see_what_was_changed() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    seen: list[Tensor] = []
    inputs: list[Tensor] = []
    net[0].register_forward_hook(lambda module, args, output: seen.append(output))
    net[0].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with leaves_no_trace(net) as run:
        with HookManager(net) as outer:
            outer.use(lambda value: value * 0, at="0.output")
            with HookManager(net) as inner:
                inner.use(lambda value: inputs.append(value), at="0.input")
                inner.use(lambda value: value + 5, at="0.output")
                run(torch.zeros(1, 3))
            run(torch.zeros(1, 3))
        run(torch.zeros(1, 3))
        assert [bool((value == expected).all()) for value, expected in zip(seen, (5, 0, 0), strict=True)] == [
            True,
            True,
            False,
        ]
        assert torch.equal(inputs[0], torch.ones(1, 3))


def test_a_deep_copy_made_inside_a_scope_behaves_as_the_bare_model(model: Transformer, token_ids: Tensor) -> None:
    bare = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use(lambda value: value * 0, at="blocks.0.output")
        hooks.use(lambda value: value * 0, at="blocks.0.attn.weights")
        twin = copy.deepcopy(model)
        assert torch.equal(twin(token_ids), bare)
        assert torch.equal(twin.generate(token_ids, 2), copy.deepcopy(twin).generate(token_ids, 2))
        assert hooks.report().finished == 0
        assert not torch.equal(model(token_ids), bare)
        with HookManager(twin) as others:
            others.attach("blocks.0")
            assert torch.equal(twin(token_ids), bare)
    for one in (twin, copy.deepcopy(twin), pickle.loads(pickle.dumps(twin))):
        assert torch.equal(one(token_ids), bare)
        assert one.generate(token_ids, 2).shape == (2, 9)


@pytest.mark.filterwarnings("ignore:the model ran")
def test_pickling_inside_a_scope_fails_and_names_it(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model), pytest.raises(ScopeError, match="cannot be pickled while a HookManager scope is open"):
        pickle.dumps(model)
    restored = pickle.loads(pickle.dumps(model))
    assert torch.equal(restored(token_ids), model(token_ids))


def test_names_state_and_classes_are_the_same_inside_a_scope(model: Transformer) -> None:
    def looks() -> Any:
        return list(model.state_dict()), [(name, type(module)) for name, module in model.named_modules()]

    outside = looks()
    with HookManager(model) as hooks:
        hooks.attach("blocks.*")
        assert looks() == outside


def test_recorders_of_others_see_the_edit_whoever_came_first() -> None:
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    ids = torch.tensor([[1, 2, 3]])
    for asked_first in (False, True):
        torch.manual_seed(0)
        llama = LlamaModel(config).eval()
        with torch.no_grad(), leaves_no_trace(llama) as run:
            if asked_first:
                run(input_ids=ids, output_hidden_states=True)
            with HookManager(llama) as hooks:
                hooks.use(lambda value: value * 0, at="layers.0.output")
                hooks.attach("layers.0.self_attn", "weights")
                states = run(input_ids=ids, output_hidden_states=True).hidden_states
                assert hooks.get("layers.0.self_attn.weights").shape == (1, 2, 3, 3)
        assert (states[1] == 0).all()


class Once(Intervention):
    """Doubles the value in its first call alone, and uses another function from there."""

    scope: HookManager
    at: str

    @hookimpl
    def points(self) -> str:
        return self.at

    @hookimpl
    def activation(self, value: Tensor, call: Call) -> Tensor | None:
        if call.forward == 0:
            self.scope.use(lambda value: value + 1, at=self.at)
            return value * 0
        return None


def test_what_is_used_during_a_forward_pass_starts_with_the_next_call() -> None:
    net = nn.Sequential(nn.Identity(), nn.Identity())
    x = torch.ones(1, 2)
    with HookManager(net) as hooks:
        hooks.use(Once, scope=hooks, at="0.output")
        assert torch.equal(net(x), x * 0)
        assert torch.equal(net(x), x + 1)


def test_a_hook_that_removes_itself_leaves_ours_in_the_same_call() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    log: list[str] = []

    def once(*_: Any) -> None:
        log.append("once")
        handle.remove()

    handle = net[0].register_forward_hook(once)
    with HookManager(net) as hooks:
        hooks.use(lambda value: log.append("ours"), at="0.output")
        net(torch.ones(1, 2))
        net(torch.ones(1, 2))
    assert log == ["ours", "once", "ours"]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_applies_edits_again_and_captures_once(reentrant: bool) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))
    x = torch.randn(2, 3, requires_grad=True)

    def run(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        with HookManager(net) as hooks:
            hooks.use(lambda value: torch.sin(value) * 2, at="0.output")
            hooks.attach("0")
            loss = call(x).sum()
            gradients = torch.autograd.grad(loss, list(net.parameters())) if not reentrant else _backward(net, loss)
            assert hooks.report().finished == 1
            assert len(hooks.get_all()) == 1
        return gradients

    expected = run(net)
    found = run(lambda value: checkpoint(net, value, use_reentrant=reentrant))
    torch.testing.assert_close(found, expected)


def _backward(net: nn.Module, loss: Tensor) -> tuple[Tensor, ...]:
    net.zero_grad()
    loss.backward()
    return tuple(parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None)


def test_checkpointed_blocks_inside_a_model_are_one_forward_pass() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    net = Checkpointed()
    with leaves_no_trace(net) as run, HookManager(net) as hooks:
        hooks.attach("layers.*")
        run.apply(lambda one: one(torch.ones(1, 3)).sum().backward())
        assert hooks.report().finished == 1
        assert sorted(hooks.get_all()) == ["layers.0.output", "layers.1.output", "layers.2.output"]


def test_a_value_without_a_tensor_is_named_with_what_there_is() -> None:
    class Says(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "yes"

    net = Says()
    with HookManager(net) as hooks:
        hooks.attach("")
        with pytest.raises(Exception, match="point 'output' has no tensor: Says has a str there; choose another point"):
            net(torch.ones(1))
        with pytest.raises(NotCapturedError, match=r"1 forward pass\(es\) failed"):
            hooks.get("output")


def test_points_are_given_as_they_were_asked_for(model: Transformer, token_ids: Tensor) -> None:
    asked: list[HookPoint] = []
    with HookManager(model) as hooks:
        hooks.use(lambda value, point: asked.append(point), at=["blocks.-1.ffn.mid", "blocks.0.output"])
        model(token_ids)
    assert asked == ["blocks.0.output", "blocks.1.ffn.mid"]
    assert all(isinstance(point, HookPoint) for point in asked)


@pytest.mark.parametrize("mode", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_fast_path_of_torch_hides_no_module(mode: Callable[[], AbstractContextManager[object]]) -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(2, 5, 16)
    with mode(), leaves_no_trace(encoder) as run, HookManager(encoder) as hooks:
        bare = encoder(x)
        hooks.attach("layers.0.linear1")
        torch.testing.assert_close(run(x), bare, atol=1e-6, rtol=1e-5)
        assert hooks.get("layers.0.linear1.output").shape == (2, 5, 32)


@pytest.mark.parametrize(
    ("point", "told"),
    [
        ("output[1][5]", "there is no 5 in a tuple; it holds 0, 1"),
        ("input[3]", "there is no 3 in a"),
        ("grad_output[7]", "there is no 7 in a tuple; it holds 0, 1"),
    ],
)
def test_a_selector_that_does_not_fit_is_told_with_its_point(point: str, told: str) -> None:
    lstm = nn.LSTM(3, 4)
    message = re.escape(f"the selector of point {point!r} does not fit: {told}")
    with HookManager(lstm) as hooks:
        hooks.attach("", point)
        with pytest.raises(ValueStructureError, match=message):
            lstm(torch.ones(2, 1, 3))
