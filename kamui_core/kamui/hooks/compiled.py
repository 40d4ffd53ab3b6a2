"""Compiled models: while a scope is open, the compiled parts of its model run eagerly.

torch.compile ignores hooks that come after compilation, and would silently compute without the interventions. What
was compiled is put back with the last scope, and need not be compiled again.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Any, Final
from weakref import WeakKeyDictionary

from torch import nn


class EagerShadow:
    """Stands in for what one module was compiled to.

    Args:
        attribute: Where the module holds it.
        compiled: What was compiled.
        eager: What the module holds meanwhile.
    """

    def __init__(self, attribute: str, compiled: object, eager: Callable[..., Any] | None) -> None:
        self.attribute = attribute
        self.owners: set[object] = set()
        self._compiled = compiled
        self._eager = eager

    def put(self, module: nn.Module) -> None:
        """Let the module run eagerly."""
        vars(module)[self.attribute] = self._eager

    def restore(self, module: nn.Module) -> None:
        """Put back what was compiled, unless somebody else has put something there since."""
        if vars(module).get(self.attribute) is self._eager:
            vars(module)[self.attribute] = self._compiled


_shadows: Final[WeakKeyDictionary[nn.Module, EagerShadow]] = WeakKeyDictionary()
_lock: Final = threading.RLock()


def run_eagerly(model: nn.Module, owner: object) -> None:
    """Let every compiled part of `model` run eagerly until `owner` is done with it."""
    if "torch._dynamo" not in sys.modules:  # then nothing is compiled, and nothing need be walked
        return
    with _lock:
        for module in model.modules():
            shadow = _shadows.get(module) or _shadow_of(module)
            if shadow is None:
                continue
            if not shadow.owners:
                _shadows[module] = shadow
                shadow.put(module)
            shadow.owners.add(owner)


def run_compiled(owner: object) -> None:
    """Put back what was compiled wherever `owner` was the last that needed it to run eagerly."""
    with _lock:
        for module, shadow in list(_shadows.items()):
            shadow.owners.discard(owner)
            if not shadow.owners:
                shadow.restore(module)
                del _shadows[module]


def _shadow_of(module: nn.Module) -> EagerShadow | None:
    from torch._dynamo import OptimizedModule

    if isinstance(module, OptimizedModule):
        return EagerShadow("forward", vars(module).get("forward"), vars(module)["_modules"]["_orig_mod"].__call__)
    compiled = vars(module).get("_compiled_call_impl")
    return None if compiled is None else EagerShadow("_compiled_call_impl", compiled, None)
