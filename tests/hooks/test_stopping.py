from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kamui
from kamui.errors import NeverFiredWarning, NotCapturedError, ScopeError
from kamui.hooks import HookManager
from kamui.model import Transformer
from kamui.testing import leaves_no_trace


class Counted(nn.Module):
    """Blocks, one of them used twice, that count their calls."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
        self.calls: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        for index in (0, 1, 1, 2, 3):
            self.calls.append(index)
            x = self.blocks[index](x)
        return x


X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("point", "called"),
    [
        ("blocks.2.output", [0, 1, 1, 2]),
        ("blocks.2.input", [0, 1, 1, 2]),
        ("blocks.1.output", [0, 1]),
        ("output", [0, 1, 1, 2, 3]),
        ("input", []),
    ],
)
def test_the_model_is_left_after_the_last_point_and_what_was_captured_is_kept(point: str, called: list[int]) -> None:
    net = Counted()
    with HookManager(net) as hooks:
        hooks.use("cache", at=point)
        net(X)
        whole = hooks.get(point, call=0)
        net.calls.clear()
        assert hooks.run(X, stop=True) is None
        assert net.calls == called
        assert torch.equal(hooks.get(point, call=0), whole)
        assert (hooks.report().finished, hooks.report().dropped) == (2, 0)


@pytest.mark.parametrize("io", ["q", "pre_softmax", "weights", "z", "output"])
def test_inside_attention_the_model_is_left_after_the_attention_module(
    model: Transformer, token_ids: Tensor, io: str
) -> None:
    with leaves_no_trace(model), HookManager(model) as hooks:
        hooks.attach("blocks.0.attn", io)
        later: list[str] = []
        handle = model.blocks[1].register_forward_pre_hook(lambda module, args: later.append("later"))
        model(token_ids)
        whole = hooks.get(f"blocks.0.attn.{io}")
        hooks.run(token_ids, stop=True)
        handle.remove()
        assert torch.equal(hooks.get(f"blocks.0.attn.{io}"), whole)
        assert later == ["later"]


def test_every_point_is_waited_for_and_edits_act(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.1", "input")
        hooks.use(lambda value: value * 0, at="blocks.0.output")
        hooks.run(token_ids, stop=True)
        assert (hooks.get("blocks.1.input") == 0).all()


def test_a_model_that_was_left_runs_as_before(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model) as run:
        bare = run(token_ids)
        with HookManager(model) as hooks:
            hooks.attach("blocks.0")
            hooks.run(token_ids, stop=True)
            assert torch.equal(run(token_ids), bare)
            assert hooks.report().finished == 2


def test_interventions_are_told_that_the_pass_finished_without_an_output() -> None:
    told: list[object] = []

    class Told(kamui.Intervention):
        @kamui.hookimpl
        def points(self) -> str:
            return "blocks.0.output"

        @kamui.hookimpl
        def forward_finished(self, output: object) -> None:
            told.append(output)

        @kamui.hookimpl
        def activation(self) -> None:
            return None

    with HookManager(Counted()) as hooks:
        hooks.use(Told)
        hooks.run(X, stop=True)
    assert told == [None]


def test_a_hook_that_is_always_called_cleans_up() -> None:
    net, cleaned = Counted(), []
    net.register_forward_hook(lambda *_: cleaned.append("cleaned"), always_call=True)
    with HookManager(net) as hooks:
        hooks.attach("blocks.0")
        hooks.run(X, stop=True)
    assert cleaned == ["cleaned"]


def test_a_point_that_never_fires_lets_the_whole_model_run() -> None:
    net = nn.ModuleDict({"used": Counted(), "unused": nn.Linear(3, 3)})
    net.forward = net["used"].forward  # type: ignore[method-assign]
    hooks = HookManager(net).__enter__()
    hooks.attach("unused")
    assert hooks.run(X, stop=True) is None
    assert hooks.report().finished == 1
    with pytest.warns(NeverFiredWarning, match=r"'unused\.output'"):
        hooks.__exit__(None, None, None)


def test_a_scope_around_it_that_did_not_ask_counts_the_pass_as_failed() -> None:
    net = Counted()
    with HookManager(net) as outer, HookManager(net) as inner:
        outer.attach("blocks.0")
        inner.attach("blocks.1")
        inner.run(X, stop=True)
        assert (inner.report().finished, outer.report().finished, outer.report().dropped) == (1, 0, 1)
        with pytest.raises(NotCapturedError, match="what a failed pass captured is dropped"):
            outer.get("blocks.0.output")
        net(X)
        assert torch.equal(outer.get("blocks.0.output"), net.blocks[0](X))


def test_a_scope_inside_it_that_did_not_ask_counts_the_pass_as_failed() -> None:
    net = Counted()
    with HookManager(net) as outer, HookManager(net) as inner:
        outer.attach("blocks.0")
        inner.attach("blocks.0")
        outer.run(X, stop=True)
        assert (outer.report().finished, inner.report().finished, inner.report().dropped) == (1, 0, 1)
        net(X)
        inner.get("blocks.0.output")


def test_an_error_before_the_stop_passes_and_the_next_run_stops_again() -> None:
    net = Counted()
    with HookManager(net) as hooks:
        hooks.attach("blocks.0")
        with pytest.raises(RuntimeError, match="shapes"):
            hooks.run(torch.randn(2, 5), stop=True)
        hooks.run(X, stop=True)
        assert (hooks.report().finished, hooks.report().dropped) == (1, 1)
        net.calls.clear()
        net(X)
        assert len(net.calls) == 5


def test_another_thread_of_a_shared_scope_does_not_stop() -> None:
    net = Counted()
    outputs: list[Tensor] = []

    def elsewhere(value: Tensor) -> None:
        if threading.current_thread() is threading.main_thread():
            thread = threading.Thread(target=lambda: outputs.append(net(X)))
            thread.start()
            thread.join()

    with HookManager(net, isolated=False) as hooks:
        hooks.use(elsewhere, at="blocks.0.output")
        hooks.run(X, stop=True)
        assert torch.equal(outputs[0], net(X))


class Cache:
    def get_seq_length(self) -> int:
        return 0


@pytest.mark.parametrize(
    ("keywords", "named"),
    [
        ({"past_key_values": ()}, "argument 'past_key_values': tuple"),
        ({"anything": Cache()}, "argument 'anything': Cache"),
        ({"use_cache": True}, "use_cache=True"),
    ],
)
def test_a_cache_among_the_arguments_is_refused(keywords: dict[str, Any], named: str) -> None:
    with HookManager(Counted()) as hooks:
        hooks.attach("blocks.0")
        with pytest.raises(ScopeError, match=f"got a cache \\({named}\\) and would leave it half filled"):
            hooks.run(X, stop=True, **keywords)


def test_with_nothing_to_wait_for_it_is_refused() -> None:
    with HookManager(Counted()) as hooks, pytest.raises(ScopeError, match="no point is listened to; attach one first"):
        hooks.run(X, stop=True)


def test_while_the_model_runs_or_generates_it_is_refused(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.use(lambda value: hooks.run(token_ids, stop=True), at="blocks.0.output")
        runs: list[Callable[[], object]] = [lambda: model(token_ids), lambda: model.generate(token_ids, 2)]
        for run in runs:
            with pytest.raises(ScopeError, match="came while the model runs or generates"):
                run()
