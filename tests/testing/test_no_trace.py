from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from kamui.hooks import HookManager
from kamui.testing import leaves_no_trace

X = torch.ones(2, 3)


def hook(*_: Any) -> None: ...


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Dropout(0.5)
        self.b = nn.Linear(3, 3)
        self.b.weight = self.a.weight
        self.config = {"size": 3}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.drop(self.norm(self.a(x))))


TRACES: dict[str, tuple[Callable[[Net], object], str]] = {
    "hook": (lambda net: net.a.register_forward_hook(hook), "module 'a': _forward_hooks is "),
    "hook with keywords": (
        lambda net: net.a.register_forward_pre_hook(hook, with_kwargs=True),
        "_forward_pre_hooks_with_kwargs is [0] where [] is expected",
    ),
    "backward hook": (lambda net: net.b.register_full_backward_hook(hook), "module 'b': _backward_hooks is "),
    "forward": (lambda net: setattr(net.a, "forward", net.a.forward), "module 'a': forward is "),
    "attribute": (lambda net: setattr(net.norm, "note", 3), "module 'norm': note is 3 where nothing is expected"),
    "class": (lambda net: setattr(net.drop, "__class__", nn.Identity), "module 'drop': class is "),
    "mode": (lambda net: net.drop.eval(), "module 'drop': training is False where True is expected"),
    "frozen": (
        lambda net: net.a.bias.requires_grad_(False),
        "parameter 'a.bias': requires_grad is False where True is expected",
    ),
    "values": (lambda net: net.a.bias.data.add_(1), "parameter 'a.bias' has other values"),
    "buffer": (lambda net: net.norm.running_mean.add_(1), "buffer 'norm.running_mean' has other values"),
    "gradient": (lambda net: net(X).sum().backward(), "the gradient of parameter 'a.weight' differs"),
    "untied": (
        lambda net: setattr(net.b, "weight", nn.Parameter(net.b.weight.detach().clone())),
        "parameter 'b.weight' is another object than before",
    ),
    "module": (lambda net: setattr(net, "a", nn.Linear(3, 3)), "module 'a' is another object than before"),
    "state": (lambda net: net.register_buffer("new", X.clone()), "state_dict keys is "),
    "config": (lambda net: net.config.update(size=4), "module '': config is "),
    "grad mode": (lambda net: torch._C._set_grad_enabled(False), "grad mode is False where True is expected"),
}


@pytest.mark.parametrize("name", TRACES)
def test_what_is_left_is_named(name: str) -> None:
    net = Net()
    leave, message = TRACES[name]
    with pytest.raises(AssertionError) as caught, torch.set_grad_enabled(True):
        check(net, leave)
    assert str(caught.value).startswith("something was left on the model: ")
    assert message in str(caught.value)


def check(net: Net, action: Callable[[Net], object]) -> None:
    with leaves_no_trace(net):
        action(net)


def test_a_scope_that_was_left_open_is_named() -> None:
    net = Net()
    hooks = HookManager(net)
    with pytest.raises(AssertionError, match="open scopes is"):
        check(net, lambda net: hooks.__enter__())
    hooks.__exit__(None, None, None)


def test_calls_are_repeated_on_the_twin_with_the_same_random_numbers() -> None:
    net = Net().train()
    before = torch.get_rng_state()
    with leaves_no_trace(net) as run:
        with HookManager(net) as hooks:
            hooks.attach("drop")
            for _ in range(3):
                run(X)
        run.apply(lambda one: one(X * 2).sum().backward())
    assert net.norm.num_batches_tracked == 4
    assert not torch.equal(before, torch.get_rng_state())


def test_a_call_that_raised_may_raise_again_and_passes_to_the_caller() -> None:
    net = Net()
    with leaves_no_trace(net) as run:
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            run(torch.ones(2, 4))
        with HookManager(net) as hooks:
            hooks.use(lambda value: 1 / 0, at="b.output")
            with pytest.raises(ZeroDivisionError):
                run(X)


def test_the_model_is_compared_also_after_an_exception() -> None:
    net = Net()
    with pytest.raises(AssertionError, match="module 'a': _forward_hooks") as caught:
        check(net, lambda net: (net.a.register_forward_hook(hook), [][0]))
    assert isinstance(caught.value.__context__, IndexError)


def test_gradients_that_were_there_before_are_expected() -> None:
    net = Net()
    net(X).sum().backward()
    with leaves_no_trace(net) as run:
        run(X)


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, kamui.testing; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
