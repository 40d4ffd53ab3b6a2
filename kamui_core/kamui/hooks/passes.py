"""Forward passes: what runs now, in which thread, and whether it ended well.

A forward pass is the outermost call, in one thread, of a scope's model or of any tapped module of it. The taps
report each entry and exit of a tapped module here; the stack of entries tells where a pass begins and ends, and
which call of a module within the pass a value belongs to. A pass that ends in an exception is dropped whole.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from threading import get_ident
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, Protocol
from weakref import WeakSet

import torch
from torch import Tensor, nn

from kamui.hooks.sequence import SequenceFacts

if TYPE_CHECKING:
    from kamui.hooks.call import Origin

_MODULE_FILE: Final = nn.Module.__call__.__code__.co_filename
_MOST_WITHOUT_GRAPH: Final = 4096


class Removable(Protocol):
    """Something that a call has put on the thread, to be taken off at its end."""

    def remove(self) -> None:
        """Take it off."""

    def check(self, module: nn.Module) -> None:
        """Check, at the good end of the call, that it did what it was put there for."""


class Watch(Protocol):
    """Something that waits for the gradient of a value."""

    def settle(self, alias: Tensor, output: object) -> None:
        """Note that the module which was given the value, as `alias`, has ended."""

    def release(self, log: PassLog) -> None:
        """Wait for one scope no longer."""


class Entry:
    """One running call of one tapped module."""

    __slots__ = ("exception", "facts", "forward_pass", "frame", "given", "index", "mode", "module", "watches")

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
        self.given: object = None
        self.watches: Iterable[tuple[Watch, Tensor]] = ()
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

    __slots__ = (
        "began_with_graph",
        "captured",
        "counts",
        "has_ended",
        "index",
        "is_never_repeated",
        "log",
        "recomputing",
        "stack",
    )

    def __init__(self, log: PassLog, index: int, *, recomputing: bool) -> None:
        self.log = log
        self.index = index
        self.has_ended = False
        self.began_with_graph = torch.is_grad_enabled()
        self.is_never_repeated = False
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
        self.take_off()
        self.stack.clear()

    def take_off(self) -> None:
        """Take off what the running calls have put on the thread; the calls themselves may go on."""
        self._take_off(self.stack)

    def _take_off(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            entry.frame = None
            if entry.mode is not None:
                entry.mode.remove()
                entry.mode = None


class PassLog:
    """The forward passes of one scope."""

    def __init__(self) -> None:
        self.finished = 0
        self.dropped = 0
        self.foreign = 0
        self.last_facts: SequenceFacts | None = None
        self.is_closed = False
        self.watches: WeakSet[Watch] = WeakSet()
        self._running: dict[int, ForwardPass] = {}
        self._without_graph: deque[tuple[int, Origin]] = deque(maxlen=_MOST_WITHOUT_GRAPH)

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
            running = self._running[get_ident()] = ForwardPass(self, self.finished, recomputing=autograd_runs())
        entry = running.enter(module)
        if len(running.stack) == 1:
            entry.frame = _frame_of_call()
        return entry

    def end(self, forward_pass: ForwardPass) -> int:
        """Note that a pass ended well, and return its number."""
        self._running.pop(get_ident(), None)
        if not forward_pass.recomputing:
            forward_pass.index = self.finished
            forward_pass.has_ended = True
            self.finished += 1
        return self.finished - 1

    def note_without_graph(self, origin: Origin) -> None:
        """Note that a call was made without a graph, where one was wanted; it may be made when the call is repeated."""
        self._without_graph.append((torch.autograd._get_sequence_nr(), origin))  # type: ignore[attr-defined]

    def repeated_without_graph(self, entry: Entry) -> Origin | None:
        """Return the call without a graph that `entry` repeats now for the node that autograd is at.

        The node was made when the part that is repeated began, so that its calls are the first ones after it.
        """
        node = torch._C._current_autograd_node()
        if node is None:
            return None
        begin = node._sequence_nr()
        later = (one for one in sorted(self._without_graph, key=itemgetter(0)) if one[0] > begin)
        calls = list(dict.fromkeys(origin for _, origin in later if origin.module is entry.module))
        return calls[entry.index] if entry.index < len(calls) else None

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

    def close(self) -> None:
        """Forget every running pass, of any thread, and wait for no gradient any longer."""
        self.is_closed = True
        for watch in list(self.watches):
            watch.release(self)
        self.watches.clear()
        self._without_graph.clear()
        for forward_pass in list(self._running.values()):
            forward_pass.take_off()
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
