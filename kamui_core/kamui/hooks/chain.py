"""Chains: the ordered callbacks at one point, each of which sees what the one before it returned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kamui.errors import InPlaceEditError, ReplacementError
from kamui.hooks.checkpointing import guard
from kamui.hooks.values import kind

if TYPE_CHECKING:
    from kamui.hooks.call import Call
    from kamui.hooks.places import Place
    from kamui.hooks.points import HookPoint

Callback = Callable[..., Any]


class Listener:
    """One intervention at one point: its callback, and what it has done so far.

    `calls` counts how often the callback was asked, `changed` how often it returned another value,
    `missed` how often the positions that it asks for were not in the call.
    `without_graph` how often it waited for the gradient of a value that has none.

    Args:
        point: The name under which the intervention asked for the place.
        label: The intervention's name, for messages and reports.
        callback: The bound `activation` callback.
        arguments: The arguments that the callback takes.
        priority: -1 for callbacks that want to be first, 1 for those that want to be last, else 0.
        place: Where the point is in the model.
        strict: Compare the live value before and after where writes cannot be counted.
        since: How many forward passes had finished when it began to listen.
    """

    __slots__ = (
        "calls",
        "changed",
        "invoke",
        "label",
        "missed",
        "place",
        "point",
        "priority",
        "since",
        "strict",
        "without_graph",
    )

    def __init__(
        self,
        point: HookPoint,
        label: str,
        callback: Callback,
        arguments: Iterable[str],
        *,
        priority: int,
        place: Place,
        strict: bool,
        since: int,
    ) -> None:
        self.point = point
        self.label = label
        self.priority = priority
        self.place = place
        self.strict = strict
        self.since = since
        self.invoke = _adapt(callback, point, frozenset(arguments))
        self.calls = 0
        self.missed = 0
        self.changed = 0
        self.without_graph = 0


def fold(listeners: Sequence[Listener], value: Tensor, call: Call) -> Tensor:
    """Hand `value` through the listeners in order and return what the last one leaves.

    Raises:
        ReplacementError: A listener returned something that cannot take the value's place.
        InPlaceEditError: A listener wrote to the live value.
    """
    for listener in listeners:
        before = None if value.is_inference() else value._version
        copy = value.clone() if before is None and listener.strict else None
        try:
            result = listener.invoke(value, call)
        except BaseException as error:
            error.add_note(f"in intervention {listener.label!r} at point {str(listener.point)!r}")
            raise
        if (before is not None and value._version != before) or (copy is not None and not _same(value, copy)):
            raise InPlaceEditError(
                f"intervention {listener.label!r} wrote to the live value at point {listener.point!r}; "
                f"clone it, change the copy and return that"
            )
        listener.calls += 1
        if call.missed is not None:
            listener.missed += call.missed
            call.missed = None
        if result is not None and result is not value:
            check_replacement(listener.label, listener.point, value, result)
            listener.changed += 1
            if not call.in_backward:
                guard(call.forward_pass, listener.label, str(listener.point))
            value = result
    return value


def check_replacement(label: str, point: str, expected: Tensor, given: object) -> None:
    """Check that `given` can take the place of `expected`.

    Raises:
        ReplacementError: It is no tensor, or of another shape, dtype or device.
    """
    if not isinstance(given, Tensor):
        raise ReplacementError(
            f"intervention {label!r} returned {kind(given)} at point {point!r}, not a tensor of shape "
            f"{tuple(expected.shape)}; return a tensor to replace the value, or None to leave it"
        )
    differences = [
        f"{name} {have} where {want} is expected"
        for name, have, want in (
            ("shape", tuple(given.shape), tuple(expected.shape)),
            ("dtype", given.dtype, expected.dtype),
            ("device", given.device, expected.device),
        )
        if have != want
    ]
    if differences:
        raise ReplacementError(
            f"intervention {label!r} cannot replace the value at point {point!r}: {', '.join(differences)}"
        )


def _same(value: Tensor, before: Tensor) -> bool:
    return torch.equal(_without_nan(value), _without_nan(before))


def _without_nan(value: Tensor) -> Tensor:
    return value.nan_to_num() if value.is_floating_point() else value


def _adapt(callback: Callback, point: HookPoint, arguments: frozenset[str]) -> Callable[[Tensor, Call], Any]:
    match ("value" in arguments, "point" in arguments, "call" in arguments):
        case (True, False, False):
            return lambda value, call: callback(value=value)
        case (True, True, False):
            return lambda value, call: callback(point=point, value=value)
        case (True, False, True):
            return lambda value, call: callback(value=value, call=call)
        case (True, True, True):
            return lambda value, call: callback(point=point, value=value, call=call)
        case (False, True, False):
            return lambda value, call: callback(point=point)
        case (False, False, True):
            return lambda value, call: callback(call=call)
        case (False, True, True):
            return lambda value, call: callback(point=point, call=call)
    return lambda value, call: callback()
