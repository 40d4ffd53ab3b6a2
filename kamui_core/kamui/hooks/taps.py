"""Taps: how a module's points are wired to torch.

There is one torch hook on each side of a tapped module, however many scopes and interventions listen there. The
hooks belong to a `ModuleTap`, which knows the wiring of each scope; the last scope that leaves takes them off.
Our output hook comes before those of others and our input hook after them, so that other libraries' recorders
see what an intervention changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from kamui.errors import ScopeError
from kamui.hooks.attention import AttentionMode
from kamui.hooks.call import Call
from kamui.hooks.chain import fold
from kamui.hooks.context import active_scopes, is_suspended
from kamui.hooks.gradients import Line, Running, watch_arguments, watch_output
from kamui.hooks.passes import autograd_runs
from kamui.hooks.ports import Port, TapOwner, Wiring, input_path, no_tensor, output_path
from kamui.hooks.stopping import StopForward, is_stopping
from kamui.hooks.values import Arguments, Path, put, take

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kamui.hooks.passes import Entry


class ModuleTap:
    """The two torch hooks of one module, and the wiring of each scope that listens there.

    On a deep copy of its module a tap does nothing; on the module itself it refuses to be pickled.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Callable[[], nn.Module | None] = ref(module)
        self.wirings: dict[object, Wiring] = {}
        self._ran_with: tuple[object, ...] = ()
        self._ran_here = threading.local()
        self._handles: tuple[RemovableHandle, ...] = (
            module.register_forward_pre_hook(self.before, with_kwargs=True),
            module.register_forward_hook(self.after, prepend=True, always_call=True),
        )

    def close(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleTap:
        return _inert_tap()

    def __reduce__(self) -> tuple[Callable[[], ModuleTap], tuple[()]]:
        if self._module is _no_module:
            return _inert_tap, ()
        raise ScopeError(
            "a model cannot be pickled while a HookManager scope is open on it; leave the scope first, or save "
            "its state_dict()"
        )

    def _listening(self) -> list[Wiring]:
        """Return the wiring of each scope of this context, or where autograd recomputes, of those that were there."""
        scopes: tuple[object, ...] = active_scopes()
        if autograd_runs():
            scopes = getattr(self._ran_here, "scopes", self._ran_with)
        else:
            self._ran_here.scopes = self._ran_with = scopes
        wirings = self.wirings
        return [wirings[scope] for scope in scopes if scope in wirings]

    def before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        """Note that a call of the module begins, and let its input through."""
        if module is not self._module():
            return None
        listening = self._listening()
        if not listening:
            self._note_foreign(module)
            return None
        given: Arguments = (args, kwargs)
        current: Arguments = given
        lines: list[Line] = []
        gradients: tuple[Port, ...] = ()
        running = [(wiring, wiring.scope.enter(module, args, kwargs)) for wiring in listening]
        for wiring, entry in running:
            for port in wiring.input:
                current = _through_input(port, entry, given, current)
            lines += [(port, entry) for port in wiring.attention if port.hears(entry)]
            gradients += wiring.gradients
        if gradients:
            current = watch_arguments(running, current)
        _stop_after_input(running)
        if lines:
            running[-1][1].mode = AttentionMode.push(lines)
        return None if current is given else current

    def after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Let the module's output through, and note that the call ends, in an exception or well."""
        if module is not self._module():
            return None
        leaving = [
            (wiring, entry)
            for wiring in self._listening()
            if (entry := wiring.scope.passes.running(module)) is not None
        ]
        failing = True
        try:
            for _, entry in leaving:
                if entry.mode is not None:
                    entry.mode.remove()
            if leaving and not leaving[0][1].is_failing():
                output = _through_outputs(leaving, output)
                failing = False
                _stop_after_output(leaving)
        finally:
            for wiring, entry in leaving:
                entry.forward_pass.stack.pop()
                entry.mode = None  # it knows the entry, and would keep all of this alive until the next collection
                if failing and not is_stopping(entry):
                    wiring.scope.passes.drop_if_ended(entry.forward_pass)
        return output

    def _note_foreign(self, module: nn.Module) -> None:
        if not is_suspended() and not autograd_runs():
            for wiring in self.wirings.values():
                if wiring.scope.model is module:
                    wiring.scope.passes.foreign += 1


_taps: WeakKeyDictionary[nn.Module, ModuleTap] = WeakKeyDictionary()
_lock = threading.RLock()


def wire(scope: TapOwner, module: nn.Module) -> Wiring:
    """Return the wiring of `scope` on `module`; the torch hooks come with the first one."""
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            tap = _taps[module] = ModuleTap(module)
        if scope not in tap.wirings:
            tap.wirings = {**tap.wirings, scope: Wiring(scope)}
        return tap.wirings[scope]


def unwire(scope: TapOwner, module: nn.Module) -> None:
    """Take `scope` off `module`; the torch hooks go with the last one."""
    with _lock:
        tap = _taps.get(module)
        if tap is None:
            return
        tap.wirings = {other: wiring for other, wiring in tap.wirings.items() if other is not scope}
        if not tap.wirings:
            tap.close()
            del _taps[module]


def _inert_tap() -> ModuleTap:
    tap = ModuleTap.__new__(ModuleTap)
    tap._module = _no_module
    return tap


def _no_module() -> None:
    return None


def _through_input(port: Port, entry: Entry, given: Arguments, current: Arguments) -> Any:
    if not port.hears(entry):
        return current
    return _fold_at(port, entry, input_path(port, entry, current), given, current)


def _through_outputs(leaving: Running, output: Any) -> Any:
    current = output
    gradients: tuple[Port, ...] = ()
    for wiring, entry in leaving:
        if entry.mode is not None:
            entry.mode.check(entry.module)
        for port in wiring.output:
            current = _through_output(port, entry, output, current)
        gradients += wiring.gradients
    if gradients:
        current = watch_output(leaving, current)
    ending = [(wiring.scope, entry) for wiring, entry in leaving if entry.is_outermost()]
    for scope, entry in ending:
        scope.tell_finished(entry, current)
    for scope, entry in ending:
        scope.keep(entry.forward_pass)
    return None if current is output else current


def _stop_after_input(running: Running) -> None:
    for wiring, entry in running:
        if wiring.scope.may_stop(entry, wiring.input):
            raise StopForward(entry.forward_pass.stack[0])


def _stop_after_output(leaving: Running) -> None:
    for wiring, entry in leaving:
        if wiring.scope.may_stop(entry, (*wiring.attention, *wiring.output)) and not entry.is_outermost():
            raise StopForward(entry.forward_pass.stack[0])


def _through_output(port: Port, entry: Entry, output: Any, current: Any) -> Any:
    if not port.hears(entry):
        return current
    if isinstance(current, Tensor) and not port.selector:
        return fold(port.listeners, current, Call(entry, output))
    return _fold_at(port, entry, output_path(port, entry, current), output, current)


def _fold_at(port: Port, entry: Entry, path: Path, given: Any, current: Any) -> Any:
    value = take(current, path)
    if not isinstance(value, Tensor):
        raise no_tensor(port, entry, value)
    changed = fold(port.listeners, value, Call(entry, take(given, path)))  # type: ignore[arg-type]
    return current if changed is value else put(current, path, changed)
