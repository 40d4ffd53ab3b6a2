"""The reference model, its configuration and its trained checkpoint.

Names are imported when first used, so that a `ModelConfig` can be had without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kamui.model.config import ModelConfig
    from kamui.model.kv_cache import KVCache
    from kamui.model.pretrained import load_pretrained
    from kamui.model.transformer import Transformer

__all__ = ["KVCache", "ModelConfig", "Transformer", "load_pretrained"]

_HOMES = {
    "KVCache": "kamui.model.kv_cache",
    "ModelConfig": "kamui.model.config",
    "Transformer": "kamui.model.transformer",
    "load_pretrained": "kamui.model.pretrained",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
