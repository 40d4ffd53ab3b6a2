"""Gradient points, against `torch.autograd.grad` on values that were kept by hand."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

import kamui
from kamui.errors import InPlaceEditError, NeverFiredWarning, NotCapturedError, ReplacementError, TransformError
from kamui.hooks import Call, HookManager, HookPoint, inspect
from kamui.model import Transformer
from kamui.testing import leaves_no_trace


class Residual(nn.Module):
    """A stream with one branch on it."""

    def __init__(self, branch: nn.Module) -> None:
        super().__init__()
        self.into = nn.Linear(4, 4)
        self.branch = branch
        self.back = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        stream = self.into(x)
        return stream + self.back(self.branch(stream))


class OneTerm(nn.Module):
    """Reads the stream, which others read as well."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sin()


def _relu_later(*before: nn.Module) -> nn.Module:
    return nn.Sequential(*before, nn.ReLU(inplace=True))


BRANCHES: dict[str, tuple[Callable[[], nn.Module], Callable[[Tensor], Tensor], bool]] = {
    # how the branch is made, what it computes, and whether it writes to the stream
    "a module that reads the stream": (OneTerm, torch.sin, False),
    "identity": (nn.Identity, lambda x: x, False),
    "dropout in eval mode": (nn.Dropout, lambda x: x, False),
    "identity in a sequence": (lambda: nn.Sequential(nn.Identity(), nn.Identity()), lambda x: x, False),
    "a view": (nn.Flatten, lambda x: x, False),
    "relu in place": (lambda: nn.ReLU(inplace=True), torch.relu, True),
    "identity, then relu in place": (lambda: _relu_later(nn.Identity()), torch.relu, True),
    "a view, then relu in place": (lambda: _relu_later(nn.Flatten()), torch.relu, True),
    "a function, then relu in place": (lambda: _relu_later(OneTerm()), lambda x: x.sin().relu(), False),
}


def _loss(value: Tensor) -> Tensor:
    return value.pow(3).sum()


def _by_hand(net: Residual, x: Tensor, compute: Callable[[Tensor], Tensor], writes: bool) -> dict[str, Tensor]:
    first = net.into(x)
    if writes:  # the branch writes to the stream: what it makes of it is the stream from there on
        written = compute(first)
        stream, given, left = written, first, written.view_as(written)
    else:
        stream, given = first, first.view_as(first)
        left = compute(given)
        left = left.view_as(left)
    branch = net.back(left)
    names = ("into.grad_output", "branch.grad_input", "branch.grad_output", "back.grad_input", "back.grad_output")
    values = (first, given, left, left, branch)
    return dict(zip(names, torch.autograd.grad(_loss(stream + branch), values), strict=True))


@pytest.mark.parametrize("kind", BRANCHES)
def test_each_gradient_is_the_one_that_autograd_gives_for_the_value_kept_by_hand(kind: str) -> None:
    torch.manual_seed(0)
    make, compute, writes = BRANCHES[kind]
    net, x = Residual(make()).eval(), torch.randn(3, 4)
    expected = _by_hand(net, x, compute, writes)
    with HookManager(net) as hooks:
        for point in expected:
            hooks.use("cache", at=point)
        _loss(net(x)).backward()
        for point, wanted in expected.items():
            assert torch.allclose(hooks.get(point), wanted, atol=1e-6), point


@pytest.mark.parametrize("kind", BRANCHES)
def test_each_point_alone_fires_once_and_changes_neither_the_output_nor_the_gradients(kind: str) -> None:
    torch.manual_seed(0)
    make, _, _ = BRANCHES[kind]
    net, x = Residual(make()).eval(), torch.randn(3, 4)
    bare = net(x)
    wanted = torch.autograd.grad(_loss(bare), list(net.parameters()))
    for name in ("into", "branch", "back"):
        for io in ("grad_input", "grad_output"):
            if (name, io) == ("into", "grad_input"):
                continue
            with HookManager(net) as hooks:
                hooks.attach(name, io)
                output = net(x)
                found = torch.autograd.grad(_loss(output), list(net.parameters()))
                assert [row.calls for row in hooks.report().rows] == [1], (name, io)
            assert torch.equal(output, bare)
            assert all(torch.allclose(have, want, atol=1e-6) for have, want in zip(found, wanted, strict=True))


def test_a_module_inside_a_sequence_that_is_written_to_later_has_its_gradients() -> None:
    torch.manual_seed(0)
    net, x = Residual(_relu_later(nn.Identity())), torch.randn(3, 4)
    expected = _by_hand(net, x, torch.relu, writes=True)
    with HookManager(net) as hooks:
        hooks.use("cache", at="branch.*.grad_input")
        hooks.use("cache", at="branch.*.grad_output")
        _loss(net(x)).backward()
        for point in ("branch.0.grad_input", "branch.0.grad_output", "branch.1.grad_input"):
            assert torch.allclose(hooks.get(point), expected["branch.grad_input"], atol=1e-6), point
        assert torch.allclose(hooks.get("branch.1.grad_output"), expected["branch.grad_output"], atol=1e-6)


def test_relu_in_place_next_or_itself() -> None:
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)), torch.randn(2, 3)
    value = net[0](x)
    out = value.relu()
    expected = torch.autograd.grad(_loss(out), (value, out))
    with HookManager(net) as hooks:
        hooks.attach("0", "grad_output")
        hooks.attach("1", "grad_input")
        hooks.attach("1", "grad_output")
        _loss(net(x)).backward()
        found = [hooks.get(point) for point in ("0.grad_output", "1.grad_input", "1.grad_output")]
    assert all(torch.equal(have, want) for have, want in zip(found, (expected[0], *expected), strict=True))


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.pick = nn.Linear(4, 12), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).split(4, dim=-1)
        return self.pick(q) * k * v


def test_a_split_view_can_be_read_and_replaced() -> None:
    torch.manual_seed(0)
    net, x = Split(), torch.randn(2, 4)
    q, k, v = net.qkv(x).split(4, dim=-1)
    (wanted,) = torch.autograd.grad(_loss(q * k * v), q)
    with HookManager(net) as hooks:
        hooks.attach("pick", "grad_output")
        hooks.attach("pick", "grad_input")
        hooks.attach("pick", "grad_input", replace_with=torch.zeros_like)
        _loss(net(x)).backward()
        assert torch.allclose(hooks.get("pick.grad_output"), wanted)
    assert net.qkv.weight.grad is not None
    assert not net.qkv.weight.grad[:4].any()
    assert net.qkv.weight.grad[4:].any()


@pytest.mark.parametrize("kind", BRANCHES)
def test_what_an_intervention_returns_goes_on_as_the_gradient(kind: str) -> None:
    torch.manual_seed(0)
    make, _, writes = BRANCHES[kind]
    net, x = Residual(make()).eval(), torch.randn(3, 4)
    with HookManager(net) as hooks:
        hooks.attach("into", "grad_output", replace_with=lambda gradient: gradient * 2)
        hooks.attach("branch", "grad_output", replace_with=torch.zeros_like)
        hooks.attach("branch", "grad_input")
        hooks.attach("into", "grad_output")
        _loss(net(x)).backward()
        assert writes or not hooks.get("branch.grad_input").any()
        passed_on = hooks.get("into.grad_output")
    assert net.into.bias.grad is not None
    assert torch.allclose(net.into.bias.grad, passed_on.sum(0), atol=1e-5)


class AddTo(kamui.Intervention):
    at: str
    amount: float

    @kamui.hookimpl
    def points(self) -> str:
        return self.at

    @kamui.hookimpl
    def activation(self, value: Tensor, call: Call) -> Tensor:
        assert call.original is not None
        return value + self.amount


def test_interventions_at_a_gradient_point_are_a_chain_and_scopes_nest() -> None:
    net, x = nn.Linear(3, 3), torch.randn(2, 3)
    with HookManager(net) as outer:
        outer.use(AddTo, at="grad_output", amount=1.0)
        with HookManager(net) as inner:
            inner.use(lambda value: value * 10, at="grad_output")
            inner.attach("", "grad_output")
            net(x).sum().backward()
            assert torch.equal(inner.get("grad_output"), torch.full((2, 3), 20.0))
    assert net.bias.grad is not None
    assert torch.equal(net.bias.grad, torch.full((3,), 40.0))


def test_a_gradient_of_another_shape_is_refused_and_an_edit_in_place_too() -> None:
    net, x = nn.Linear(3, 3), torch.randn(2, 3)

    def train(*source: Any, **options: Any) -> None:
        with HookManager(net) as hooks:
            hooks.use(*source, **options)
            (net(x) * 2).pow(2).sum().backward()

    class Writes(kamui.Intervention):
        @kamui.hookimpl
        def points(self) -> str:
            return "grad_output"

        @kamui.hookimpl
        def activation(self, value: Tensor) -> None:
            value.zero_()

    with pytest.raises(ReplacementError, match="at point 'grad_output'"):
        train(lambda value: value[:1], at="grad_output")
    with pytest.raises(InPlaceEditError, match="'grad_output'"):
        train(Writes)


def test_a_module_called_several_times_has_one_gradient_for_each_call_in_their_order() -> None:
    torch.manual_seed(0)
    act = nn.Tanh()

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.act, self.linear = act, nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.linear(self.act(self.linear(x))))

    net, x = Twice(), torch.randn(2, 3)
    first = net.linear(x)
    hidden = first.tanh()
    second = net.linear(hidden)
    out = second.tanh()
    expected = torch.autograd.grad(_loss(out), (hidden, out, first, second))
    with HookManager(net) as hooks:
        hooks.attach("act", "grad_output")
        hooks.attach("act", "grad_input")
        _loss(net(x)).backward()
        found = [hooks.get(f"act.{io}", call=call) for io in ("grad_output", "grad_input") for call in (0, 1)]
        assert next(iter(hooks.get_all())) == "act.grad_output#0"
    assert all(torch.allclose(have, want) for have, want in zip(found, expected, strict=True))


def test_gradients_belong_to_the_forward_pass_whose_graph_it_was() -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    forwards = []

    class Note(kamui.Intervention):
        @kamui.hookimpl
        def points(self) -> str:
            return "grad_output"

        @kamui.hookimpl
        def activation(self, call: Call) -> None:
            forwards.append((call.forward, call.index, call.module is net, call.recomputing))

    with HookManager(net) as hooks:
        hooks.use(Note)
        hooks.attach("", "grad_output")
        losses = [net(torch.randn(2, 3)).sum() * factor for factor in (1.0, 2.0, 3.0)]
        for index in (2, 0, 1):
            losses[index].backward()
        assert [hooks.get("grad_output", forward=n)[0, 0].item() for n in (0, 1, 2)] == [1.0, 2.0, 3.0]
        assert hooks.get("grad_output", forward="all").shape == (6, 1)
    assert forwards == [(2, 0, True, False), (0, 0, True, False), (1, 0, True, False)]


def test_after_several_backward_passes_get_returns_the_last() -> None:
    net = nn.Linear(3, 1)
    with HookManager(net) as hooks:
        hooks.attach("", "grad_output")
        loss = net(torch.randn(2, 3)).sum()
        loss.backward(retain_graph=True)
        (loss * 5).backward()
        assert torch.equal(hooks.get("grad_output"), torch.full((2, 1), 5.0))


def test_a_gradient_that_comes_after_clear_is_not_taken_for_one_of_a_new_pass() -> None:
    net = nn.Linear(3, 1)
    with HookManager(net) as hooks:
        hooks.attach("", "grad_output")
        old = net(torch.randn(2, 3)).sum()
        hooks.clear()
        new = net(torch.randn(2, 3)).sum() * 2
        new.backward()
        old.backward()
        assert torch.equal(hooks.get("grad_output"), torch.full((2, 1), 2.0))


def test_only_the_last_pass_is_kept_where_that_was_asked_for() -> None:
    net = nn.Linear(3, 1)
    with HookManager(net) as hooks:
        hooks.attach("", "grad_output", keep="last")
        first, second = (net(torch.randn(2, 3)).sum() for _ in range(2))
        second.backward()
        first.backward()
        assert hooks.get("grad_output").shape == (2, 1)
        with pytest.raises(NotCapturedError, match="is not kept"):
            hooks.get("grad_output", forward=0)


def test_backward_in_another_thread() -> None:
    net = nn.Linear(3, 1)
    with HookManager(net) as hooks:
        hooks.attach("", "grad_output")
        loss = net(torch.randn(2, 3)).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()
        assert torch.equal(hooks.get("grad_output"), torch.ones(2, 1))


def test_a_gradient_hook_does_nothing_after_the_scope_and_is_gone_from_every_tensor() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Identity())
    before = torch.randn(2, 3, requires_grad=True)
    x = before * 1
    hooks = HookManager(net)

    def run() -> Tensor:
        with hooks:
            hooks.attach("0", "grad_input", replace_with=torch.zeros_like)
            hooks.attach("1", "grad_output", replace_with=torch.zeros_like)
            hooks.attach("0", "grad_output")
            output: Tensor = net(x)
        return output

    with pytest.warns(NeverFiredWarning, match="backward was not called inside the scope"):
        output = run()
    assert not x._backward_hooks
    assert not before._backward_hooks
    assert not output._backward_hooks
    assert not inspect(net)
    output.sum().backward()
    assert before.grad is not None
    assert before.grad.any()
    with pytest.raises(NotCapturedError, match=r"no gradient came to point '0.grad_output' in forward pass 0"):
        hooks.get("0.grad_output")


def test_a_parameter_that_a_module_returns_gets_no_hook() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self) -> Tensor:
            return self.weight

    net = Table()
    with HookManager(net) as hooks:
        hooks.attach("", "grad_output")
        (net() + net.weight).sum().backward()
        assert torch.equal(hooks.get("grad_output"), torch.ones(3))
        assert not net.weight._backward_hooks


def test_what_is_watched_is_freed_with_its_graph() -> None:
    net = Residual(nn.Sequential(nn.Identity(), nn.Flatten(), nn.ReLU(inplace=True)))
    gc.collect()
    gc.disable()
    try:
        with HookManager(net) as hooks:
            hooks.use("cache", at=["branch.*.grad_input", "branch.*.grad_output", "into.grad_output"])
            output = net(torch.randn(2, 4))
            _loss(output).backward()
            dead = weakref.ref(output)
            del output
            assert dead() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda net, x: net.requires_grad_(False)(x), "the value there has no graph: gradients were switched off"),
        (lambda net, x: torch.no_grad()(net)(x), "the value there has no graph"),
        (lambda net, x: torch.inference_mode()(net)(x), "the value there has no graph"),
    ],
)
def test_a_value_without_a_graph_is_said_to_have_none(run: Callable[[nn.Module, Tensor], Tensor], why: str) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh())
    hooks = HookManager(net)

    def look() -> None:
        with hooks:
            hooks.attach("0", "grad_output")
            run(net, torch.randn(2, 3))

    with pytest.warns(NeverFiredWarning, match="the value there has no graph"):
        look()
    with pytest.raises(NotCapturedError, match=f"no gradient came to point '0.grad_output' in forward pass 0: {why}"):
        hooks.get("0.grad_output")
    assert "0.grad_output  called 0 (no graph)" in str(hooks.report())


def test_a_replacement_without_a_graph_has_no_gradient_and_what_follows_has() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    hooks = HookManager(net)

    def train() -> None:
        with hooks:
            hooks.attach("0", replace_with=torch.ones(2, 3))
            hooks.attach("0", "grad_output")
            hooks.attach("1", "grad_output")
            net(torch.randn(2, 3)).sum().backward()

    with pytest.warns(NeverFiredWarning, match=r"'0.grad_output' \(cache\); the value there has no graph"):
        train()
    assert torch.equal(hooks.get("1.grad_output"), torch.ones(2, 3))


def test_the_gradient_is_that_of_the_value_after_all_edits() -> None:
    net, x = nn.Linear(3, 3), torch.randn(2, 3)
    with HookManager(net) as hooks:
        hooks.attach("", "grad_output")
        hooks.use(lambda value: value * 7, at="output")
        net(x).sum().backward()
        assert torch.equal(hooks.get("grad_output"), torch.ones(2, 3))
    assert torch.equal(net.bias.grad, torch.full((3,), 14.0))  # type: ignore[arg-type]


def test_frozen_parameters_do_not_hide_the_gradient_that_passes_them() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).requires_grad_(False))
    with HookManager(net) as hooks:
        hooks.attach("1", "grad_input")
        net(torch.randn(2, 3)).sum().backward()
        wanted = net[1].weight.sum(0).expand(2, 3)
        assert torch.allclose(hooks.get("1.grad_input"), wanted)


def test_gradients_keep_the_dtype_of_the_value() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Identity()).bfloat16()
    with HookManager(net) as hooks:
        hooks.use("cache", at="*.grad_output")
        net(torch.randn(2, 3, dtype=torch.bfloat16)).sum().backward()
        assert {value.dtype for value in hooks.get_all().values()} == {torch.bfloat16}


def test_a_selector_picks_one_tensor_and_a_keyword_argument_is_found() -> None:
    class Pair(nn.Module):
        def forward(self, *, x: Tensor, y: Tensor) -> dict[str, Tensor]:
            return {"sum": x + y, "product": x * y}

    net = Pair()
    x, y = (torch.randn(2, 3, requires_grad=True) for _ in range(2))
    with HookManager(net) as hooks:
        hooks.attach("", "grad_output[product]")
        hooks.attach("", "grad_input[y]")
        hooks.attach("", "grad_input")
        output = net(x=x, y=y)
        (output["sum"] * 2 + output["product"] * 3).sum().backward()
        assert torch.equal(hooks.get("grad_output[product]"), torch.full((2, 3), 3.0))
        assert torch.allclose(hooks.get("grad_input[y]"), 2 + 3 * x)
        assert torch.allclose(hooks.get("grad_input"), 2 + 3 * y)


def test_the_output_of_a_hugging_face_model_and_of_a_module_whose_input_needs_no_gradient() -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    model = transformers.BertModel(config).eval()
    with HookManager(model) as hooks:
        hooks.attach("", "grad_output")
        hooks.attach("embeddings.word_embeddings", "grad_output")
        model(input_ids=torch.tensor([[1, 2, 3]])).last_hidden_state.sum().backward()
        assert torch.equal(hooks.get("grad_output"), torch.ones(1, 3, 16))
        assert hooks.get("embeddings.word_embeddings.grad_output").shape == (1, 3, 16)


def _attention_by_hand(q: Tensor, k: Tensor, v: Tensor) -> dict[str, Tensor]:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    causal = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
    return {"q": q, "k": k, "v": v, "pre_softmax": scores, "weights": weights, "z": weights @ v}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.heads(x)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def heads(self, x: Tensor) -> list[Tensor]:
        return [part.view(2, 5, 2, 4).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1)]


def test_the_gradients_inside_attention() -> None:
    torch.manual_seed(0)
    net, x = Attention(), torch.randn(2, 5, 8)
    values = _attention_by_hand(*net.heads(x))
    expected = dict(zip(values, torch.autograd.grad(_loss(values["z"]), list(values.values())), strict=True))
    for io, wanted in expected.items():
        bare = net(x)
        with HookManager(net) as hooks:
            hooks.attach("", f"grad_{io}")
            output = net(x)
            _loss(output).backward()
            assert torch.allclose(hooks.get(f"grad_{io}"), wanted, atol=1e-5), io
        if io in ("q", "k", "v", "z"):
            assert torch.equal(output, bare)
        assert torch.allclose(output, bare, atol=1e-6)
    with HookManager(net) as hooks:
        for io in expected:
            hooks.attach("", f"grad_{io}")
            hooks.attach("", io)
        _loss(net(x)).backward()
        assert all(torch.allclose(hooks.get(f"grad_{io}"), wanted, atol=1e-5) for io, wanted in expected.items())


def test_one_tensor_that_is_query_key_and_value_has_three_gradients() -> None:
    class Bare(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    torch.manual_seed(0)
    x = torch.randn(2, 2, 5, 4, requires_grad=True)
    q, k, v = (x.view_as(x) for _ in range(3))
    expected = torch.autograd.grad(_loss(_attention_by_hand(q, k, v)["z"]), (q, k, v))
    with HookManager(Bare()) as hooks:
        for io in ("grad_q", "grad_k", "grad_v"):
            hooks.attach("", io)
        _loss(hooks.run(x)).backward()
        found = [hooks.get(io) for io in ("grad_q", "grad_k", "grad_v")]
    assert all(torch.allclose(have, want, atol=1e-5) for have, want in zip(found, expected, strict=True))
    assert not x._backward_hooks


def test_the_gradient_of_the_weights_is_replaced() -> None:
    torch.manual_seed(0)
    net, x = Attention(), torch.randn(2, 5, 8)
    with HookManager(net) as hooks:
        hooks.attach("", "grad_weights", replace_with=torch.zeros_like)
        _loss(net(x)).backward()
    assert net.qkv.weight.grad is not None
    assert not net.qkv.weight.grad[:16].any()
    assert net.qkv.weight.grad[16:].any()


def test_without_a_graph_the_fused_kernel_gives_the_output() -> None:
    torch.manual_seed(0)
    net, x = Attention(), torch.randn(2, 5, 8)

    def look() -> None:
        with torch.no_grad(), HookManager(net) as hooks:
            bare = F.scaled_dot_product_attention(*net.heads(x), is_causal=True)
            hooks.attach("", "grad_weights")
            assert torch.equal(net(x), bare)

    with pytest.warns(NeverFiredWarning, match="no graph"):
        look()


def test_every_gradient_point_of_the_reference_model(model: Transformer, token_ids: Tensor) -> None:
    points = ["embed.grad_output", "unembed.grad_input", "blocks.*.ffn.grad_mid", "blocks.-1.grad_output"]
    points += [f"blocks.*.attn.grad_{io}" for io in ("input", "output", "q", "k", "v", "z", "weights", "pre_softmax")]
    with HookManager(model) as hooks:
        hooks.use("cache", at=points)
        hooks.attach("blocks.1.ffn", "mid", detach=False, copy=False)
        model(token_ids).pow(2).sum().backward(inputs=list(model.parameters()), retain_graph=True)
        shapes = {point: tuple(value.shape) for point, value in hooks.get_all().items()}
        mid = hooks.get("blocks.1.ffn.mid")
        assert shapes["blocks.1.ffn.grad_mid"] == (2, 7, 24)
        assert shapes["blocks.0.attn.grad_weights"] == (2, 2, 7, 7)
        assert len(shapes) == 22
        (wanted,) = torch.autograd.grad(hooks.run(token_ids).pow(2).sum(), hooks.get("blocks.1.ffn.mid"))
        assert torch.allclose(hooks.get("blocks.1.ffn.grad_mid"), wanted)
        assert mid.grad_fn is not None


def test_positions_and_heads_are_chosen_in_gradients_as_in_values(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.0", "grad_output", positions=-1)
        hooks.attach("blocks.0.attn", "grad_k", heads=1)
        hooks.attach("blocks.1", "grad_output")
        model(token_ids)[:, -1].sum().backward()
        assert hooks.get("blocks.0.grad_output").shape == (2, 1, 16)
        assert hooks.get("blocks.0.attn.grad_k").shape == (2, 1, 7, 8)
        assert not hooks.get("blocks.1.grad_output")[:, :-1].any()


def test_a_capture_with_its_graph_reaches_the_model_and_can_retain_its_gradient() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1)), torch.randn(2, 3)
    with HookManager(net) as hooks:
        hooks.attach("0", detach=False, copy=False)
        hooks.attach("1", detach=False)
        hooks.attach("0", "grad_output")
        output = net(x)
        value = hooks.get("0.output")
        value.retain_grad()
        (output.sum() + hooks.get("1.output").sum()).backward()
        assert torch.equal(hooks.get("0.grad_output"), value.grad)  # type: ignore[arg-type]
    assert net[0].weight.grad is not None


def test_gradients_of_gradients() -> None:
    net, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), torch.randn(2, 3, requires_grad=True)
    with HookManager(net) as hooks:
        hooks.attach("0", "grad_output", detach=False)
        (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        assert hooks.get("0.grad_output").requires_grad
        first.pow(2).sum().backward()
    assert net[0].weight.grad is not None


def test_inside_a_transform_a_gradient_point_is_refused_with_the_remedy() -> None:
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    parameters = {name: value.detach() for name, value in net.named_parameters()}

    def loss(values: dict[str, Tensor], row: Tensor) -> Tensor:
        return functional_call(net, values, (row,)).sum()

    for io in ("grad_output", "grad_input"):
        with HookManager(net) as hooks:
            hooks.attach("", io)
            with pytest.raises(TransformError, match=f"point '{io}' is a gradient point, and the model runs inside"):
                grad(loss)(parameters, x)
            with pytest.raises(TransformError, match=r"inside a torch.func transform"):
                vmap(net)(x)


def test_a_gradient_point_is_named_as_its_twin(model: Transformer) -> None:
    point = HookPoint("lstm.grad_output[1][0]")
    assert (point.forward, point.forward_io, point.is_gradient) == ("lstm.output[1][0]", "output", True)
    assert HookPoint("a.q").forward == "a.q"
    with HookManager(model) as hooks:
        assert hooks.attach("blocks.0.ffn", "grad_mid") == ("blocks.0.ffn.grad_mid",)


def test_gradient_points_leave_nothing_on_the_model(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        hooks.use("cache", at=["blocks.*.grad_output", "blocks.*.attn.grad_input", "blocks.*.ffn.grad_mid"])
        hooks.attach("blocks.0.attn", "grad_q")
        run.apply(lambda net: net(token_ids).pow(2).sum().backward())
        assert hooks.get("blocks.0.attn.grad_q").any()
