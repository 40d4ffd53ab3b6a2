from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from kamui import Intervention, hookimpl
from kamui.errors import NotCapturedError
from kamui.hooks import Call, Captures, HookManager, HookPoint


class Keep(Intervention):
    """Keeps what passes, as it is."""

    at: str
    live: bool = False

    def __post_init__(self) -> None:
        self.captures = Captures()

    @hookimpl
    def points(self) -> str:
        return self.at

    @hookimpl
    def activation(self, point: HookPoint, value: Tensor, call: Call) -> None:
        self.captures.add(point, value.detach() if self.live else value.detach().clone(), call, live=self.live)


def test_any_intervention_with_captures_can_be_read_from_the_scope() -> None:
    net = nn.Linear(3, 2)
    with HookManager(net) as hooks:
        keep = hooks.use(Keep, at="output")
        net(torch.ones(4, 3))
        net(torch.ones(5, 3))
        assert hooks.get("output").shape == (5, 2)
        assert isinstance(keep, Keep)
        assert keep.captures.forwards == (0, 1)
        assert keep.captures.bytes() == 9 * 2 * 4
        assert keep.captures.joined("output", None) is not None
        assert keep.captures.joined("input", None) is None
        keep.captures.clear()
        assert keep.captures.bytes() == 0


def test_a_live_value_that_was_written_to_is_no_longer_handed_out() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3))
    with torch.no_grad(), HookManager(net) as hooks:
        hooks.use(Keep, at="0.output", live=True)
        hooks.use(Keep, at="2.output", live=True)
        net(torch.ones(1, 3))
        assert hooks.get("2.output").shape == (1, 3)
        with pytest.raises(NotCapturedError, match="no longer what was captured: it was written to in place after"):
            hooks.get("0.output")


def test_a_capture_keeps_no_input_and_no_graph_alive() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    x = torch.randn(4, 8)
    alive = weakref.ref(x)
    with HookManager(net) as hooks:
        hooks.attach("0")
        y = net(x)
        del x, y
        assert alive() is None
        assert hooks.get("0.output").grad_fn is None


def test_a_scope_that_ended_keeps_neither_model_nor_itself_alive() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    with HookManager(net) as hooks:
        hooks.attach("*")
        net(torch.ones(1, 8))
    alive = [weakref.ref(net), weakref.ref(hooks)]
    del net, hooks
    gc.collect()
    assert [each() for each in alive] == [None, None]


def test_one_samples_value_inside_vmap_is_refused_and_an_edit_works() -> None:
    net, x = nn.Linear(3, 1), torch.randn(4, 3)
    weights = {name: parameter.detach() for name, parameter in net.named_parameters()}

    def loss(weights: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(net, weights, (sample,)).sum()

    with HookManager(net) as hooks:
        hooks.use(lambda value: value * 2, at="output")
        assert torch.equal(vmap(net)(x), net(x))
        doubled = vmap(grad(loss), in_dims=(None, 0))(weights, x)
        torch.testing.assert_close(doubled["weight"][:, 0], 2 * x)
        hooks.attach("")
        for transformed in (vmap(net), vmap(lambda sample: grad(loss)(weights, sample)["bias"])):
            with pytest.raises(NotCapturedError, match=r"'output' cannot be kept: inside torch\.func\.vmap it is one"):
                transformed(x)
        grad(loss)(weights, x)
        assert hooks.get("output").shape == (4, 1)
