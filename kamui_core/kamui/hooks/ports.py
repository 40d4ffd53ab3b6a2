"""Ports: which tensors of a module are listened to, and by whom."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, Protocol

from kamui.errors import ValueStructureError
from kamui.hooks.values import argument_path, kind, main_path, take

if TYPE_CHECKING:
    from torch import nn

    from kamui.hooks.chain import Listener
    from kamui.hooks.passes import Entry, ForwardPass, PassLog
    from kamui.hooks.values import Arguments, Path


_SIDES: Final = {"input": "input", "output": "output", "grad_input": "gradients", "grad_output": "gradients"}


class TapOwner(Protocol):
    """What the taps tell a scope."""

    model: nn.Module
    passes: PassLog

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Note that a call of a tapped module begins."""

    def tell_finished(self, entry: Entry, output: Any) -> None:
        """Tell the interventions that a forward pass ends well."""

    def keep(self, forward_pass: ForwardPass) -> None:
        """Note that a forward pass ended well."""

    def may_stop(self, entry: Entry, ports: Iterable[Port]) -> bool:
        """Note which ports a call has served, and tell whether its forward pass may stop there."""


class Port:
    """One tensor of one side of a module, and who listens to it.

    Args:
        io: The side, or the quantity inside attention.
        selector: Which tensor of a nested value; empty for the main one.
        only_call: The one call of the module in a pass that is meant, if not every one.
    """

    __slots__ = ("io", "listeners", "only_call", "selector")

    def __init__(self, io: str, selector: Path, only_call: int | None) -> None:
        self.io = io
        self.selector = selector
        self.only_call = only_call
        self.listeners: tuple[Listener, ...] = ()

    def add(self, listener: Listener) -> None:
        """Listen, after those of the same priority that listen already."""
        self.listeners = tuple(sorted((*self.listeners, listener), key=lambda one: one.priority))

    def remove(self, listener: Listener) -> None:
        """Stop listening."""
        self.listeners = tuple(one for one in self.listeners if one is not listener)

    def hears(self, entry: Entry) -> bool:
        """Tell whether anybody listens to this call of the module."""
        return bool(self.listeners) and self.only_call in (None, entry.index)


class Wiring:
    """What one scope listens to on one module."""

    __slots__ = ("attention", "gradients", "input", "output", "scope")

    def __init__(self, scope: TapOwner) -> None:
        self.scope = scope
        self.input: tuple[Port, ...] = ()
        self.output: tuple[Port, ...] = ()
        self.attention: tuple[Port, ...] = ()
        self.gradients: tuple[Port, ...] = ()

    def port(self, io: str, selector: Path, only_call: int | None) -> Port:
        """Return the port for one tensor, making it if it is missing."""
        side = _SIDES.get(io, "attention")
        ports: tuple[Port, ...] = getattr(self, side)
        for port in ports:
            if (port.io, port.selector, port.only_call) == (io, selector, only_call):
                return port
        port = Port(io, selector, only_call)
        setattr(self, side, (*ports, port))
        return port


def input_path(port: Port, entry: Entry, given: Arguments) -> Path:
    """Return the keys that lead to the port's tensor in what its module is given.

    Raises:
        ValueStructureError: There is none.
    """
    try:
        path = argument_path(entry.module, *given, port.selector)
    except ValueStructureError as error:
        raise _nothing_selected(port, error) from None
    if path is None:
        raise no_tensor(port, entry, given[0] or given[1])
    return path


def output_path(port: Port, entry: Entry, output: object) -> Path:
    """Return the keys that lead to the port's tensor in what its module gives.

    Raises:
        ValueStructureError: There is none.
    """
    try:
        chosen = take(output, port.selector)
    except ValueStructureError as error:
        raise _nothing_selected(port, error) from None
    inner = main_path(chosen)
    if inner is None:
        raise no_tensor(port, entry, chosen)
    return (*port.selector, *inner)


def no_tensor(port: Port, entry: Entry, value: object) -> ValueStructureError:
    """Make the error for a place at which a module has no tensor."""
    point = str(port.listeners[0].point)
    return ValueStructureError(
        f"point {point!r} has no tensor: {type(entry.module).__name__} has {kind(value)} there; "
        f"choose another point, or one part of the value with a selector such as {point + '[1]'!r}"
    )


def _nothing_selected(port: Port, error: ValueStructureError) -> ValueStructureError:
    return ValueStructureError(
        f"the selector of point {str(port.listeners[0].point)!r} does not fit: {error}; choose another, or leave it out"
    )
