"""Ports: which tensors of a module are listened to, and by whom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kamui.hooks.call import Call

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kamui.hooks.chain import Listener
    from kamui.hooks.passes import Entry, ForwardPass, PassLog
    from kamui.hooks.values import Path


class TapOwner(Protocol):
    """What the taps tell a scope."""

    model: nn.Module
    passes: PassLog

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ForwardPass, Entry]:
        """Note that a call of a tapped module begins."""

    def finish(self, forward_pass: ForwardPass, call: Call, output: Any) -> None:
        """Note that a forward pass ended well."""


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
        """Tell whether this call of the module is meant."""
        return self.only_call is None or self.only_call == entry.index


class Wiring:
    """What one scope listens to on one module."""

    __slots__ = ("attention", "input", "output", "scope")

    def __init__(self, scope: TapOwner) -> None:
        self.scope = scope
        self.input: tuple[Port, ...] = ()
        self.output: tuple[Port, ...] = ()
        self.attention: tuple[Port, ...] = ()

    def port(self, io: str, selector: Path, only_call: int | None) -> Port:
        """Return the port for one tensor, making it if it is missing."""
        side = io if io in ("input", "output") else "attention"
        ports: tuple[Port, ...] = getattr(self, side)
        for port in ports:
            if (port.io, port.selector, port.only_call) == (io, selector, only_call):
                return port
        port = Port(io, selector, only_call)
        setattr(self, side, (*ports, port))
        return port


class Run(NamedTuple):
    """One running call of a tapped module, as one scope sees it."""

    wiring: Wiring
    forward_pass: ForwardPass
    entry: Entry

    def call(self, original: Tensor | None = None) -> Call:
        """Make what callbacks may know about this call."""
        return Call(self.forward_pass, self.entry.module, self.entry.index, original)
