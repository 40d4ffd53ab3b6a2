"""Forward passes: what runs now, in which thread, and whether it ended well.

A forward pass is the outermost call, in one thread, of a scope's model or of any tapped module of it. The taps
report each entry and exit of a tapped module here; the stack of entries tells where a pass begins and ends, and
which call of a module within the pass a value belongs to. A pass that ends in an exception is dropped whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from threading import get_ident
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import nn

from kamui.hooks.sequence import SequenceFacts

_MODULE_FILE: Final = nn.Module.__call__.__code__.co_filename


class Removable(Protocol):
    """Something that a call has put on the thread, to be taken off at its end."""

    def remove(self) -> None:
        """Take it off."""


class Entry:
    """One running call of one tapped module."""

    __slots__ = ("exception", "facts", "forward_pass", "frame", "index", "mode", "module")

    frame: FrameType | None
    mode: Removable | None
    facts: SequenceFacts | None

    def __init__(self, forward_pass: ForwardPass, module: nn.Module, index: int) -> None:
        self.forward_pass = forward_pass
        self.module = module
        self.index = index
        self.exception = sys.exception()
        self.frame = None
        self.mode = None
        self.facts = None

    def is_outermost(self) -> bool:
        """Tell whether this call is the forward pass itself."""
        return self.forward_pass.stack[0] is self

    def is_failing(self) -> bool:
        """Tell, on leaving, whether an exception is passing through this call."""
        exception = sys.exception()
        return exception is not None and exception is not self.exception


class ForwardPass:
    """One forward pass of one scope in one thread."""

    __slots__ = ("captured", "counts", "index", "recomputing", "stack")

    def __init__(self, index: int, *, recomputing: bool) -> None:
        self.index = index
        self.recomputing = recomputing
        self.stack: list[Entry] = []
        self.counts: dict[nn.Module, int] = {}
        self.captured: dict[Any, Any] = {}

    def enter(self, module: nn.Module) -> Entry:
        """Note that a call of `module` begins."""
        index = self.counts.get(module, 0)
        self.counts[module] = index + 1
        entry = Entry(self, module, index)
        self.stack.append(entry)
        return entry

    def entry_of(self, module: nn.Module) -> Entry | None:
        """Return the innermost running call of `module`; entries above it were left by an interrupt and go."""
        stack = self.stack
        if stack and stack[-1].module is module:
            return stack[-1]
        for depth in range(len(stack) - 1, -1, -1):
            if stack[depth].module is module:
                self._take_off(stack[depth + 1 :])
                del stack[depth + 1 :]
                return stack[depth]
        return None

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
        self._take_off(self.stack)
        self.stack.clear()

    def _take_off(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.frame = None
            if entry.mode is not None:
                entry.mode.remove()


class PassLog:
    """The forward passes of one scope."""

    def __init__(self) -> None:
        self.finished = 0
        self.dropped = 0
        self.foreign = 0
        self.last_facts: SequenceFacts | None = None
        self._running: dict[int, ForwardPass] = {}

    def running(self, module: nn.Module) -> Entry | None:
        """Return the innermost running call of `module` in this thread."""
        forward_pass = self._running.get(get_ident())
        return None if forward_pass is None else forward_pass.entry_of(module)

    def ran(self) -> bool:
        """Tell whether the model was seen to run at all, well or not, here or elsewhere."""
        return self.finished + self.dropped + self.foreign > 0

    def runs_here(self) -> bool:
        """Tell whether a forward pass is under way in this thread."""
        running = self._running.get(get_ident())
        return running is not None and not running.is_stale()

    def enter(self, module: nn.Module) -> Entry:
        """Note that a call of `module` begins, in the pass of this thread or in a new one."""
        running = self._running.get(get_ident())
        if running is not None and running.is_stale():
            self._drop(running)
            running = None
        if running is None:
            running = self._running[get_ident()] = ForwardPass(self.finished, recomputing=autograd_runs())
        entry = running.enter(module)
        if len(running.stack) == 1:
            entry.frame = _frame_of_call()
        return entry

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
