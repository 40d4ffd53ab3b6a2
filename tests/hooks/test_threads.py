from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

from kamui.errors import ScopeError
from kamui.hooks import HookManager, inspect
from kamui.testing import leaves_no_trace

X = torch.ones(1, 3)


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3))


def in_thread(work: Callable[[], Any]) -> Any:
    """Return what `work` gives, or the exception that it raises, in another thread."""
    results: list[Any] = []

    def target() -> None:
        try:
            results.append(work())
        except BaseException as error:
            results.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join(20)
    return results[0]


def test_two_threads_with_a_scope_each_do_not_see_each_other(net: nn.Sequential) -> None:
    barrier = threading.Barrier(2, timeout=20)
    results: dict[int, tuple[list[Tensor], Tensor]] = {}

    def work(number: int) -> None:
        with torch.no_grad(), HookManager(net) as hooks:
            hooks.use(lambda value: value + number, at="0.output")
            hooks.attach("0")
            barrier.wait()
            outputs = [net(X * number) for _ in range(20)]
            barrier.wait()
            results[number] = outputs, hooks.get("0.output", forward="all")

    with leaves_no_trace(net):
        threads = [threading.Thread(target=work, args=(number,)) for number in (10, 20)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
    for number, (outputs, captured) in results.items():
        expected = net(X * number) + number
        assert all(torch.allclose(output, expected) for output in outputs)
        assert torch.allclose(captured, expected.expand(20, 3))


@pytest.mark.filterwarnings("ignore:the model ran")
def test_a_thread_without_the_scope_has_the_bare_model(net: nn.Sequential) -> None:
    bare = net(X)
    with HookManager(net) as hooks:
        hooks.use(lambda value: value + 100, at="0.output")
        assert torch.equal(in_thread(lambda: net(X)), bare)
        assert torch.equal(net(X), bare + 100)
        assert (hooks.report().finished, hooks.report().foreign) == (1, 1)


def test_a_scope_that_is_open_to_all_acts_in_every_thread(net: nn.Sequential) -> None:
    bare = net(X)
    with HookManager(net, isolated=False) as hooks:
        hooks.use(lambda value: value + 100, at="0.output")
        assert torch.equal(in_thread(lambda: net(X)), bare + 100)

        def with_own() -> Tensor:
            with HookManager(net) as own:
                own.use(lambda value: value * 2, at="0.output")
                return net(X)

        assert torch.equal(in_thread(with_own), (bare + 100) * 2)
        assert (hooks.report().finished, hooks.report().foreign) == (2, 0)


def test_a_scope_closed_in_another_thread_is_gone_and_that_thread_is_told(net: nn.Sequential) -> None:
    bare = net(X)
    with leaves_no_trace(net):
        hooks = HookManager(net)
        hooks.__enter__()
        hooks.use(lambda value: value + 100, at="0.output")
        error = in_thread(lambda: hooks.__exit__(None, None, None))
        assert isinstance(error, ScopeError)
        assert str(error) == (
            "this scope was closed in another thread or task than opened it; it is gone from the model"
        )
        assert inspect(net) == []
        assert torch.equal(net(X), bare)
        with HookManager(net) as other:
            other.use(lambda value: value + 1, at="0.output")
            assert torch.equal(net(X), bare + 1)


def test_tasks_with_a_scope_each_do_not_see_each_other(net: nn.Sequential) -> None:
    bare = net(X)

    async def work(number: int) -> list[Tensor]:
        outputs = []
        with HookManager(net) as hooks:
            hooks.use(lambda value: value + number, at="0.output")
            for _ in range(3):
                await asyncio.sleep(0)
                outputs.append(net(X))
        return outputs

    async def both() -> list[list[Tensor]]:
        return await asyncio.gather(work(10), work(20))

    with leaves_no_trace(net):
        for number, outputs in zip((10, 20), asyncio.run(both()), strict=True):
            assert all(torch.equal(output, bare + number) for output in outputs)


def test_a_task_started_inside_a_scope_has_it(net: nn.Sequential) -> None:
    async def run() -> Tensor:
        return await asyncio.create_task(asyncio.to_thread(net, X))

    with HookManager(net) as hooks:
        hooks.use(lambda value: value * 0, at="0.output")
        assert (asyncio.run(run()) == 0).all()


class Waits(nn.Module):
    """Attention that waits for a signal before it attends."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Identity()
        self.running, self.may_go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.running.set()
        assert self.may_go.wait(20)
        return F.scaled_dot_product_attention(x, x, x)


def test_a_scope_that_ends_while_another_thread_attends_leaves_that_thread_usable() -> None:
    net, x = Waits(), torch.randn(1, 1, 3, 4)
    expected = F.scaled_dot_product_attention(x, x, x)
    results: list[Any] = []
    closed = threading.Event()

    def work() -> None:
        results.append(net(x))
        assert closed.wait(20)
        results.append(net(x))
        with HookManager(net) as own:
            own.use(lambda value: value * 0, at="weights")
            results.append(net(x))
        results.append(list(_get_current_function_mode_stack()))

    with HookManager(net, isolated=False) as hooks:
        hooks.use(lambda value: value * 0, at="weights")
        thread = threading.Thread(target=work)
        thread.start()
        assert net.running.wait(20)
    net.may_go.set()
    closed.set()
    thread.join(20)
    bare, again, own, modes = results
    assert torch.equal(bare, expected)
    assert torch.equal(again, expected)
    assert (own == 0).all()
    assert modes == []


def test_edits_are_applied_again_when_another_thread_runs_the_backward_pass() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 1))

    def gradient(recompute: bool) -> Tensor:
        net.zero_grad()
        with HookManager(net) as hooks:
            hooks.use(lambda value: value + 3, at="0.output")
            hooks.attach("0")
            output = checkpoint(net, X, use_reentrant=False) if recompute else net(X)
            in_thread(output.sum().backward)
            assert (hooks.report().finished, hooks.report().foreign) == (1, 0)
            assert len(hooks.get_all()) == 1
        assert net[2].weight.grad is not None
        return net[2].weight.grad.clone()

    torch.testing.assert_close(gradient(recompute=True), gradient(recompute=False))


def test_a_shared_scope_that_closes_does_not_break_a_forward_that_runs_elsewhere() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    inside, closed = threading.Event(), threading.Event()

    def wait(value: Tensor) -> None:
        inside.set()
        assert closed.wait(10)

    hooks = HookManager(net, isolated=False)
    given: list[Tensor] = []
    with hooks:
        hooks.use(wait, at="0.output")
        worker = threading.Thread(target=lambda: given.append(net(torch.ones(1, 3))))
        worker.start()
        assert inside.wait(10)
    closed.set()
    worker.join(10)
    assert torch.equal(given[0], net(torch.ones(1, 3)))
