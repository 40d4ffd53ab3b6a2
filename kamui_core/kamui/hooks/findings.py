"""What a scope has to say at its end: points that never fired, edits that changed nothing, runs that it did not see."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kamui.errors import ForeignForwardWarning, KamuiWarning, NeverFiredWarning, NoEffectWarning
from kamui.hooks.reading import why_no_gradient

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kamui.hooks.chain import Listener
    from kamui.hooks.scope import Scope, Use


def findings_of(scope: Scope) -> list[KamuiWarning]:
    """Return what the user of a scope should be told at its end."""
    found: list[KamuiWarning] = []
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
