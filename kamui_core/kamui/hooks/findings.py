"""Findings: what a scope has to tell at its end, beyond what it saw itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from kamui.errors import KamuiWarning, NeverFiredWarning, SwappedModuleWarning

if TYPE_CHECKING:
    from torch import nn

    from kamui.hooks.scope import Scope


def surroundings_of(scope: Scope) -> Iterator[KamuiWarning]:
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
    return any(hasattr(parameter, "_dynamo_static_input_type") for parameter in model.parameters())
