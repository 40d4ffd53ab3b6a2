"""Models inside the transforms of `torch.func`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jvp, vmap

from kamui.errors import NotCapturedError
from kamui.hooks import HookManager

X = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def weights_of(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in net.named_parameters()}


def test_functional_call_with_other_weights_is_observed_and_changed(net: nn.Linear) -> None:
    zeros = {name: torch.zeros_like(value) for name, value in net.named_parameters()}
    with HookManager(net) as hooks:
        hooks.use(lambda value: value + 1, at="output")
        hooks.attach("")
        assert (functional_call(net, zeros, (X,)) == 1).all()
        assert (hooks.get("output") == 1).all()


def test_a_capture_under_vmap_is_refused(net: nn.Linear) -> None:
    with HookManager(net) as hooks:
        hooks.attach("")
        with pytest.raises(NotCapturedError, match=r"inside torch\.func\.vmap it is one sample's"):
            vmap(net)(X)
        with pytest.raises(NotCapturedError, match=r"inside torch\.func\.vmap it is one sample's"):
            vmap(grad(lambda x: net(x).sum()))(X)
        assert hooks.report().dropped == 2


def test_an_edit_under_vmap_acts_on_each_sample(net: nn.Linear) -> None:
    with HookManager(net) as hooks:
        hooks.use(lambda value: value * 2, at="output")
        twice = vmap(net)(X)
    assert torch.allclose(twice, 2 * net(X))


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_what_is_captured_under_grad_outlives_it_as_a_plain_tensor(net: nn.Linear) -> None:
    def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, weights, (x,)).pow(2).sum()  # type: ignore[no-any-return]

    bare = grad(loss)(weights_of(net), X)
    with HookManager(net) as hooks:
        hooks.attach("")
        seen = grad(loss)(weights_of(net), X)
        captured = hooks.get("output")
        assert not torch._C._functorch.is_functorch_wrapped_tensor(captured)
        assert captured.numpy().tolist() == net(X).tolist()
        hessian(lambda x: functional_call(net, weights_of(net), (x,)).pow(2).sum())(X[:1])
        jvp(lambda x: functional_call(net, weights_of(net), (x,)), (X,), (X,))
        assert torch.equal(hooks.get("output"), net(X))
    assert all(torch.equal(seen[name], bare[name]) for name in bare)


def test_an_edit_under_grad_is_part_of_what_is_differentiated(net: nn.Linear) -> None:
    with HookManager(net) as hooks:
        hooks.use(lambda value: value * 3, at="output")
        tripled = grad(lambda x: net(x).sum())(X)
    assert torch.allclose(tripled, 3 * grad(lambda x: net(x).sum())(X))
