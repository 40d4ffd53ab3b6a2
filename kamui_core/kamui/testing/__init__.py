"""Tools for the tests of those who write interventions. Importing this imports nothing else."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kamui.testing.no_trace import leaves_no_trace

_HOMES = {"leaves_no_trace": "kamui.testing.no_trace"}

__all__ = ["leaves_no_trace"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kamui.testing' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_HOMES[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
