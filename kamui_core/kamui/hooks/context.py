"""The scopes that are open in the running context (thread or task)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class OpenScope(Protocol):
    """What is known of a scope here."""

    serial: int
    isolated: bool
    is_open: bool

    @property
    def manager(self) -> Any:
        """The `HookManager` that opened it."""


_open_scopes: ContextVar[tuple[OpenScope, ...]] = ContextVar("kamui_open_scopes", default=())
_suspended: ContextVar[bool] = ContextVar("kamui_suspended", default=False)
_shared_scopes: tuple[OpenScope, ...] = ()


def active_scopes() -> tuple[OpenScope, ...]:
    """Return the scopes that are open in this context, outer before inner."""
    own = _open_scopes.get()
    if _shared_scopes and not _suspended.get():
        return tuple(sorted({*own, *_shared_scopes}, key=lambda scope: scope.serial))
    return own


def is_suspended() -> bool:
    """Tell whether this context runs models as if no scope were open."""
    return _suspended.get()


def activate(scope: OpenScope) -> None:
    """Make `scope` the innermost one of this context, or one of every context when it is shared."""
    global _shared_scopes
    if scope.isolated:
        _open_scopes.set((*(other for other in _open_scopes.get() if other.is_open), scope))
    else:
        _shared_scopes = (*_shared_scopes, scope)


def deactivate(scope: OpenScope) -> bool:
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
