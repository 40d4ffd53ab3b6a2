"""What one forward pass knows of its sequence: its tokens, the cache before them, the padding, the prompt.

It is read once, when the pass begins: the cache grows while the layers run. The first source that applies is taken: a
2-D attention mask as wide as past and new tokens together, `position_ids`, the length of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor

from kamui.errors import PositionError

_CACHE_KEYWORDS: Final = ("cache", "past_key_values")


class Prompts:
    """The prompt lengths of the sequences that one thread generates.

    Outside `generate` a prompt is every token up to and including the call with an empty cache; inside it, the
    tokens of its first pass.
    """

    def __init__(self) -> None:
        self._generating = 0
        self._lengths: Tensor | None = None

    @property
    def generating(self) -> bool:
        """Whether a generation is under way."""
        return self._generating > 0

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


def read_facts(main: object, arguments: dict[str, Any], prompts: Prompts) -> SequenceFacts | None:
    """Read what a model's arguments tell of its sequence; None where its main argument has none.

    Args:
        main: The model's main argument: token ids (B, S) or embeddings (B, S, D).
        arguments: All of its arguments by name.
        prompts: The prompts that this thread is generating from.
    """
    if not isinstance(main, Tensor) or not _is_sequence(main):
        return None
    batch, length = main.shape[:2]
    past = _past_length(arguments)
    mask = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != (batch, past + length):
        mask = None
    position_ids = arguments.get("position_ids")
    if not isinstance(position_ids, Tensor) or position_ids.shape not in ((batch, length), (1, length)):
        position_ids = None
    return SequenceFacts(batch, length, past, mask, position_ids, prompts)


def _is_sequence(main: Tensor) -> bool:
    return main.dim() == 3 or (main.dim() == 2 and not main.is_floating_point())


def _past_length(arguments: dict[str, Any]) -> int:
    for keyword in _CACHE_KEYWORDS:
        length = getattr(arguments.get(keyword), "get_seq_length", None)
        if length is not None:
            return int(length())
    return 0
