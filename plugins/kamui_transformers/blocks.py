"""The parts of one block: where attention and feed-forward are, and what they add to the residual stream."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from torch import nn

from kamui_transformers.shapes import (
    adds_residual,
    attentions_in,
    experts_in,
    is_cross_attention,
    is_linear,
    is_norm,
)

_OUT: Final = re.compile(r"^(o|w?o_?proj|wo|out|out_proj|out_lin|c_proj|dense|proj|to_out|projection)$", re.IGNORECASE)
_BEFORE_PRODUCT: Final = re.compile(r"(^|_)(q|k|v|query|key|value|sub|inner)", re.IGNORECASE)


@dataclass(frozen=True)
class Attention:
    """An attention of a block. Paths are relative to the block.

    Attributes:
        path: The module that computes the dot product.
        output: The point at which what it adds to the residual stream passes.
    """

    path: str
    output: str


@dataclass(frozen=True)
class FeedForward:
    """The feed-forward of a block. Paths and points are relative to the block.

    Attributes:
        path: The module; None where its matrices belong to the block itself.
        output: The point at which what it adds to the residual stream passes.
        mid: The point after the activation function; None for a mixture of experts.
    """

    path: str | None
    output: str
    mid: str | None


@dataclass(frozen=True)
class Block:
    """The parts of a block; None is what it does not have."""

    attention: Attention | None
    cross_attention: Attention | None
    feed_forward: FeedForward | None


def parts_of(block: nn.Module) -> Block:
    """Return the parts of a block."""
    paths = attentions_in(block)
    own = [path for path in paths if not is_cross_attention(path)]
    cross = [path for path in paths if is_cross_attention(path)]
    if len(own) == 2 and not cross:  # two in one block, of which the second has no telling name
        own, cross = own[:1], own[1:]
    return Block(
        attention=_attention(block, own[0]) if own else None,
        cross_attention=_attention(block, cross[0]) if cross else None,
        feed_forward=_feed_forward(block, paths),
    )


def _attention(block: nn.Module, path: str) -> Attention:
    module = block.get_submodule(path)
    own = [name for name, child in module.named_children() if _OUT.match(name) and is_linear(child)]
    if own:
        inside = adds_residual(module) or _ends_in_norm(module)
        return Attention(path, f"{path}.{own[-1]}.output" if inside else f"{path}.output")
    around = path.rpartition(".")[0]
    if not around:
        return Attention(path, f"{path}.output")
    outside = [at for at in _linears(block, around) if not at.startswith(f"{path}.")]
    return Attention(path, f"{outside[-1]}.output" if outside else f"{path}.output")


def _ends_in_norm(module: nn.Module) -> bool:
    return any(is_norm(child) and not _BEFORE_PRODUCT.search(name) for name, child in module.named_children())


def _feed_forward(block: nn.Module, attentions: Iterable[str]) -> FeedForward | None:
    experts = experts_in(block)
    if experts:
        return FeedForward(experts, f"{experts}.output", None)
    taken = tuple(f"{_home(block, path)}." for path in attentions)
    linears = [path for path in _linears(block, "") if not path.startswith(taken)]
    if len(linears) < 2:
        return None
    down = linears[-1]
    home = _home_of_last(linears)
    whole = home is not None and not adds_residual(block.get_submodule(home))
    return FeedForward(home, f"{home if whole else down}.output", f"{down}.input")


def _home(block: nn.Module, attention: str) -> str:
    around = attention.rpartition(".")[0]
    return around if around and not isinstance(block.get_submodule(around), nn.ModuleList) else attention


def _home_of_last(paths: list[str]) -> str | None:
    """Return the innermost module that holds the last path and another one; None for the block itself."""
    home = paths[-1].rpartition(".")[0]
    while home and not any(path.startswith(f"{home}.") for path in paths[:-1]):
        home = home.rpartition(".")[0]
    return home or None


def _linears(block: nn.Module, under: str) -> list[str]:
    root = block.get_submodule(under) if under else block
    prefix = f"{under}." if under else ""
    found = [f"{prefix}{path}" for path, module in root.named_modules() if path and is_linear(module)]
    return [path for path in found if not path.startswith(tuple(f"{other}." for other in found))]
