"""Taps: how a module's points are wired to torch.

There is one torch hook on each side of a tapped module, however many scopes and interventions listen there. The
hooks belong to a `ModuleTap`, which knows the wiring of each scope; the last scope that leaves takes them off.
Our output hook comes before those of others and our input hook after them, so that other libraries' recorders
see what an intervention changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from kamui.errors import ScopeError, ValueStructureError
from kamui.hooks.attention import AttentionMode
from kamui.hooks.chain import Listener, fold
from kamui.hooks.passes import Call, Entry, ForwardPass, active_scopes, is_suspended
from kamui.hooks.values import Path, argument_path, kind, main_path, put, take

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kamui.hooks.scope import Scope

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


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

    __slots__ = ("attention", "input", "output")

    def __init__(self) -> None:
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


class ModuleTap:
    """The two torch hooks of one module, and the wiring of each scope that listens there."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self.wirings: dict[Scope, Wiring] = {}
        self._handles: tuple[RemovableHandle, ...] = (
            module.register_forward_pre_hook(TapHook(self._before), with_kwargs=True),
            module.register_forward_hook(TapHook(self._after), prepend=True, always_call=True),
        )

    def close(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _listening(self) -> list[tuple[Scope, Wiring]]:
        wirings = self.wirings
        return [(scope, wirings[scope]) for scope in active_scopes() if scope in wirings]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if module is not self._module():
            return None
        listening = self._listening()
        if not listening:
            self._note_foreign(module)
            return None
        given: Arguments = (args, kwargs)
        runs = [Run(wiring, scope, *scope.enter(module, args, kwargs)) for scope, wiring in listening]
        current: Arguments = given
        for run in runs:
            for port in run.wiring.input:
                current = _through_input(port, run, given, current)
        if any(run.wiring.attention for run in runs):
            runs[-1].entry.mode = AttentionMode.push(
                [(port, run.call()) for run in runs for port in run.wiring.attention if port.hears(run.entry)]
            )
        return None if current is given else current

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if module is not self._module():
            return None
        runs = [run for scope, wiring in self._listening() if (run := _run_of(scope, wiring, module)) is not None]
        for run in runs:
            run.forward_pass.take_off_modes(run.entry)
        if not runs:
            return None
        failing = runs[0].entry.is_failing()
        try:
            return None if failing else self._through_outputs(runs, output)
        except BaseException:
            failing = True
            raise
        finally:
            for run in runs:
                run.forward_pass.leave(run.entry)
                if failing:
                    run.scope.passes.drop_if_ended(run.forward_pass)

    def _through_outputs(self, runs: Sequence[Run], output: Any) -> Any:
        current = output
        for run in runs:
            for port in run.wiring.output:
                current = _through_output(port, run, output, current)
        for run in runs:
            if run.forward_pass.stack[0] is run.entry:
                run.scope.finish(run.forward_pass, run.call(), current)
        return None if current is output else current

    def _note_foreign(self, module: nn.Module) -> None:
        if not is_suspended():
            for scope in self.wirings:
                if scope.model is module:
                    scope.passes.foreign += 1


class Run(NamedTuple):
    """One running call of a tapped module, as one scope sees it."""

    wiring: Wiring
    scope: Scope
    forward_pass: ForwardPass
    entry: Entry

    def call(self, original: Tensor | None = None) -> Call:
        """Make what callbacks may know about this call."""
        return Call(self.forward_pass, self.entry.module, self.entry.index, original)


class TapHook:
    """A torch hook of ours: it does nothing on a deep copy of its module, and refuses to be pickled."""

    __slots__ = ("_act",)

    def __init__(self, act: Callable[..., Any]) -> None:
        self._act = act

    def __call__(self, *arguments: Any) -> Any:
        """Do what torch calls the hook for."""
        return self._act(*arguments)

    def __deepcopy__(self, memo: dict[int, Any]) -> TapHook:
        return TapHook(_do_nothing)

    def __reduce__(self) -> NoReturn:
        raise ScopeError(
            "a model cannot be pickled while a HookManager scope is open on it; leave the scope first, or save "
            "its state_dict()"
        )


_taps: WeakKeyDictionary[nn.Module, ModuleTap] = WeakKeyDictionary()
_lock = threading.RLock()


def wire(scope: Scope, module: nn.Module) -> Wiring:
    """Return the wiring of `scope` on `module`; the torch hooks come with the first one."""
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            tap = _taps[module] = ModuleTap(module)
        if scope not in tap.wirings:
            tap.wirings = {**tap.wirings, scope: Wiring()}
        return tap.wirings[scope]


def unwire(scope: Scope, module: nn.Module) -> None:
    """Take `scope` off `module`; the torch hooks go with the last one."""
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            return
        tap.wirings = {other: wiring for other, wiring in tap.wirings.items() if other is not scope}
        if not tap.wirings:
            tap.close()
            del _taps[module]


def _run_of(scope: Scope, wiring: Wiring, module: nn.Module) -> Run | None:
    forward_pass = scope.passes.current()
    entry = None if forward_pass is None else forward_pass.entry_of(module)
    return None if forward_pass is None or entry is None else Run(wiring, scope, forward_pass, entry)


def _do_nothing(*arguments: Any) -> None:
    return None


def _through_input(port: Port, run: Run, given: Arguments, current: Arguments) -> Any:
    if not port.hears(run.entry):
        return current
    path = argument_path(run.entry.module, *current, port.selector)
    if path is None:
        raise _no_tensor(port, run, current[0] or current[1])
    return _fold_at(port, run, path, given, current)


def _through_output(port: Port, run: Run, output: Any, current: Any) -> Any:
    if not port.hears(run.entry):
        return current
    inner = main_path(take(current, port.selector))
    if inner is None:
        raise _no_tensor(port, run, take(current, port.selector))
    return _fold_at(port, run, (*port.selector, *inner), output, current)


def _fold_at(port: Port, run: Run, path: Path, given: Any, current: Any) -> Any:
    value = take(current, path)
    if not isinstance(value, Tensor):
        raise _no_tensor(port, run, value)
    changed = fold(port.listeners, value, run.call(take(given, path)))  # type: ignore[arg-type]
    return current if changed is value else put(current, path, changed)


def _no_tensor(port: Port, run: Run, value: object) -> ValueStructureError:
    point = str(port.listeners[0].point)
    return ValueStructureError(
        f"point {point!r} has no tensor: {type(run.entry.module).__name__} has {kind(value)} there; "
        f"choose another point, or one part of the value with a selector such as {point + '[1]'!r}"
    )
