from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kamui.hooks import HookManager

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Counts:
    """A backend that counts what it compiles and how often that runs."""

    def __init__(self) -> None:
        self.compiled, self.ran = 0, 0

    def __call__(self, graph: torch.fx.GraphModule, example: Any) -> Callable[..., Any]:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.ran += 1
            return graph.forward(*args)

        return run


@pytest.fixture
def backend() -> Iterator[Counts]:
    torch.compiler.reset()
    yield Counts()
    torch.compiler.reset()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


def wrapped(backend: Counts) -> tuple[nn.Module, str]:
    return torch.compile(Net(), backend=backend), "a.output"  # type: ignore[return-value]


def in_place(backend: Counts) -> tuple[nn.Module, str]:
    model = Net()
    model.compile(backend=backend)
    return model, "a.output"


def part(backend: Counts) -> tuple[nn.Module, str]:
    return nn.Sequential(torch.compile(Net(), backend=backend), nn.Identity()), "0._orig_mod.a.output"


def part_in_place(backend: Counts) -> tuple[nn.Module, str]:
    model = nn.Sequential(Net(), nn.Identity())
    model[0].compile(backend=backend)
    return model, "0.a.output"


@pytest.mark.parametrize("make", [wrapped, in_place, part, part_in_place])
def test_an_edit_takes_effect_on_a_model_that_was_compiled_and_run_before(
    backend: Counts, make: Callable[[Counts], tuple[nn.Module, str]]
) -> None:
    model, point = make(backend)
    bare = model(X)
    held = [dict(vars(module)) for module in model.modules()]
    counted = (backend.compiled, backend.ran)
    with HookManager(model) as hooks:
        hooks.use("cache", at=point, raw=True)
        hooks.use(lambda value: value * 0, at=point)
        assert (model(X) == 0).all()
        assert torch.equal(torch.tanh(hooks.get(point)), bare)
        assert (backend.compiled, backend.ran) == counted
    for module, before in zip(model.modules(), held, strict=True):
        for name in ("forward", "_compiled_call_impl"):
            assert vars(module).get(name) is before.get(name)
    assert torch.equal(model(X), bare)
    assert backend.compiled == counted[0]
    assert backend.ran > counted[1]


@pytest.mark.parametrize("make", [wrapped, in_place])
def test_scopes_that_end_in_another_order_put_the_compiled_model_back_once(
    backend: Counts, make: Callable[[Counts], tuple[nn.Module, str]]
) -> None:
    model, point = make(backend)
    bare = model(X)
    first, second = HookManager(model), HookManager(model)
    first.__enter__()
    second.__enter__()
    second.use(lambda value: value * 0, at=point)
    first.__exit__(None, None, None)
    assert (model(X) == 0).all()
    ran = backend.ran
    second.__exit__(None, None, None)
    assert torch.equal(model(X), bare)
    assert backend.ran == ran + 1


@pytest.mark.parametrize("make", [wrapped, in_place])
def test_an_exception_puts_the_compiled_model_back_too(
    backend: Counts, make: Callable[[Counts], tuple[nn.Module, str]]
) -> None:
    model, point = make(backend)
    bare = model(X)

    def fail() -> None:
        with HookManager(model) as hooks:
            hooks.use(lambda value: 1 / 0, at=point)
            model(X)

    with pytest.raises(ZeroDivisionError):
        fail()
    ran = backend.ran
    assert torch.equal(model(X), bare)
    assert backend.ran == ran + 1


def test_a_deep_copy_of_a_compiled_model_made_inside_is_the_bare_model(backend: Counts) -> None:
    model, point = in_place(backend)
    with HookManager(model) as hooks:
        hooks.use(lambda value: value * 0, at=point)
        twin = copy.deepcopy(model)
    assert torch.equal(twin(X), model(X))
    assert torch.equal(pickle.loads(pickle.dumps(twin))(X), model(X))


def test_a_forward_that_was_set_inside_the_scope_stays(backend: Counts) -> None:
    model, _ = wrapped(backend)

    def forward(x: Tensor) -> Tensor:
        return x

    with HookManager(model):
        model.forward = forward  # type: ignore[method-assign]
    assert vars(model)["forward"] is forward
