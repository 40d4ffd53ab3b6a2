"""Attention heads: which of them an option `heads` means at a point."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kamui.errors import HeadError
from kamui.hooks.points import ATTENTION_IOS

if TYPE_CHECKING:
    from kamui.hooks.points import HookPoint


def head_indices(heads: int | Sequence[int] | None, point: HookPoint, value: Tensor) -> list[int] | None:
    """Return the chosen heads in ascending order, each once, or None for all of them.

    Args:
        heads: One head or several; negative ones count back from the last.
        point: Where `value` passes: `q`, `k`, `v`, `pre_softmax`, `weights` or `z`.
        value: The value there, (B, H, ..., ...). Keys and values may have fewer heads than queries.

    Raises:
        HeadError: The value at this point has no heads, or not that many.
    """
    if heads is None:
        return None
    if point.forward_io not in ATTENTION_IOS or value.dim() != 4:
        raise HeadError(
            f"heads {heads!r} cannot be chosen at point {point!r}, whose value has shape {tuple(value.shape)}; "
            f"heads are a dimension of {', '.join(ATTENTION_IOS)}"
        )
    count = value.shape[1]
    chosen = [heads] if isinstance(heads, int) else list(heads)
    if unknown := [head for head in chosen if not -count <= head < count]:
        raise HeadError(f"point {point!r} has {count} heads, numbered from 0; there is no head {unknown[0]}")
    return sorted({head % count for head in chosen})
