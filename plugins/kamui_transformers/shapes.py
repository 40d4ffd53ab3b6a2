"""What modules are, told by their structure.

Names are looked at where structure leaves a doubt; they are patterns, never the names of classes of one family.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Final

from torch import nn

_QUERIES: Final = re.compile(r"(^|_)w?(q|query|qkv)(_|\d|$)|^c_attn$", re.IGNORECASE)
_CROSS: Final = re.compile(r"cross|enc(oder)?_?(dec(oder)?_?)?att", re.IGNORECASE)
_EXPERTS: Final = re.compile(r"(^|_)experts$")
_RESIDUAL_ARGUMENTS: Final = frozenset({"residual", "input_tensor"})


def is_linear(module: nn.Module) -> bool:
    """Tell whether a module is a matrix that is multiplied with; those of quantised models count."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D" or hasattr(module, "out_features")


def is_norm(module: nn.Module) -> bool:
    """Tell whether a module is a layer norm of some kind."""
    return not module._modules and "norm" in type(module).__name__.lower()


def is_attention(module: nn.Module) -> bool:
    """Tell whether a module itself makes queries, and so computes the dot product."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    return any(
        child is not None and _QUERIES.search(name) and not is_norm(child) for name, child in module._modules.items()
    )


def is_cross_attention(path: str) -> bool:
    """Tell whether the attention module at `path` (in its block) looks at another sequence than its own."""
    return _CROSS.search(path) is not None


def adds_residual(module: nn.Module) -> bool:
    """Tell whether a module is handed the residual stream next to its input, and so gives both together."""
    return not _RESIDUAL_ARGUMENTS.isdisjoint(inspect.signature(type(module).forward).parameters)


def attentions_in(block: nn.Module) -> list[str]:
    """Return the paths of the outermost modules in `block` that compute attention."""
    return list(_outermost_attentions(block, ""))


def experts_in(block: nn.Module) -> str | None:
    """Return the path of the module in `block` that mixes experts, or None when there is none."""
    for path, module in block.named_modules():
        around, _, name = str(path).rpartition(".")
        if around and (_EXPERTS.search(name) or "Experts" in type(module).__name__):
            return around
    return None


def _outermost_attentions(module: nn.Module, path: str) -> Iterator[str]:
    for name, child in module._modules.items():
        if child is None:
            continue
        at = f"{path}.{name}" if path else name
        if is_attention(child):
            yield at
        else:
            yield from _outermost_attentions(child, at)
