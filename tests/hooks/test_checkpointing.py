"""Activation checkpointing of both kinds, against the same model without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import kamui
from kamui.errors import ScopeClosedError
from kamui.hooks import Call, HookManager

kinds = pytest.mark.parametrize("use_reentrant", [True, False])


class Net(nn.Module):
    """A layer, a part that may be checkpointed, and a layer."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.part = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), nn.ReLU(inplace=True))
        self.last = nn.Linear(3, 1)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.use_reentrant is None:
            hidden = self.part(hidden)
        else:
            hidden = checkpoint(self.part, hidden, use_reentrant=self.use_reentrant)
        return self.last(hidden)


def _nets(use_reentrant: bool) -> tuple[Net, Net, Tensor]:
    torch.manual_seed(0)
    net, plain = Net(use_reentrant), Net()
    plain.load_state_dict(net.state_dict())
    return net, plain, torch.randn(2, 3)


def _gradients(net: nn.Module) -> list[Tensor]:
    found = [parameter.grad for parameter in net.parameters()]
    net.zero_grad()
    return [gradient for gradient in found if gradient is not None]


def _equal(found: list[Tensor], wanted: list[Tensor]) -> bool:
    return len(found) == len(wanted) and all(map(torch.allclose, found, wanted))


EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "a shift": lambda value: value + 3.0,
    "another number of saved tensors": lambda value: value.sin() * 2,
    "a constant": lambda value: torch.full_like(value, 0.3).detach(),
}


@kinds
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("point", ["part.0.output", "part.2.input"])
def test_an_edit_acts_again_in_the_recomputation(use_reentrant: bool, edit: str, point: str) -> None:
    net, plain, x = _nets(use_reentrant)
    for one in (net, plain):
        with HookManager(one) as hooks:
            hooks.use(EDITS[edit], at=point)
            one(x).sum().backward()
    assert _equal(_gradients(net), _gradients(plain))


@kinds
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("point", ["part.0.output", "part.2.input"])
def test_backward_after_the_scope_is_refused_where_it_repeats_an_edit(
    use_reentrant: bool, edit: str, point: str
) -> None:
    net, _, x = _nets(use_reentrant)
    with HookManager(net) as hooks:
        hooks.use(EDITS[edit], at=point)
        loss = net(x).sum()
    with pytest.raises(ScopeClosedError) as caught:
        loss.backward()
    message = str(caught.value)
    assert message.endswith(
        f"changed point {point!r} in a checkpointed part of the model, and backward has to compute that part again, "
        f"but the scope has closed; call backward inside it"
    )


@kinds
def test_an_edit_in_attention_after_the_scope_is_refused_too(use_reentrant: bool) -> None:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attends()

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x * 2, use_reentrant=use_reentrant)

    net, x = Whole(), torch.randn(1, 2, 3, 4, requires_grad=True)
    with HookManager(net) as hooks:
        hooks.attach("inner", "weights", replace_with=lambda weights: weights.flip(-1))
        loss = net(x).sum()
    with pytest.raises(ScopeClosedError, match=r"'patching' changed point 'inner.weights' in a checkpointed part"):
        loss.backward()


@kinds
def test_the_scope_may_close_where_an_edit_is_outside_the_checkpointed_part(use_reentrant: bool) -> None:
    net, plain, x = _nets(use_reentrant)
    for one in (net, plain):
        with HookManager(one) as hooks:
            hooks.use(lambda value: value + 3.0, at=["first.output", "last.output"])
            loss = one(x).pow(2).sum()
        loss.backward()
    assert _equal(_gradients(net), _gradients(plain))


@kinds
def test_the_scope_may_close_where_values_were_only_observed(use_reentrant: bool) -> None:
    net, plain, x = _nets(use_reentrant)
    with HookManager(net) as hooks:
        hooks.use("cache", at="part.*.output")
        hooks.use(lambda value: None, at="part.output")
        loss = net(x).sum()
    loss.backward()
    plain(x).sum().backward()
    assert _equal(_gradients(net), _gradients(plain))


@kinds
def test_of_two_scopes_the_closed_one_is_missed(use_reentrant: bool) -> None:
    net, _, x = _nets(use_reentrant)
    with HookManager(net) as outer:
        outer.use(lambda value: value * 2, at="part.0.output")
        with HookManager(net) as inner:
            inner.attach("part.0", replace_with=lambda value: value + 1)
            loss = net(x).sum()
        with pytest.raises(ScopeClosedError, match="intervention 'patching'"):
            loss.backward()


@kinds
def test_nothing_is_captured_twice_and_callbacks_are_told_of_the_recomputation(use_reentrant: bool) -> None:
    net, _, x = _nets(use_reentrant)
    told = []

    class Tell(kamui.Intervention):
        @kamui.hookimpl
        def points(self) -> str:
            return "part.0.output"

        @kamui.hookimpl
        def activation(self, call: Call) -> None:
            told.append((call.forward, call.recomputing))

    with HookManager(net) as hooks:
        hooks.use(Tell)
        hooks.attach("part.0")
        net(x).sum().backward()
        net(x).sum().backward()
        assert hooks.get("part.0.output", forward="all").shape == (4, 3)
        assert hooks.report().finished == 2
        assert hooks.report().dropped == 0
    assert [recomputing for _, recomputing in told] == [False, True, False, True]


POINTS = ["part.0.grad_output", "part.2.grad_input", "part.2.grad_output", "part.3.grad_input", "part.grad_output"]
POINTS += ["part.grad_input", "last.grad_input", "first.grad_output"]


@kinds
def test_gradient_points_fire_once_with_the_right_gradient(use_reentrant: bool) -> None:
    net, plain, x = _nets(use_reentrant)
    found: list[dict[str, Tensor]] = []
    for one in (net, plain):
        with HookManager(one) as hooks:
            hooks.use("cache", at=POINTS)
            one(x).pow(2).sum().backward()
            found.append(hooks.get_all())
            calls = {row.point: row.calls for row in hooks.report().rows}
        assert calls == dict.fromkeys(POINTS, 1), calls
    assert _equal(list(found[0].values()), list(found[1].values()))
    assert _equal(_gradients(net), _gradients(plain))


@kinds
def test_gradients_are_filed_under_the_pass_that_is_repeated(use_reentrant: bool) -> None:
    net, plain, _ = _nets(use_reentrant)
    inputs = [torch.randn(n, 3) for n in (2, 3, 4)]
    forwards: list[int] = []

    def note(value: Tensor, call: Call) -> None:
        forwards.append(call.forward)

    with HookManager(net) as hooks, HookManager(plain) as oracle:
        hooks.attach("part.0", "grad_output")
        hooks.use(note, at="part.0.grad_output")
        oracle.attach("part.0", "grad_output")
        losses = [net(x).pow(2).sum() for x in inputs]
        for index in (1, 2, 0):
            losses[index].backward()
        for x in inputs:
            plain(x).pow(2).sum().backward()
        for index in range(3):
            wanted = oracle.get("part.0.grad_output", forward=index)
            assert torch.allclose(hooks.get("part.0.grad_output", forward=index), wanted)
    assert forwards == [1, 2, 0]


@kinds
def test_calls_of_one_module_in_several_checkpointed_parts_keep_their_order(use_reentrant: bool) -> None:
    class Again(nn.Module):
        def __init__(self, checkpointed: bool) -> None:
            super().__init__()
            self.block, self.checkpointed = nn.Sequential(nn.Linear(3, 3), nn.Tanh()), checkpointed

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(3):
                x = checkpoint(self.block, x, use_reentrant=use_reentrant) if self.checkpointed else self.block(x)
            return x

    torch.manual_seed(0)
    net, plain, x = Again(True), Again(False), torch.randn(2, 3, requires_grad=True)
    plain.load_state_dict(net.state_dict())
    with HookManager(net) as hooks, HookManager(plain) as oracle:
        for scope, one in ((hooks, net), (oracle, plain)):
            scope.attach("block.0", "grad_output")
            one(x).pow(2).sum().backward()
        for call in range(3):
            wanted = oracle.get("block.0.grad_output", call=call)
            assert torch.allclose(hooks.get("block.0.grad_output", call=call), wanted)


@kinds
def test_a_replaced_gradient_goes_on(use_reentrant: bool) -> None:
    net, plain, x = _nets(use_reentrant)
    for one in (net, plain):
        with HookManager(one) as hooks:
            hooks.attach("part.1", "grad_output", replace_with=lambda gradient: gradient * 3 + 1)
            hooks.attach("part.2", "grad_input", replace_with=lambda gradient: gradient - 1)
            one(x).sum().backward()
    assert _equal(_gradients(net), _gradients(plain))


def _attention_net(use_reentrant: bool | None) -> nn.Module:
    class Attends(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attends()

        def forward(self, x: Tensor) -> Tensor:
            if use_reentrant is None:
                return self.inner(x * 2)
            output: Any = checkpoint(self.inner, x * 2, use_reentrant=use_reentrant)
            return output

    return Whole()


@kinds
def test_the_gradients_inside_attention_are_those_of_the_model_without_checkpointing(use_reentrant: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    found = []
    for kind in (use_reentrant, None):
        net = _attention_net(kind)
        with HookManager(net) as hooks:
            for io in ("grad_q", "grad_k", "grad_v", "grad_pre_softmax", "grad_weights", "grad_z"):
                hooks.attach("inner", io)
            net(x).pow(3).sum().backward()
            found.append(list(hooks.get_all().values()))
    assert len(found[0]) == 6
    assert _equal(*found)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # inside a reentrant part, says torch
def test_parts_inside_parts_are_refused_too() -> None:
    for inner_kind in (True, False):
        for outer_kind in (True, False):
            torch.manual_seed(0)
            inner, x = Net(inner_kind), torch.randn(2, 3, requires_grad=True)

            class Outer(nn.Module):
                def __init__(self, inner: nn.Module, kind: bool) -> None:
                    super().__init__()
                    self.inner, self.kind = inner, kind

                def forward(self, x: Tensor) -> Tensor:
                    output: Any = checkpoint(self.inner, x, use_reentrant=self.kind)
                    return output

            net = Outer(inner, outer_kind)
            with HookManager(net) as hooks:
                hooks.use("cache", at="inner.part.0.grad_output")
                net(x).pow(2).sum().backward()
                found = hooks.get("inner.part.0.grad_output")
                hooks.attach("inner.part.0", replace_with=lambda value: value + 1)
                loss = net(x).sum()
            plain = Net()
            plain.load_state_dict(inner.state_dict())
            with HookManager(plain) as oracle:
                oracle.attach("part.0", "grad_output")
                plain(x).pow(2).sum().backward()
                assert torch.allclose(found, oracle.get("part.0.grad_output")), (inner_kind, outer_kind)
            with pytest.raises(ScopeClosedError, match=r"'inner.part.0.output'"):
                loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_hugging_face_model(use_reentrant: bool) -> None:
    transformers: Any = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.randint(32, (2, 6))
    points = ["transformer.h.0.attn.grad_output", "transformer.h.1.mlp.grad_input", "transformer.h.0.grad_output"]
    found = []
    for checkpointed in (False, True):
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
            model.enable_input_require_grads()
        with HookManager(model) as hooks:
            hooks.use("cache", at=points)
            hooks.use(lambda value: value * 1.5, at="transformer.h.0.mlp.output")
            model(ids, labels=ids, use_cache=False).loss.backward()
            found.append((list(hooks.get_all().values()), _gradients(model)))
    assert _equal(found[0][0], found[1][0])
    assert _equal(found[0][1], found[1][1])


@kinds
@pytest.mark.parametrize("grad", [True, False])
def test_a_whole_model_that_is_checkpointed_is_guarded_too(use_reentrant: bool, grad: bool) -> None:
    _, net, x = _nets(use_reentrant)
    x.requires_grad_()
    with HookManager(net) as hooks:
        hooks.use(lambda value: value + 1, at="part.*.output")
        with torch.set_grad_enabled(grad):
            loss: Any = checkpoint(net, x, use_reentrant=use_reentrant)
    if not grad:
        assert not loss.requires_grad
        return
    with pytest.raises(ScopeClosedError, match=r"changed point 'part.0.output' in a checkpointed part"):
        loss.sum().backward()
