"""Which hooks are on a model, and whose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final

from torch import nn

_TABLES: Final = {
    "forward_pre": "_forward_pre_hooks",
    "forward": "_forward_hooks",
    "backward_pre": "_backward_pre_hooks",
    "backward": "_backward_hooks",
}


@dataclasses.dataclass(frozen=True)
class InstalledHook:
    """One hook on one module.

    Attributes:
        module: The module's path; empty for the root.
        kind: `forward_pre`, `forward`, `backward_pre` or `backward`.
        order: Its place among the hooks of that kind on that module, from 0; they run in this order.
        owner: The package whose code it is; `kamui` for ours.
        hook: The callable.
    """

    module: str
    kind: str
    order: int
    owner: str
    hook: Callable[..., Any]

    def __str__(self) -> str:
        name = getattr(self.hook, "__qualname__", type(self.hook).__qualname__)
        return f"{self.module or '(root)'} {self.kind}[{self.order}] {self.owner}: {name}"


def inspect(model: nn.Module) -> list[InstalledHook]:
    """Return every hook on `model` and its modules, in the order of the modules and then of running."""
    return list(_walk(model))


def _walk(model: nn.Module) -> Iterator[InstalledHook]:
    for path, module in model.named_modules():
        for kind, table in _TABLES.items():
            for order, hook in enumerate(getattr(module, table).values()):
                yield InstalledHook(path, kind, order, _owner(hook), hook)


def _owner(hook: Callable[..., Any]) -> str:
    function = getattr(hook, "func", hook)
    module = getattr(function, "__module__", None) or type(function).__module__
    return str(module).partition(".")[0]
