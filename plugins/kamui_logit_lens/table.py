"""The lens as a table for the terminal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rich.table import Table


def top_table(
    layers: Sequence[str],
    token_ids: Tensor,
    probabilities: Tensor,
    last: int,
    decode: Callable[[int], str] | None,
) -> Table:
    """Return a line for each layer, the last one on top, and a column for each position.

    Args:
        layers: The names of the L layers.
        token_ids: The likeliest tokens of one row, (L, S, k).
        probabilities: How likely each is, (L, S, k).
        last: How many positions to show, counted from the end.
        decode: Turns a token id into text.
    """
    from rich.table import Table
    from rich.text import Text

    total = token_ids.shape[1]
    shown = range(max(total - last, 0), total)
    title = "" if len(shown) == total else f"the last {len(shown)} of {total} positions"
    table = Table(title=title)
    table.add_column("layer", no_wrap=True, min_width=max(map(len, layers), default=0))
    for position in shown:
        table.add_column(str(position))
    for index in reversed(range(len(layers))):
        cells = (_cell(token_ids[index, column], probabilities[index, column], decode) for column in shown)
        table.add_row(Text(layers[index]), *map(Text, cells))
    return table


def _cell(token_ids: Tensor, probabilities: Tensor, decode: Callable[[int], str] | None) -> str:
    pairs = zip(token_ids.tolist(), probabilities.tolist(), strict=True)
    return "\n".join(f"{_text(token_id, decode)} {chance:.0%}" for token_id, chance in pairs)


def _text(token_id: int, decode: Callable[[int], str] | None) -> str:
    return str(token_id) if decode is None else repr(decode(token_id))
