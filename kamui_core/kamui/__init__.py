"""KAMUI: look into a PyTorch model and change what it computes, with interventions that install as plugins.

The names below are loaded when they are first used: importing `kamui` imports neither torch nor anything else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kamui.hooks.manager import HookManager, use
    from kamui.hooks.points import HookPoint
    from kamui.hooks.registry import HookRegistry
    from kamui.interventions.hookspecs import hookimpl
    from kamui.interventions.intervention import Intervention

__version__ = "0.1.0"

_HOMES = {
    "HookManager": "kamui.hooks.manager",
    "HookPoint": "kamui.hooks.points",
    "HookRegistry": "kamui.hooks.registry",
    "Intervention": "kamui.interventions.intervention",
    "hookimpl": "kamui.interventions.hookspecs",
    "use": "kamui.hooks.manager",
}

__all__ = ["HookManager", "HookPoint", "HookRegistry", "Intervention", "__version__", "hookimpl", "use"]


def __getattr__(name: str) -> Any:
    if name in ("errors", "hooks", "interventions", "model"):
        return importlib.import_module(f"kamui.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'kamui' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
