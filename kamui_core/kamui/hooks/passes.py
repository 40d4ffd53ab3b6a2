"""Forward passes: what runs now, in which thread, and whether it ended well.

A forward pass is the outermost call, in one thread, of a scope's model or of any tapped module of it. The taps
report each entry and exit of a tapped module here; the stack of entries tells where a pass begins and ends, and
which call of a module within the pass a value belongs to. A pass that ends in an exception is dropped whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn

from kamui.hooks.positions import SequenceFacts

if TYPE_CHECKING:
    from kamui.hooks.attention import AttentionMode
    from kamui.hooks.scope import Scope
    from kamui.hooks.store import Kept

_MODULE_FILE: Final = nn.Module.__call__.__code__.co_filename

_open_scopes: ContextVar[tuple[Scope, ...]] = ContextVar("kamui_open_scopes", default=())
_suspended: ContextVar[bool] = ContextVar("kamui_suspended", default=False)
_shared_scopes: tuple[Scope, ...] = ()


class Entry:
    """One running call of one tapped module."""

    __slots__ = ("exception", "frame", "index", "mode", "module")

    frame: FrameType | None
    mode: AttentionMode | None

    def __init__(self, module: nn.Module, index: int) -> None:
        self.module = module
        self.index = index
        self.exception = sys.exception()
        self.frame = None
        self.mode = None

    def is_failing(self) -> bool:
        """Tell, on leaving, whether an exception is passing through this call."""
        exception = sys.exception()
        return exception is not None and exception is not self.exception


class ForwardPass:
    """One forward pass of one scope in one thread."""

    __slots__ = ("captured", "counts", "facts", "index", "recomputing", "stack")

    def __init__(self, index: int, *, recomputing: bool) -> None:
        self.index = index
        self.recomputing = recomputing
        self.stack: list[Entry] = []
        self.counts: dict[nn.Module, int] = {}
        self.captured: dict[Any, dict[str, list[Kept]]] = {}
        self.facts: SequenceFacts | None = None

    def enter(self, module: nn.Module) -> Entry:
        """Note that a call of `module` begins."""
        index = self.counts.get(module, 0)
        self.counts[module] = index + 1
        entry = Entry(module, index)
        self.stack.append(entry)
        return entry

    def entry_of(self, module: nn.Module) -> Entry | None:
        """Return the innermost running call of `module`."""
        return next((entry for entry in reversed(self.stack) if entry.module is module), None)

    def take_off_modes(self, entry: Entry) -> None:
        """Take off the attention modes of `entry` and of what an interrupt has left above it."""
        for running in self.stack[self.stack.index(entry) :]:
            if running.mode is not None:
                running.mode.remove()

    def leave(self, entry: Entry) -> None:
        """Note that a call has ended."""
        del self.stack[self.stack.index(entry) :]

    def is_stale(self) -> bool:
        """Tell whether the call that began this pass has ended without leaving it (an interrupt does that)."""
        frame = self.stack[0].frame if self.stack else None
        if frame is None:
            return not self.stack
        try:
            frame.clear()
        except RuntimeError:
            return False
        return True

    def abandon(self) -> None:
        """Take off what an interrupted pass has left in this thread."""
        for entry in self.stack:
            entry.frame = None
            if entry.mode is not None:
                entry.mode.remove()
        self.stack.clear()


class Call:
    """What a callback may know about the call that it is part of.

    Attributes:
        forward: Which forward pass of the scope this is, from 0.
        index: Which call of this module in the pass this is, from 0.
        module: The module.
        original: The value as the module gave it, before any intervention.
        recomputing: True while autograd runs the module again, as activation checkpointing does.
    """

    __slots__ = ("forward_pass", "index", "module", "original")

    def __init__(self, forward_pass: ForwardPass, module: nn.Module, index: int, original: Tensor | None) -> None:
        self.forward_pass = forward_pass
        self.module = module
        self.index = index
        self.original = original

    def with_original(self, original: Tensor) -> Call:
        """Return the same call for another value of its module."""
        return Call(self.forward_pass, self.module, self.index, original)

    @property
    def forward(self) -> int:
        """Which forward pass of the scope this is, from 0."""
        return self.forward_pass.index

    @property
    def recomputing(self) -> bool:
        """True while autograd runs the module again, as activation checkpointing does."""
        return self.forward_pass.recomputing

    @property
    def positions(self) -> Tensor | None:
        """The position of each token of this call among the real tokens of its row, (B, S); -1 for padding.

        None where the pass has no sequence that could be counted.
        """
        facts = self.forward_pass.facts
        return None if facts is None else facts.positions()

    @property
    def key_positions(self) -> Tensor | None:
        """The same for the keys, cached ones included, (B, Sk)."""
        facts = self.forward_pass.facts
        return None if facts is None else facts.key_positions()

    @property
    def prompt_lengths(self) -> Tensor | None:
        """How many real tokens each row's prompt has, (B,), or None where that cannot be known."""
        facts = self.forward_pass.facts
        return None if facts is None else facts.prompt_lengths()


class PassLog:
    """The forward passes of one scope."""

    def __init__(self) -> None:
        self.finished = 0
        self.dropped = 0
        self.foreign = 0
        self.last_facts: SequenceFacts | None = None
        self._running: dict[int, ForwardPass] = {}

    def current(self) -> ForwardPass | None:
        """Return the pass that runs in this thread."""
        return self._running.get(get_ident())

    def enter(self, module: nn.Module) -> tuple[ForwardPass, Entry]:
        """Note that a call of `module` begins, in the pass of this thread or in a new one."""
        running = self._running.get(get_ident())
        if running is not None and (not running.stack or running.stack[0].module is module) and running.is_stale():
            self._drop(running)
            running = None
        if running is None:
            running = self._running[get_ident()] = ForwardPass(self.finished, recomputing=autograd_runs())
        entry = running.enter(module)
        if len(running.stack) == 1:
            entry.frame = _frame_of_call()
        return running, entry

    def end(self, forward_pass: ForwardPass) -> int:
        """Note that a pass ended well, and return its number."""
        self._running.pop(get_ident(), None)
        if not forward_pass.recomputing:
            self.finished += 1
        return self.finished - 1

    def drop_if_ended(self, forward_pass: ForwardPass) -> None:
        """Drop a failing pass once its outermost call has been left."""
        if not forward_pass.stack:
            self._drop(forward_pass)

    def _drop(self, forward_pass: ForwardPass) -> None:
        self._running.pop(get_ident(), None)
        forward_pass.abandon()
        forward_pass.captured.clear()
        if not forward_pass.recomputing:
            self.dropped += 1

    def abandon_all(self) -> None:
        """Forget every running pass, of any thread."""
        for forward_pass in list(self._running.values()):
            forward_pass.abandon()
        self._running.clear()

    def restart(self) -> None:
        """Count passes from 0 again."""
        self.finished = 0
        self.dropped = 0


def _frame_of_call() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != _MODULE_FILE:
        frame = frame.f_back
    return frame


def autograd_runs() -> bool:
    """Tell whether autograd is running in this thread."""
    return torch._C._current_graph_task_id() != -1


def active_scopes() -> tuple[Scope, ...]:
    """Return the scopes that are open in this context, outer before inner."""
    own = _open_scopes.get()
    if _shared_scopes and not _suspended.get():
        return tuple(sorted({*own, *_shared_scopes}, key=lambda scope: scope.serial))
    return own


def is_suspended() -> bool:
    """Tell whether this context runs models as if no scope were open."""
    return _suspended.get()


def activate(scope: Scope) -> None:
    """Make `scope` the innermost one of this context, or one of every context when it is shared."""
    global _shared_scopes
    if scope.isolated:
        _open_scopes.set((*(other for other in _open_scopes.get() if other.is_open), scope))
    else:
        _shared_scopes = (*_shared_scopes, scope)


def deactivate(scope: Scope) -> bool:
    """Take `scope` out of this context; return False where it was opened in another one."""
    global _shared_scopes
    if not scope.isolated:
        _shared_scopes = tuple(other for other in _shared_scopes if other is not scope)
        return True
    scopes = _open_scopes.get()
    _open_scopes.set(tuple(other for other in scopes if other is not scope))
    return scope in scopes


@contextmanager
def suspended() -> Iterator[None]:
    """Run what is inside as if no scope were open in this context.

    For an intervention that has to run the model itself: its own scope neither acts nor captures meanwhile.
    A scope opened inside works as usual.
    """
    scopes, was_suspended = _open_scopes.get(), _suspended.get()
    _open_scopes.set(())
    _suspended.set(True)
    try:
        yield
    finally:
        _open_scopes.set(scopes)
        _suspended.set(was_suspended)
