"""Token positions that stay right under a KV cache and under padding.

Positions count the real tokens of a row from 0. Negative ones count back from the end of the prompt, so that
-1 is the last prompt token in every step of a generation. The counted dimension is the last but one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, Literal

import torch
from torch import Tensor

from kamui.errors import PositionError

if TYPE_CHECKING:
    from kamui.hooks.call import Call
    from kamui.hooks.points import HookPoint

Positions = int | Sequence[int] | slice | Tensor | Literal["prompt", "generated", "last"] | None

_KEY_IOS: Final = ("k", "v")
_WORDS: Final = ("prompt", "generated", "last")


def token_mask(positions: Positions, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
    """Return which part of `value` lies at `positions`, as a mask that broadcasts against it; None for all of it.

    The counted dimension is the last but one: tokens for `input`, `output` and `mid`, queries for `q`, `z`,
    `pre_softmax` and `weights`, keys for `k` and `v`.

    Raises:
        PositionError: The positions cannot be known in this call, or do not fit the value.
    """
    if positions is None:
        return None
    chosen = _chosen_tokens(positions, point, value, call)
    call.note_positions(found=bool(chosen.any()))
    shape = [chosen.shape[0], *(1 for _ in range(value.dim() - 3)), chosen.shape[1], 1]
    return chosen.to(value.device).view(shape)


def take_positions(positions: Positions, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
    """Return the part of `value` at `positions`, (B, ..., n, D); None when none of them is in this call.

    Raises:
        PositionError: The positions cannot be known, or the rows have different numbers of them.
    """
    if positions is None:
        return value
    chosen = _chosen_tokens(positions, point, value, call).to(value.device)
    counts = chosen.sum(-1)
    found = bool(counts.any())
    call.note_positions(found=found)
    if not found:
        return None
    if (counts != counts[0]).any():
        raise PositionError(
            f"the rows of point {point!r} have different numbers of tokens at positions {positions!r}: "
            f"{counts.tolist()}; capture without positions and choose per row"
        )
    columns = chosen.nonzero()[:, 1].view(chosen.shape[0], *(1 for _ in range(value.dim() - 3)), -1, 1)
    return value.take_along_dim(columns, dim=-2)


def _chosen_tokens(positions: Positions, point: HookPoint, value: Tensor, call: Call) -> Tensor:
    known = call.key_positions if point.forward_io in _KEY_IOS else call.positions
    if known is None:
        raise PositionError(
            f"positions {positions!r} cannot be found at point {point!r}: the forward pass did not begin with "
            f"token ids (B, S) or embeddings (B, S, D), or with a mask that does not tell which of them are padding; "
            f"leave positions out, or call the model as a whole with a 2-D attention_mask"
        )
    if value.dim() < 3 or value.shape[0] != known.shape[0] or value.shape[-2] > known.shape[1]:
        raise PositionError(
            f"positions {positions!r} do not fit point {point!r}: its value has shape {tuple(value.shape)}, "
            f"the sequence has shape {tuple(known.shape)}"
        )
    if value.shape[-2] != known.shape[1]:
        known = known[:, known.shape[1] - value.shape[-2] :]
    return _select(positions, known, call)


def _select(positions: Positions, known: Tensor, call: Call) -> Tensor:
    if isinstance(positions, str):
        return _select_word(positions, known, call)
    if isinstance(positions, slice):
        return _select_slice(positions, known, call)
    if isinstance(positions, Tensor) and positions.dim() == 1:
        return _select_per_row(positions, known, call)
    wanted = [positions] if isinstance(positions, int) else positions
    if not isinstance(wanted, Sequence) or not all(type(item) is int for item in wanted):
        raise PositionError(
            f"positions are None, an int, a list of ints, a slice, a (B,) tensor or one of {', '.join(_WORDS)}, "
            f"not {positions!r}"
        )
    chosen = torch.zeros_like(known, dtype=torch.bool)
    for item in wanted:
        chosen |= known == (item if item >= 0 else _from_prompt_end(item, call, known))
    return chosen & (known >= 0)


def _select_word(word: str, known: Tensor, call: Call) -> Tensor:
    if word not in _WORDS:
        raise PositionError(f"there are no positions {word!r}; it is one of {', '.join(_WORDS)}")
    end = _from_prompt_end(0, call, known)
    if word == "prompt":
        return (known >= 0) & (known < end)
    return known >= (end if word == "generated" else (end - 1).clamp(min=0))


def _select_slice(wanted: slice, known: Tensor, call: Call) -> Tensor:
    step = 1 if wanted.step is None else wanted.step
    if step < 1:
        raise PositionError(f"a slice of positions goes forward; its step is {step}")
    start, stop = (
        bound if bound is None or bound >= 0 else _from_prompt_end(bound, call, known)
        for bound in (wanted.start, wanted.stop)
    )
    start = 0 if start is None else start
    chosen = (known >= 0) & (known >= start) & ((known - start) % step == 0)
    return chosen if stop is None else chosen & (known < stop)


def _select_per_row(wanted: Tensor, known: Tensor, call: Call) -> Tensor:
    if wanted.shape[0] != known.shape[0]:
        raise PositionError(
            f"{wanted.shape[0]} positions were given for {known.shape[0]} rows; a tensor has one for each row, "
            f"a list the same for every row"
        )
    wanted = wanted.to(known.device)[:, None]
    if (wanted < 0).any():
        wanted = torch.where(wanted < 0, wanted + _from_prompt_end(0, call, known), wanted)
    return (known == wanted) & (known >= 0)


def _from_prompt_end(offset: int, call: Call, known: Tensor) -> Tensor:
    lengths = call.prompt_lengths
    if lengths is None:
        raise PositionError(
            "where the prompt ends is not known: this pass continues a cache that was filled outside the scope; "
            "run the prompt inside the scope, or count positions from 0"
        )
    return (lengths.to(known.device) + offset)[:, None]
