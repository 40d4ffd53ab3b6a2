"""What of torch.compile a scope cannot see, and the backends that it is used with."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from kamui.errors import NeverFiredWarning, StrictError
from kamui.hooks import HookManager

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.fixture
def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def test_aot_eager_and_training_are_eager_inside_and_compiled_after(net: nn.Module) -> None:
    compiled = torch.compile(net, backend="aot_eager")
    bare = compiled(X)
    with HookManager(compiled) as hooks:  # type: ignore[arg-type]
        hooks.use(lambda value: value * 0, at="0.output")
        assert (compiled(X) == 0).all()
    after = compiled(X)
    assert torch.equal(after, bare)
    after.sum().backward()
    assert net[0].weight.grad is not None  # type: ignore[index, union-attr]


def test_a_model_called_from_a_function_compiled_before_is_told_of(net: nn.Module) -> None:
    compiled = torch.compile(lambda x: net(x) * 2, backend="eager")
    bare = compiled(X)
    hooks = HookManager(net).__enter__()
    hooks.attach("0")
    assert torch.equal(compiled(X), bare)
    with pytest.warns(NeverFiredWarning, match=r"saw no forward pass of its model, .* call the model itself"):
        hooks.__exit__(None, None, None)


def test_a_strict_scope_makes_an_error_of_it(net: nn.Module) -> None:
    compiled = torch.compile(lambda x: net(x) * 2, backend="eager")
    compiled(X)
    hooks = HookManager(net, strict=True).__enter__()
    hooks.attach("0")
    compiled(X)
    with pytest.raises(StrictError, match=r"a call from within a function compiled with torch\.compile cannot be seen"):
        hooks.__exit__(None, None, None)


def test_a_model_that_ran_in_the_scope_is_not_told_of(net: nn.Module) -> None:
    torch.compile(lambda x: net(x) * 2, backend="eager")(X)
    with HookManager(net, strict=True) as hooks:
        hooks.attach("0")
        net(X)
        hooks.clear()
    with HookManager(net, strict=True):
        pass


@pytest.mark.filterwarnings("ignore")  # of torch.compile, which goes through our hooks then
def test_a_function_compiled_inside_the_scope_calls_the_hooks_and_is_bare_after_it(net: nn.Module) -> None:
    def double(x: Tensor) -> Tensor:
        return net(x) * 2  # type: ignore[no-any-return]

    bare = double(X)
    compiled = torch.compile(double, backend="eager")
    with HookManager(net) as hooks:
        hooks.use(lambda value: value * 0, at="0.output")
        assert (compiled(X) == 0).all()
        assert (compiled(X) == 0).all()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(compiled(X), bare)
