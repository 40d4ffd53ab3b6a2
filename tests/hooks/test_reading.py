"""Why there is nothing where there is nothing."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kamui.errors import CallIndexError, NotCapturedError, PointError, UnknownPointError
from kamui.hooks import HookManager
from kamui.model import Transformer

X = torch.ones(2, 3)


class Sometimes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.never = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor, *, both: bool = True) -> Tensor:
        return self.b(self.a(x)) if both else self.a(x)


@pytest.fixture
def net() -> Sometimes:
    return Sometimes()


def reason(hooks: HookManager, point: str, **options: Any) -> str:
    with pytest.raises(NotCapturedError) as caught:
        hooks.get(point, **options)
    assert isinstance(caught.value, KeyError)
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:the model ran")
def test_each_reason_has_its_own_words(net: Sometimes) -> None:
    with HookManager(net) as hooks:
        hooks.attach("a")
        hooks.attach("b")
        assert reason(hooks, "a.output") == (
            "there is nothing to get: no forward pass has finished since the scope opened; call the model inside it"
        )
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(2, 4))
        assert reason(hooks, "a.output") == (
            "there is nothing to get: 1 forward pass(es) failed, and what a failed pass captured is dropped"
        )
        net(X, both=False)
        assert reason(hooks, "b.output") == (
            "point 'b.output' was never reached: 'b' was not called in forward pass 0, or does not compute 'output'"
        )
        net(X)
        net(X, both=False)
        assert reason(hooks, "b.output") == (
            "nothing was captured at point 'b.output' in forward pass 2, though it fired in others"
        )
        assert reason(hooks, "never.output") == (
            "point 'never.output' is in this model but not attached; attach it before the forward pass "
            "(attached: 'a.output', 'b.output')"
        )
        hooks.attach("never")
        assert reason(hooks, "never.output", forward=1) == (
            "point 'never.output' was attached after forward pass 1 had finished; run the model again"
        )
        with pytest.raises(UnknownPointError, match=r"point 'c\.output' is not in this model"):
            hooks.get("c.output")
        with pytest.raises(PointError, match=r"'\*\.output' is a pattern; get takes one point, get_all returns every"):
            hooks.get("*.output")
        with pytest.raises(PointError, match="is no hook point"):
            hooks.get("a")


@pytest.mark.filterwarnings("ignore:the model ran")
def test_a_model_that_ran_in_another_thread_alone_is_a_reason(net: Sometimes) -> None:
    with HookManager(net) as hooks:
        hooks.attach("a")
        thread = threading.Thread(target=net, args=(X,))
        thread.start()
        thread.join()
        assert "the model ran 1 time(s), but in a thread or task that does not have this scope" in reason(
            hooks, "a.output"
        )


def test_forward_passes_are_counted_from_either_end(net: Sometimes) -> None:
    with HookManager(net) as hooks:
        hooks.attach("a")
        for factor in range(3):
            net(X * factor)
        for index in range(3):
            assert torch.equal(hooks.get("a.output", forward=index), net.a.forward(X * index))
            assert torch.equal(hooks.get("a.output", forward=index - 3), hooks.get("a.output", forward=index))
        for index in (3, -4):
            with pytest.raises(CallIndexError, match=f"there is no forward pass {index}: 3 finished in this scope"):
                hooks.get("a.output", forward=index)
        assert hooks.get("a.output", forward="all").shape == (6, 3) or hooks.get("a.output", forward="all").dim() == 2


def test_only_the_last_pass_is_kept_where_that_was_asked(net: Sometimes) -> None:
    with HookManager(net) as hooks:
        hooks.attach("a", keep="last")
        net(X)
        net(X * 2)
        assert torch.equal(hooks.get("a.output"), net.a.forward(X * 2))
        assert "is not kept (kept: 1); capture with keep='all'" in reason(hooks, "a.output", forward=0)


def test_what_cannot_be_joined_is_told_with_its_shapes() -> None:
    net = nn.Identity()
    with HookManager(net) as hooks:
        hooks.attach("")
        net(torch.ones(2, 3, 4))
        net(torch.ones(1, 3, 4))
        assert "their shapes are (2, 3, 4), (1, 3, 4); read them one by one" in reason(hooks, "output", forward="all")


def test_a_point_is_read_under_any_of_its_names(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.-1.ffn", "mid")
        model(token_ids)
        assert torch.equal(hooks.get("blocks.1.ffn.mid"), hooks.get("blocks.1.ffn.down.input"))
        assert list(hooks.get_all()) == ["blocks.1.ffn.mid"]


def test_get_all_gives_the_last_pass_or_any_other_or_all_of_them(net: Sometimes) -> None:
    with HookManager(net) as hooks:
        hooks.attach("*")
        assert hooks.get_all() == {}
        hooks.clear()
    with HookManager(net) as hooks:
        hooks.attach("a")
        hooks.attach("b")
        net(X)
        net(X * 2, both=False)
        assert list(hooks.get_all()) == ["a.output"]
        assert list(hooks.get_all(forward=0)) == ["a.output", "b.output"]
        assert list(hooks.get_all(forward="all")) == ["a.output", "b.output"]
        with pytest.raises(CallIndexError):
            hooks.get_all(forward=2)


def test_clearing_forgets_and_counts_again(net: Sometimes) -> None:
    with HookManager(net) as hooks:
        hooks.attach("a")
        net(X)
        hooks.clear()
        assert "no forward pass has finished" in reason(hooks, "a.output")
        net(X * 3)
        assert torch.equal(hooks.get("a.output", forward=0), net.a.forward(X * 3))
