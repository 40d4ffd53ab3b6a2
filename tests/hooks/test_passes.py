from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kamui import Intervention, hookimpl
from kamui.errors import CallIndexError, NeverFiredWarning, NotCapturedError
from kamui.hooks import Call, HookManager, suspended
from kamui.hooks.context import active_scopes
from kamui.model import KVCache, Transformer
from kamui.testing import leaves_no_trace


class Twice(nn.Module):
    """Calls one activation function two times."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.b(self.act(self.a(x))))


class Fails(nn.Module):
    """Raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.error: BaseException | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.error is not None:
            raise self.error
        return x


class Watch(Intervention):
    """Writes down the calls of its callbacks."""

    at: str

    def __post_init__(self) -> None:
        self.log: list[Any] = []

    @hookimpl
    def points(self) -> str:
        return self.at

    @hookimpl
    def activation(self, point: str, call: Call) -> None:
        self.log.append((point, call.forward, call.index, type(call.module).__name__))

    @hookimpl
    def forward_started(self, call: Call) -> None:
        self.log.append(("started", call.forward, type(call.module).__name__))

    @hookimpl
    def forward_finished(self, output: Any, call: Call) -> None:
        self.log.append(("finished", call.forward, output))


def test_each_call_of_a_module_in_a_pass_is_kept_and_can_be_changed_by_itself() -> None:
    net, x = Twice(), torch.randn(3, 4)

    def first_alone(value: Tensor, call: Call) -> Tensor | None:
        return value + 1 if call.index == 0 else None

    with HookManager(net) as hooks:
        hooks.attach("act")
        bare = net(x)
        first, second = hooks.get("act.output", call=0), hooks.get("act.output", call=1)
        assert torch.equal(second, bare)
        assert torch.equal(second, hooks.get("act.output", call=-1))
        assert sorted(hooks.get_all()) == ["act.output#0", "act.output#1"]
        with pytest.raises(CallIndexError, match=r"'act.output' was called 2 times in this forward pass; say which"):
            hooks.get("act.output")
        with pytest.raises(
            CallIndexError, match=r"there is no call 2 of point 'act.output': it was called 2 time\(s\)"
        ):
            hooks.get("act.output", call=2)
        hooks.use(first_alone, at="act.output")
        assert torch.equal(net(x), torch.relu(net.b(first + 1)))


def test_a_forward_pass_is_the_outermost_call_of_the_model_or_of_a_tapped_part() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh(), nn.ReLU()))
    with HookManager(net) as hooks:
        watch = hooks.use(Watch, at="1.0.output")
        assert isinstance(watch, Watch)
        output = net(torch.ones(1, 2))
        part = net[1][0](torch.ones(1, 2))
        net[0](torch.ones(1, 2))
        assert hooks.report().finished == 2
    assert watch.log == [
        ("started", 0, "Sequential"),
        ("1.0.output", 0, 0, "Tanh"),
        ("finished", 0, output),
        ("started", 1, "Tanh"),
        ("1.0.output", 1, 0, "Tanh"),
        ("finished", 1, part),
    ]


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt(), SystemExit(1), GeneratorExit()])
def test_a_failed_pass_is_dropped_whole_and_the_next_one_is_right(error: BaseException) -> None:
    net = nn.Sequential(nn.Linear(3, 3), Fails(), nn.Linear(3, 2))
    with leaves_no_trace(net) as run, HookManager(net) as hooks:
        hooks.attach("*")
        net[1].error = error
        with pytest.raises(type(error)):
            net(torch.randn(5, 3))
        with pytest.raises(NotCapturedError):
            hooks.get("0.output")
        net[1].error = None
        run(torch.randn(2, 3))
        assert {name: tuple(value.shape) for name, value in hooks.get_all().items()} == {
            "0.output": (2, 3),
            "1.output": (2, 3),
            "2.output": (2, 2),
        }
        assert (hooks.report().finished, hooks.report().dropped) == (1, 1)


@pytest.mark.parametrize("error", [ValueError("boom"), KeyboardInterrupt()])
def test_a_part_called_after_a_failed_pass_begins_a_pass_of_its_own(error: BaseException) -> None:
    net = nn.Sequential(nn.Linear(3, 3), Fails())
    with HookManager(net) as hooks:
        hooks.attach("0")
        net[1].error = error
        with pytest.raises(type(error)):
            net(torch.randn(5, 3))
        net[1].error = None
        net[0](torch.randn(2, 3))
        assert hooks.get("0.output").shape == (2, 3)
        assert hooks.report().finished == 1


def test_an_error_that_the_model_catches_itself_does_not_end_the_pass() -> None:
    class Tries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fails, self.other = Fails(), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            try:
                return self.fails(x)
            except (ValueError, KeyboardInterrupt):
                return self.other(x + 1)

    def run(net: Tries) -> None:
        with HookManager(net) as hooks:
            hooks.attach("*")
            assert net(torch.zeros(1)) == 1
            assert hooks.get("other.output") == 1
            with pytest.raises(NotCapturedError, match=r"point 'fails\.output' was never reached"):
                hooks.get("fails.output")

    net = Tries()
    for error in (ValueError("boom"), KeyboardInterrupt()):
        net.fails.error = error
        with pytest.warns(NeverFiredWarning, match=r"'fails\.output' \(cache\)"):
            run(net)


def test_a_model_called_while_an_exception_is_handled_is_not_taken_for_failing() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    with HookManager(net) as hooks:
        hooks.attach("0")
        try:
            [].pop()
        except IndexError:
            net(torch.randn(2, 3))
        assert hooks.get("0.output").shape == (2, 3)


def test_a_block_that_a_pass_skipped_has_no_value_of_an_earlier_pass() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Identity() for _ in range(2))

        def forward(self, x: Tensor, skip: bool = False) -> Tensor:
            for layer in self.layers[: 1 if skip else 2]:
                x = layer(x)
            return x

    net = Drops()
    with HookManager(net) as hooks:
        hooks.attach("layers.*")
        net(torch.ones(3, 2))
        net(torch.ones(1, 2), skip=True)
        assert hooks.get("layers.0.output").shape == (1, 2)
        with pytest.raises(NotCapturedError, match=r"nothing was captured at point 'layers\.1\.output' in forw"):
            hooks.get("layers.1.output")
        assert hooks.get("layers.1.output", forward=0).shape == (3, 2)
        assert hooks.get("layers.1.output", forward="all").shape == (3, 2)


def test_passes_of_a_generation_are_kept_and_joined(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.1")
        model.generate(token_ids, 3)
        assert [hooks.get("blocks.1.output", forward=step).shape[1] for step in range(3)] == [7, 1, 1]
        assert hooks.get("blocks.1.output", forward="all").shape == (2, 9, 16)
        with pytest.raises(CallIndexError, match="there is no forward pass 5: 3 finished in this scope"):
            hooks.get("blocks.1.output", forward=5)
        hooks.clear()
        assert hooks.report().finished == 0
        model.generate(token_ids, 2, use_cache=False)
        assert [hooks.get("blocks.1.output", forward=step).shape[1] for step in range(2)] == [7, 8]


def test_suspended_code_runs_the_model_as_if_no_scope_were_open(model: Transformer, token_ids: Tensor) -> None:
    bare = model(token_ids)
    with HookManager(model) as hooks, HookManager(model, isolated=False) as shared:
        hooks.use(lambda value: value * 0, at="blocks.0.output")
        shared.use(lambda value: value * 0, at="blocks.1.output")
        edited = model(token_ids)
        with suspended():
            assert active_scopes() == ()
            assert torch.equal(model(token_ids), bare)
            with HookManager(model) as inner:
                inner.attach("blocks.0")
                assert torch.equal(model(token_ids), bare)
                assert inner.report().finished == 1
        assert torch.equal(model(token_ids), edited)
        assert hooks.report().finished == shared.report().finished == 2
        assert hooks.report().foreign == 0


def test_an_intervention_may_run_the_model_itself_when_it_is_suspended(model: Transformer, token_ids: Tensor) -> None:
    class Runs(Intervention):
        @hookimpl
        def forward_finished(self, output: Tensor, call: Call) -> None:
            with suspended():
                self.again = call.module(token_ids)

    with HookManager(model) as hooks:
        runs = hooks.use(Runs)
        assert isinstance(runs, Runs)
        assert torch.equal(model(token_ids), runs.again)
        assert hooks.report().finished == 1


def test_positions_and_caches_are_read_however_they_are_passed(model: Transformer, token_ids: Tensor) -> None:
    seen: list[Tensor] = []

    def keep(value: Tensor, call: Call) -> None:
        assert call.positions is not None
        seen.append(call.positions[0])

    for by_keyword in (True, False):
        cache = KVCache()
        with HookManager(model) as hooks:
            hooks.use(keep, at="blocks.0.output")
            for part in (token_ids[:, :4], token_ids[:, 4:]):
                _ = model(part, cache=cache) if by_keyword else model(part, cache)
    assert [positions.tolist() for positions in seen] == [[0, 1, 2, 3], [4, 5, 6]] * 2


def test_recursion_of_a_module_in_itself_keeps_its_calls_apart() -> None:
    class Again(nn.Module):
        def forward(self, x: Tensor, depth: int) -> Tensor:
            return x if depth == 0 else self(x + 1, depth - 1) * 2

    net = Again()
    with HookManager(net) as hooks:
        hooks.attach("", "input")
        hooks.attach("")
        assert net(torch.zeros(1), 2) == 8
        assert [float(hooks.get("input", call=call)) for call in range(3)] == [0, 1, 2]
        assert [float(hooks.get("output", call=call)) for call in range(3)] == [2, 4, 8]
        assert hooks.report().finished == 1
