"""Token positions that stay right under a KV cache and under padding.

Positions count the real tokens of a row from 0. Negative ones count back from the end of the prompt, so that
-1 is the last prompt token in every step of a generation. What a pass knows of its sequence is read once, when
it begins: the cache grows while the layers run. The first source that applies is taken: a 2-D attention mask as
wide as past and new tokens together, `position_ids`, the length of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, Literal

import torch
from torch import Tensor

from kamui.errors import PositionError

if TYPE_CHECKING:
    from kamui.hooks.passes import Call
    from kamui.hooks.points import HookPoint

Positions = int | Sequence[int] | slice | Tensor | Literal["prompt", "generated", "last"] | None

_CACHE_KEYWORDS: Final = ("cache", "past_key_values")
_KEY_IOS: Final = ("k", "v")
_WORDS: Final = ("prompt", "generated", "last")


class Prompts:
    """The prompt lengths of the sequences that one thread generates.

    Outside `generate` a prompt is every token up to and including the call with an empty cache; inside it, the
    tokens of its first pass.
    """

    def __init__(self) -> None:
        self._generating = 0
        self._lengths: Tensor | None = None

    def note(self, lengths: Tensor, past: int) -> Tensor | None:
        """Take account of a pass with `past` cached tokens, and return the prompt lengths that hold in it."""
        if self._lengths is None or (past == 0 and not self._generating):
            self._lengths = lengths if past == 0 else None
        held = self._lengths
        return held if held is None or held.shape == lengths.shape else None

    @contextmanager
    def generation(self) -> Iterator[None]:
        """Hold the prompt of the first pass inside for all that follow it."""
        self._lengths = None
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            self._lengths = None


class SequenceFacts:
    """What one forward pass knows of its sequence, read when it begins.

    Args:
        batch: B, the rows.
        length: S, the tokens of this pass.
        past: The tokens that the cache held when the pass began.
        mask: The 2-D attention mask (B, past + S), if that is what was given.
        position_ids: The model's own positions (B, S) or (1, S), if given.
        prompts: The prompts that this thread is generating from.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        past: int,
        mask: Tensor | None,
        position_ids: Tensor | None,
        prompts: Prompts,
    ) -> None:
        self.batch = batch
        self.length = length
        self.past = past
        self._mask = mask
        self._position_ids = position_ids
        self._prompt_lengths = prompts.note(self._real_tokens(), past)

    def key_positions(self) -> Tensor:
        """Return the positions of cached and new tokens, (B, past + S); -1 for padding.

        Raises:
            PositionError: Only the new tokens' positions are known.
        """
        if self._mask is not None:
            real = self._mask != 0
            return torch.where(real, real.long().cumsum(-1) - 1, -1)
        if self._position_ids is not None and self.past:
            raise PositionError(
                "the positions of the cached keys are not known: this call has position_ids but no 2-D attention "
                "mask; pass attention_mask"
            )
        if self._position_ids is not None:
            return self._position_ids.expand(self.batch, -1)
        return torch.arange(self.past + self.length).expand(self.batch, -1)

    def positions(self) -> Tensor:
        """Return the positions of the new tokens, (B, S); -1 for padding."""
        if self._mask is None and self._position_ids is not None:
            return self._position_ids.expand(self.batch, -1)
        return self.key_positions()[:, self.past :]

    def prompt_lengths(self) -> Tensor | None:
        """Return how many real tokens each prompt has, (B,), or None where that cannot be known."""
        return self._prompt_lengths

    def _real_tokens(self) -> Tensor:
        if self._mask is not None:
            return (self._mask != 0).sum(-1)
        if self._position_ids is not None:
            return self._position_ids.expand(self.batch, -1).amax(-1) + 1
        return torch.full((self.batch,), self.past + self.length)


def read_facts(main: object, kwargs: dict[str, Any], prompts: Prompts) -> SequenceFacts | None:
    """Read what a model's arguments tell of its sequence; None where its main argument has none.

    Args:
        main: The model's main argument: token ids (B, S) or embeddings (B, S, D).
        kwargs: Its keyword arguments.
        prompts: The prompts that this thread is generating from.
    """
    if not isinstance(main, Tensor) or not _is_sequence(main):
        return None
    batch, length = main.shape[:2]
    past = _past_length(kwargs)
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != (batch, past + length):
        mask = None
    position_ids = kwargs.get("position_ids")
    if not isinstance(position_ids, Tensor) or position_ids.shape not in ((batch, length), (1, length)):
        position_ids = None
    return SequenceFacts(batch, length, past, mask, position_ids, prompts)


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
    if not counts.any():
        return None
    if (counts != counts[0]).any():
        raise PositionError(
            f"the rows of point {point!r} have different numbers of tokens at positions {positions!r}: "
            f"{counts.tolist()}; capture without positions and choose per row"
        )
    columns = chosen.nonzero()[:, 1].view(chosen.shape[0], *(1 for _ in range(value.dim() - 3)), -1, 1)
    return value.take_along_dim(columns, dim=-2)


def _chosen_tokens(positions: Positions, point: HookPoint, value: Tensor, call: Call) -> Tensor:
    known = call.key_positions if point.io in _KEY_IOS else call.positions
    if known is None:
        raise PositionError(
            f"positions {positions!r} cannot be found at point {point!r}: the forward pass did not begin with "
            f"token ids (B, S) or embeddings (B, S, D); leave positions out, or call the model as a whole"
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
        raise PositionError(f"{wanted.shape[0]} positions were given for {known.shape[0]} rows; give one for each row")
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


def _is_sequence(main: Tensor) -> bool:
    return main.dim() == 3 or (main.dim() == 2 and not main.is_floating_point())


def _past_length(kwargs: dict[str, Any]) -> int:
    for keyword in _CACHE_KEYWORDS:
        length = getattr(kwargs.get(keyword), "get_seq_length", None)
        if length is not None:
            return int(length())
    return 0
