"""Reading captures: what `get` returns, and why there is nothing where there is nothing."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Literal

from torch import Tensor

from kamui.errors import CallIndexError, NotCapturedError, PointError
from kamui.hooks.patterns import is_pattern
from kamui.hooks.points import HookPoint

if TYPE_CHECKING:
    from kamui.hooks.chain import Listener
    from kamui.hooks.scope import Scope
    from kamui.hooks.store import Captures
    from kamui.hooks.use import Use

Forward = int | Literal["all"]


def read(scope: Scope, text: str, call: int | None, forward: Forward) -> Tensor:
    """Return one captured value.

    Raises:
        UnknownPointError: The model has no such point.
        NotCapturedError: Nothing was captured there; the message says why.
    """
    captures, listener = _capturing(scope, text, forward)
    if forward == "all":
        joined = captures.joined(listener.point, call)
        if joined is None:
            raise _nothing(scope, listener, "any forward pass")
        return joined
    index = _number_of(scope, listener, forward)
    values = captures.calls(listener.point, index)
    if not values:
        raise _nothing(scope, listener, f"forward pass {index}")
    return _choose(values, listener.point, call)


def read_all(scope: Scope, forward: Forward) -> dict[str, Tensor]:
    """Return every captured value of one forward pass, or of all of them joined along the sequence."""
    found: dict[str, Tensor] = {}
    for point in dict.fromkeys(listener.point for _, listener in _all_capturing(scope)):
        captures, listener = _capturing(scope, point, forward)
        if forward == "all":
            joined = captures.joined(listener.point, None)
            values = [] if joined is None else [joined]
        elif scope.passes.finished == 0:
            values = []
        else:
            index = _number_of(scope, None, forward)
            values = captures.calls(listener.point, index) if listener.since <= index else []
        name = str(listener.point)
        found.update({name: values[0]} if len(values) == 1 else {f"{name}#{n}": one for n, one in enumerate(values)})
    return found


def _all_capturing(scope: Scope) -> list[tuple[Use, Listener]]:
    return [(use, listener) for use in scope.uses if use.captures is not None for listener in use.listeners]


def _capturing(scope: Scope, text: str, forward: Forward) -> tuple[Captures, Listener]:
    if is_pattern(text):
        raise PointError(f"{text!r} is a pattern; get takes one point, get_all returns everything that was captured")
    wanted = scope.locator.place(HookPoint(text))
    known = _all_capturing(scope)
    found = [(use, listener) for use, listener in known if listener.place == wanted]
    if not found:
        there = ", ".join(repr(str(listener.point)) for _, listener in known[:6]) or "nothing"
        raise NotCapturedError(
            f"point {text!r} is in this model but not attached; attach it before the forward pass (attached: {there})"
        )
    if len({_way_of_capturing(use) for use, _ in found}) > 1:
        raise NotCapturedError(
            f"point {text!r} is captured {len(found)} times in this scope, with different options; keep what "
            f"hooks.use('cache', ...) returns and read its captures.calls({text!r}, forward)"
        )
    heard = [pair for pair in found if pair[1].since <= _index_of(scope, forward)]
    use, listener = (heard or found)[-1]
    return _captures_of(use), listener


def _index_of(scope: Scope, forward: Forward) -> int:
    if forward == "all":
        return scope.passes.finished
    return forward + scope.passes.finished if forward < 0 else forward


def _way_of_capturing(use: Use) -> tuple[object, ...]:
    options = [one.name for one in dataclasses.fields(use.intervention) if one.init and one.name != "at"]
    return (type(use.intervention), *(repr(getattr(use.intervention, name)) for name in options))


def _captures_of(use: Use) -> Captures:
    assert use.captures is not None
    return use.captures


def _number_of(scope: Scope, listener: Listener | None, forward: int) -> int:
    finished = scope.passes.finished
    if finished == 0:
        raise NotCapturedError(f"there is nothing to get: {_why_no_pass(scope)}")
    index = forward + finished if forward < 0 else forward
    if not 0 <= index < finished:
        raise CallIndexError(f"there is no forward pass {forward}: {finished} finished in this scope, numbered from 0")
    if listener is not None and index < listener.since:
        raise NotCapturedError(
            f"point {listener.point!r} was attached after forward pass {index} had finished; run the model again"
        )
    return index


def _why_no_pass(scope: Scope) -> str:
    passes = scope.passes
    if passes.dropped:
        return f"{passes.dropped} forward pass(es) failed, and what a failed pass captured is dropped"
    if passes.foreign:
        return (
            f"the model ran {passes.foreign} time(s), but in a thread or task that does not have this scope; "
            f"open the scope there, or open it with HookManager(model, isolated=False)"
        )
    return "no forward pass has finished since the scope opened; call the model inside it"


def _nothing(scope: Scope, listener: Listener, where: str) -> NotCapturedError:
    point = str(listener.point)
    if scope.passes.finished == 0:
        return NotCapturedError(f"there is nothing to get at {point!r}: {_why_no_pass(scope)}")
    if listener.missed:
        return NotCapturedError(
            f"nothing was captured at point {point!r} in {where}: the positions asked for were not in that call "
            f"(they were missed in {listener.missed} of {listener.calls} calls)"
        )
    if listener.point.is_gradient:
        return NotCapturedError(f"no gradient came to point {point!r} in {where}: {why_no_gradient(listener)}")
    if listener.calls:
        return NotCapturedError(f"nothing was captured at point {point!r} in {where}, though it fired in others")
    return NotCapturedError(
        f"point {point!r} was never reached: {listener.point.module or 'the model'!r} was not called in {where}, "
        f"or does not compute {listener.place.io!r}"
    )


def why_no_gradient(listener: Listener) -> str:
    """Say why no gradient came to a gradient point."""
    if listener.without_graph:
        return (
            "the value there has no graph: gradients were switched off, everything before it is frozen, or an "
            "intervention replaced it by a tensor without one"
        )
    return (
        "backward was not called inside the scope, or the loss does not depend on the value, or the module was "
        "not called or does not compute it"
    )


def _choose(values: list[Tensor], point: str, call: int | None) -> Tensor:
    if call is None:
        if len(values) > 1:
            raise CallIndexError(
                f"point {point!r} was called {len(values)} times in this forward pass; "
                f"say which with call=0 ... {len(values) - 1}"
            )
        return values[0]
    if not -len(values) <= call < len(values):
        raise CallIndexError(f"there is no call {call} of point {point!r}: it was called {len(values)} time(s)")
    return values[call]
