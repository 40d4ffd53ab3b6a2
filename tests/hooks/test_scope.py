"""What interventions are told, and what stays when anything of theirs fails."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kamui import Intervention, hookimpl
from kamui.errors import InterventionContractError, ScopeClosedError, ScopeError, UnknownPointError
from kamui.hooks import HookManager, inspect
from kamui.hooks.context import active_scopes
from kamui.testing import leaves_no_trace

ERRORS = [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit]


class Breaks(Intervention):
    """Raises in one of its callbacks."""

    where: str
    error: type[BaseException] = ValueError
    at: str = "0.output"

    def __post_init__(self) -> None:
        self.log: list[str] = []

    def _reach(self, name: str) -> None:
        self.log.append(name)
        if self.where == name:
            raise self.error(name)

    @hookimpl
    def opened(self) -> None:
        self._reach("opened")

    @hookimpl
    def points(self) -> str:
        self._reach("points")
        return self.at

    @hookimpl
    def forward_started(self) -> None:
        self._reach("forward_started")

    @hookimpl
    def activation(self, value: Tensor) -> Tensor:
        self._reach("activation")
        return value + 1

    @hookimpl
    def forward_finished(self) -> None:
        self._reach("forward_finished")

    @hookimpl
    def closed(self) -> None:
        self._reach("closed")


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


X = torch.ones(2, 3)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["forward_started", "activation", "forward_finished"])
def test_an_error_in_a_pass_keeps_its_type_names_the_intervention_and_drops_the_pass(
    net: nn.Sequential, where: str, error: type[BaseException]
) -> None:
    with leaves_no_trace(net) as run, HookManager(net) as outer:
        outer.attach("0")
        with HookManager(net) as hooks:
            hooks.attach("0")
            breaks = hooks.use(Breaks, where=where, error=error)
            assert isinstance(breaks, Breaks)
            with pytest.raises(error) as caught:
                run(X)
            note = "in intervention 'Breaks' at point '0.output'" if where == "activation" else f"in {where!r} of"
            assert any(note in each for each in caught.value.__notes__)
            breaks.where = "nowhere"
            run(X)
            assert (hooks.report().finished, hooks.report().dropped) == (1, 1)
            assert torch.equal(hooks.get("0.output"), net[0].forward(X) + 1)
        run(X)
        assert torch.equal(outer.get("0.output"), net[0].forward(X))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("where", ["opened", "points"])
def test_an_intervention_that_fails_to_begin_leaves_nothing_of_itself(
    net: nn.Sequential, where: str, error: type[BaseException]
) -> None:
    with leaves_no_trace(net) as run, HookManager(net) as hooks:
        breaks = Breaks(where=where, error=error)
        with pytest.raises(error) as caught:
            hooks.use(breaks)
        assert caught.value.__notes__ == [f"in {where!r} of intervention 'Breaks'"]
        assert breaks.log == (["opened"] if where == "opened" else ["opened", "points", "closed"])
        assert torch.equal(run(X), net[1].forward(net[0].forward(X)))
        assert hooks.report().rows == ()
        hooks.use(lambda value: value * 0, at="1.output")
        assert (run(X) == 0).all()
    assert breaks.log.count("closed") == (0 if where == "opened" else 1)


def test_a_use_whose_second_point_does_not_exist_listens_nowhere(net: nn.Sequential) -> None:
    with HookManager(net) as hooks:
        with pytest.raises(UnknownPointError, match=r"'7\.output'"):
            hooks.use(lambda value: value * 0, at=["0.output", "7.output"])
        with pytest.raises(UnknownPointError):
            hooks.attach("7")
        assert torch.equal(net(X), net[1].forward(net[0].forward(X)))
        assert hooks.report().rows == ()


@pytest.mark.parametrize("error", ERRORS)
def test_an_error_in_closed_is_raised_after_everything_was_closed(
    net: nn.Sequential, error: type[BaseException]
) -> None:
    others = [Breaks(where="nowhere"), Breaks(where="nowhere")]
    with leaves_no_trace(net) as run:
        hooks = HookManager(net)
        hooks.__enter__()
        hooks.use(others[0])
        hooks.use(Breaks, where="closed", error=error)
        hooks.use(others[1])
        run(X)
        with pytest.raises(error) as caught:
            hooks.__exit__(None, None, None)
        assert "in 'closed' of intervention 'Breaks'" in caught.value.__notes__
        assert [other.log[-1] for other in others] == ["closed", "closed"]
        assert inspect(net) == []
        assert active_scopes() == ()
        with pytest.raises(ScopeClosedError):
            hooks.use(Breaks, where="nowhere")


def test_the_error_of_the_block_is_the_one_that_is_seen(net: nn.Sequential) -> None:
    def fail() -> None:
        with HookManager(net) as hooks:
            hooks.use(Breaks, where="closed")
            raise KeyError("mine")

    with leaves_no_trace(net), pytest.raises(KeyError, match="mine") as caught:
        fail()
    assert caught.value.__notes__ == ["and then, while the scope closed: ValueError('closed')"]


@pytest.mark.parametrize("error", ERRORS)
def test_any_exception_in_the_block_leaves_the_model_clean(net: nn.Sequential, error: type[BaseException]) -> None:
    def fail(run: Any) -> None:
        with HookManager(net) as hooks:
            hooks.use(Breaks, where="nowhere")
            run(X)
            raise error

    with leaves_no_trace(net) as run, pytest.raises(error):
        fail(run)


def test_interventions_are_told_in_order_and_closed_in_reverse(net: nn.Sequential) -> None:
    log: list[str] = []

    class Tells(Intervention):
        name: str

        @hookimpl
        def opened(self, scope: HookManager) -> None:
            log.append(f"opened {self.name} {scope.model is net}")

        @hookimpl
        def points(self, model: nn.Module) -> str:
            return "0.output"

        @hookimpl
        def activation(self) -> None:
            log.append(self.name)

        @hookimpl
        def closed(self, scope: HookManager) -> None:
            log.append(f"closed {self.name} {scope.report().finished}")

    with HookManager(net) as hooks:
        hooks.use(Tells, name="a")
        hooks.use(Tells, name="b")
        net(X)
    assert log == ["opened a True", "opened b True", "a", "b", "closed b 1", "closed a 1"]


def logger(log: list[str], **options: bool) -> type[Intervention]:
    class Logs(Intervention):
        name: str

        @hookimpl
        def points(self) -> str:
            return "0.output"

        @hookimpl(**options)
        def activation(self) -> None:
            log.append(self.name)

    return Logs


def test_outer_scopes_come_first_then_tryfirst_plain_and_trylast_each_in_order_of_use(net: nn.Sequential) -> None:
    log: list[str] = []
    first, plain, last = logger(log, tryfirst=True), logger(log), logger(log, trylast=True)
    with HookManager(net) as outer, HookManager(net) as inner:
        for scope, name in ((inner, "inner"), (outer, "outer")):
            for turn in (1, 2):
                for kind, cls in (("last", last), ("plain", plain), ("first", first)):
                    scope.use(cls, name=f"{name} {kind} {turn}")
        net(X)
    kinds = [f"{kind} {turn}" for kind in ("first", "plain", "last") for turn in (1, 2)]
    assert log == [f"{name} {kind}" for name in ("outer", "inner") for kind in kinds]


def test_each_intervention_sees_what_the_one_before_it_returned_and_captures_see_the_last(net: nn.Sequential) -> None:
    with HookManager(net) as hooks:
        hooks.attach("0")
        hooks.use(lambda value: value * 0, at="0.output")
        hooks.use(lambda value: None, at="0.output")
        hooks.use(lambda value: value + 1, at="0.output")
        net(X)
        assert (hooks.get("0.output") == 1).all()
    with HookManager(net) as hooks:
        hooks.use(lambda value: value + 1, at="0.output")
        hooks.use(lambda value: value * 0, at="0.output")
        hooks.attach("0")
        hooks.use("cache", at="0.output", raw=True)
        net(X)
        assert torch.equal(hooks.get("0.output"), net[0].forward(X))


def test_two_uses_are_two_edits_and_one_use_that_names_a_place_twice_is_one() -> None:
    net = nn.Sequential(nn.Identity())
    with HookManager(net) as outer:
        outer.use(lambda value: value + 1, at=["0.output", "*.output", "0.output"])
        outer.use(lambda value: value + 1, at="0.output")
        with HookManager(net) as inner:
            inner.use(lambda value: value + 10, at="0.output")
            assert net(torch.zeros(1)) == 12
        assert net(torch.zeros(1)) == 2
        assert [(row.calls, row.changed) for row in outer.report().rows] == [(2, 2), (2, 2)]


def test_a_shared_module_is_one_place_under_both_of_its_names() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enc = nn.Linear(3, 3)
            self.dec = self.enc

        def forward(self, x: Tensor) -> Tensor:
            return self.dec(torch.tanh(self.enc(x)))

    net = Net()
    with HookManager(net) as hooks:
        hooks.use("cache", at=["enc.output", "dec.output"])
        hooks.use(lambda value: value + 1, at=["dec.output", "enc.output"])
        net(torch.ones(1, 3))
        assert torch.equal(hooks.get("dec.output", call=1), hooks.get("enc.output", call=1))
        assert [(row.calls, row.changed) for row in hooks.report().rows] == [(2, 0), (2, 2)]


@pytest.mark.parametrize("points", [3, [3]])
def test_points_of_another_type_are_refused(net: nn.Sequential, points: Any) -> None:
    class Odd(Intervention):
        @hookimpl
        def points(self) -> Any:
            return points

        @hookimpl
        def activation(self) -> None: ...

    with HookManager(net) as hooks:
        with pytest.raises((InterventionContractError, ValueError), match="3"):
            hooks.use(Odd)
        assert hooks.report().rows == ()


def test_points_may_be_a_generator_and_may_be_none(net: nn.Sequential) -> None:
    class Yields(Intervention):
        @hookimpl
        def points(self, model: nn.Module) -> Iterator[str]:
            for name, _ in model.named_children():
                yield f"{name}.output"

        @hookimpl
        def activation(self) -> None: ...

    class Nowhere(Intervention):
        @hookimpl
        def points(self) -> None: ...

        @hookimpl
        def activation(self) -> None: ...

    with HookManager(net) as hooks:
        hooks.use(Yields)
        hooks.use(Nowhere)
        net(X)
        assert [row.point for row in hooks.report().rows] == ["0.output", "1.output"]


def test_one_instance_is_at_work_in_one_open_scope(net: nn.Sequential) -> None:
    once = Breaks(where="nowhere")
    message = "this instance of intervention 'Breaks' is at work in an open scope; make another one"
    with HookManager(net) as hooks:
        hooks.use(once)
        with pytest.raises(ScopeError, match=message):
            hooks.use(once)
        with HookManager(net) as other, pytest.raises(ScopeError, match=message):
            other.use(once)
        assert torch.equal(net[0](X), net[0].forward(X) + 1)
        assert once.log == ["opened", "points", "forward_started", "activation", "forward_finished"]
    with HookManager(net) as hooks:
        hooks.use(once)
        assert torch.equal(net[0](X), net[0].forward(X) + 1)


def test_an_edit_of_one_call_leaves_the_arguments_of_the_caller_alone(net: nn.Sequential) -> None:
    x = torch.zeros(2, 3)
    with HookManager(net) as hooks:
        hooks.use(lambda value: value + 1, at="input")
        assert torch.equal(net(x), net[1].forward(net[0].forward(x + 1)))
    assert (x == 0).all()
