"""What a scope has to say at its end: points that never fired, edits that changed nothing, runs that it did not see."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kamui.errors import ForeignForwardWarning, KamuiWarning, NeverFiredWarning, NoEffectWarning, SwappedModuleWarning
from kamui.hooks.reading import why_no_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import nn

    from kamui.hooks.chain import Listener
    from kamui.hooks.scope import Scope
    from kamui.hooks.use import Use


def findings_of(scope: Scope) -> list[KamuiWarning]:
    """Return what the user of a scope should be told at its end."""
    found: list[KamuiWarning] = [*_surroundings_of(scope)]
    silent = [one for one in scope.listeners() if one.calls == 0 and one.since < scope.passes.finished]
    for why in dict.fromkeys(map(_why_silent, silent)):
        points = _listed(one for one in silent if _why_silent(one) == why)
        found.append(
            NeverFiredWarning(
                f"the model ran {scope.passes.finished} time(s), and these points never fired: {points}; {why}"
            )
        )
    missed = [one for one in scope.listeners() if one.calls and one.missed == one.calls]
    if missed:
        found.append(
            NeverFiredWarning(
                f"the positions asked for were in no call of these points: {_listed(missed)}; positions count the real "
                f"tokens of a row from 0, negative ones back from the end of the prompt"
            )
        )
    found += [_without_effect(use) for use in scope.uses if _never_replaced(use)]
    if scope.passes.foreign:
        found.append(
            ForeignForwardWarning(
                f"the model ran {scope.passes.foreign} time(s) in threads or tasks that do not have this scope, and "
                f"nothing was seen or changed there; open a scope there, or HookManager(model, isolated=False)"
            )
        )
    return found


def _why_silent(listener: Listener) -> str:
    if listener.point.is_gradient:
        return why_no_gradient(listener)
    return "their modules were not called, or do not compute that quantity"


def _never_replaced(use: Use) -> bool:
    called = [one for one in use.listeners if one.calls > one.missed]
    return use.intervention.replaces and bool(called) and not any(one.changed for one in called)


def _without_effect(use: Use) -> NoEffectWarning:
    calls = sum(one.calls for one in use.listeners)
    return NoEffectWarning(
        f"intervention {use.label!r} replaced nothing in {calls} call(s) at {_listed(use.listeners)}; its function "
        f"returned None each time: did it forget to return the new value?"
    )


def _listed(listeners: Iterable[Listener]) -> str:
    names = [f"{one.point!r} ({one.label})" for one in listeners]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _surroundings_of(scope: Scope) -> Iterator[KamuiWarning]:
    """Yield what happened around the scope: modules that were swapped, a model called from a compiled function."""
    swapped = {str(one.point): one for one in scope.listeners() if not scope.locator.still_has(one.point, one.place)}
    for name, listener in swapped.items():
        yield SwappedModuleWarning(
            f"point {name!r} ({listener.label}) is another module now: {listener.point.module!r} was replaced inside "
            f"the scope, and the new module was neither seen nor changed; replace it before listening to it"
        )
    calls = [one.calls for one in scope.listeners()]
    if calls and not any(calls) and not scope.passes.ran() and _was_compiled(scope.model):
        yield NeverFiredWarning(
            "the scope listened and saw no forward pass of its model, which is part of something that was compiled; a "
            "call from within a function compiled with torch.compile cannot be seen: compile the model instead of "
            "the function, or call the model itself"
        )


def _was_compiled(model: nn.Module) -> bool:
    """Tell whether torch.compile has ever gone through the model; it leaves a mark on the parameters."""
    return "torch._dynamo" in sys.modules and any(
        hasattr(parameter, "_dynamo_static_input_type") for parameter in model.parameters()
    )
