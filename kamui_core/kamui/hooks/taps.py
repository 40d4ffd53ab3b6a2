"""Taps: how a module's points are wired to torch.

There is one torch hook on each side of a tapped module, however many scopes and interventions listen there. The
hooks belong to a `ModuleTap`, which knows the wiring of each scope; the last scope that leaves takes them off.
Our output hook comes before those of others and our input hook after them, so that other libraries' recorders
see what an intervention changed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn

from kamui.errors import ScopeError, ValueStructureError
from kamui.hooks.attention import AttentionMode
from kamui.hooks.chain import fold
from kamui.hooks.context import active_scopes, is_suspended
from kamui.hooks.ports import Port, Run, TapOwner, Wiring
from kamui.hooks.values import Path, argument_path, kind, main_path, put, take

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class ModuleTap:
    """The two torch hooks of one module, and the wiring of each scope that listens there."""

    def __init__(self, module: nn.Module) -> None:
        self._module = ref(module)
        self.wirings: dict[object, Wiring] = {}
        self._handles: tuple[RemovableHandle, ...] = (
            module.register_forward_pre_hook(TapHook(self._before), with_kwargs=True),
            module.register_forward_hook(TapHook(self._after), prepend=True, always_call=True),
        )

    def close(self) -> None:
        """Take the hooks off the module."""
        for handle in self._handles:
            handle.remove()

    def _listening(self) -> list[Wiring]:
        wirings = self.wirings
        return [wirings[scope] for scope in active_scopes() if scope in wirings]

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arguments | None:
        if module is not self._module():
            return None
        listening = self._listening()
        if not listening:
            self._note_foreign(module)
            return None
        given: Arguments = (args, kwargs)
        runs = [Run(wiring, *wiring.scope.enter(module, args, kwargs)) for wiring in listening]
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
        runs = [run for wiring in self._listening() if (run := _run_of(wiring, module)) is not None]
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
                    run.wiring.scope.passes.drop_if_ended(run.forward_pass)

    def _through_outputs(self, runs: Sequence[Run], output: Any) -> Any:
        current = output
        for run in runs:
            for port in run.wiring.output:
                current = _through_output(port, run, output, current)
        for run in runs:
            if run.forward_pass.stack[0] is run.entry:
                run.wiring.scope.finish(run.forward_pass, run.call(), current)
        return None if current is output else current

    def _note_foreign(self, module: nn.Module) -> None:
        if not is_suspended():
            for wiring in self.wirings.values():
                if wiring.scope.model is module:
                    wiring.scope.passes.foreign += 1


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


def _run_of(wiring: Wiring, module: nn.Module) -> Run | None:
    forward_pass = wiring.scope.passes.current()
    entry = None if forward_pass is None else forward_pass.entry_of(module)
    return None if forward_pass is None or entry is None else Run(wiring, forward_pass, entry)


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
