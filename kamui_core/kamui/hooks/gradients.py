"""Gradient points: `grad_<io>`, read and replaced as the backward pass comes by.

No single wiring gives the right gradient everywhere, so it depends on the value. What leaves a module has a tensor
hook. What a module is given, or hands through unchanged, is replaced by an alias of it, whose gradient is that
through this module alone. An operation in place on an alias takes the alias out of the graph; then a hook on the
tensor under it tells the gradient. None of these hooks outlives the scope.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor

from kamui.errors import TransformError
from kamui.hooks.call import Origin
from kamui.hooks.points import GRADIENT_PREFIX
from kamui.hooks.ports import input_path, output_path
from kamui.hooks.values import put, take, tensors_in
from kamui.hooks.watches import Watch

if TYPE_CHECKING:
    from kamui.hooks.passes import Entry
    from kamui.hooks.ports import Port, Wiring
    from kamui.hooks.values import Arguments, Path

GRAD_INPUT: Final = GRADIENT_PREFIX + "input"
GRAD_OUTPUT: Final = GRADIENT_PREFIX + "output"

Line = tuple["Port", "Entry"]
Running = Sequence[tuple["Wiring", "Entry"]]


def watch_arguments(running: Running, given: Arguments) -> Arguments:
    """Wait for the gradients of what a module is given, and return what it is to get."""
    current = given
    watches = []
    for path, lines in _lines(running, GRAD_INPUT, partial(input_path, given=given)).items():
        value = take(current, path)
        if isinstance(value, Tensor) and (heard := _heard(value, lines)):
            alias, watch = _aliased(value, heard)
            current = put(current, path, alias)
            watches.append((watch, alias))
    for _, entry in running:
        entry.given, entry.watches = current, watches
    return current


def watch_output(running: Running, output: Any) -> Any:
    """Wait for the gradients of what leaves a module, and return what is to leave it."""
    entry = running[0][1]
    for watch, alias in entry.watches:
        watch.settle(alias, output)

    current = output
    for path, lines in _lines(running, GRAD_OUTPUT, partial(output_path, output=output)).items():
        value = take(current, path)
        if isinstance(value, Tensor) and (heard := _heard(value, lines)):
            handed_through = any(value is one for one in tensors_in(entry.given))
            current = put(current, path, watched(value, heard, alias=handed_through))
    return current


def watch_inside(value: Tensor, lines: Iterable[Line], *, alias: bool) -> Tensor:
    """Wait for the gradient of a value inside a module, and return what is to take its place."""
    heard = _heard(value, lines)
    return watched(value, heard, alias=alias) if heard else value


def watched(value: Tensor, heard: Sequence[tuple[Port, Origin]], *, alias: bool) -> Tensor:
    """Wait for the gradient of `value`, or, of one that has other uses too, for that of an alias."""
    if alias or value.is_leaf:
        return _aliased(value, heard)[0]
    Watch(heard).on(value)
    return value


def _aliased(value: Tensor, heard: Sequence[tuple[Port, Origin]]) -> tuple[Tensor, Watch]:
    alias = value.view_as(value)
    watch = Watch(heard)
    watch.on(alias)
    return alias, watch


def _lines(running: Running, io: str, locate: Callable[[Port, Entry], Path]) -> dict[Path, list[Line]]:
    """Return who listens to the gradient of each tensor on one side of a module."""
    found: dict[Path, list[Line]] = {}
    for wiring, entry in running:
        for port in wiring.gradients:
            if port.io == io and port.hears(entry):
                found.setdefault(locate(port, entry), []).append((port, entry))
    return found


def _heard(value: Tensor, lines: Iterable[Line]) -> list[tuple[Port, Origin]]:
    """Return those lines to which a gradient of `value` can come in the graph that is being built."""
    lines = list(lines)
    if lines and torch._C._functorch.peek_interpreter_stack() is not None:
        point = str(lines[0][0].listeners[0].point)
        raise TransformError(
            f"point {point!r} is a gradient point, and the model runs inside a torch.func "
            f"transform, whose gradients do not pass there; take the gradient with backward() or torch.autograd.grad"
        )
    if has_graph(value):
        return [(port, origin) for port, entry in lines if (origin := _origin(entry)) is not None]
    for port, entry in lines:
        for listener in port.listeners:
            listener.without_graph += 1
        origin = _origin(entry)
        if origin is not None:
            origin.forward_pass.log.note_without_graph(origin)
    return []


def has_graph(value: Tensor) -> bool:
    """Tell whether autograd follows what is computed from `value` now."""
    return value.requires_grad and torch.is_grad_enabled()


def _origin(entry: Entry) -> Origin | None:
    """Return the call that `entry` is, or repeats where its graph is made only now; None where it was made before."""
    forward_pass = entry.forward_pass
    if not forward_pass.recomputing:
        return Origin(forward_pass, entry.index, entry.module, entry.facts)
    return forward_pass.log.repeated_without_graph(entry)
