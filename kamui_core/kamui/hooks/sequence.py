"""What one forward pass knows of its sequence: its tokens, the cache before them, the padding, the prompt.

It is read once, when the pass begins: the cache grows while the layers run. The first source that applies is taken: a
2-D attention mask as wide as past and new tokens together, `position_ids`, the length of the cache.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn

from kamui.errors import PositionError

_CACHE_KEYWORDS: Final = ("cache", "past_key_values")


@dataclasses.dataclass(frozen=True)
class Given:
    """What a generation was given: how wide its prompt is, and the mask of that, (B, width), if any."""

    width: int = 0
    mask: Tensor | None = None

    def expanded(self, batch: int) -> Tensor | None:
        """Return the mask with each row repeated, as beams and several samples for one prompt have it."""
        if self.mask is None or batch % len(self.mask):
            return None
        return self.mask.repeat_interleave(batch // len(self.mask), dim=0)


class Prompts:
    """The prompt lengths of the sequences that one thread generates.

    Outside `generate` a prompt is every token up to and including the call with an empty cache; inside it, the
    tokens of its first pass.
    """

    def __init__(self) -> None:
        self._generating = 0
        self._lengths: Tensor | None = None
        self._given: Given = Given()

    @property
    def generating(self) -> bool:
        """Whether a generation is under way."""
        return self._generating > 0

    def mask(self, batch: int, width: int) -> Tensor | None:
        """Return the mask of prompt and generated tokens (B, width), where `generate` was given one."""
        mask = self._given.expanded(batch)
        if mask is None:
            return None
        generated = mask.new_ones(batch, max(width - mask.shape[1], 0))
        return torch.cat([mask[:, :width], generated], dim=-1)  # (B, width)

    def note(self, lengths: Tensor, past: int, length: int) -> Tensor | None:
        """Take account of a pass of `length` tokens after `past` cached ones; return the prompt lengths in it."""
        mask = self._given.expanded(len(lengths))
        if mask is not None:
            return (mask != 0).sum(-1)
        if self._lengths is None or (past == 0 and not self._generating):
            self._lengths = lengths if past == 0 and length >= self._given.width else None
        held = self._lengths
        return held if held is None or held.shape == lengths.shape else None

    @contextmanager
    def generation(self, given: Given) -> Iterator[None]:
        """Hold the prompt that is given, or that of the first pass inside, for all that follow it."""
        self._lengths = None
        around, self._given = self._given, given
        self._generating += 1
        try:
            yield
        finally:
            self._generating -= 1
            self._lengths = None
            self._given = around


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
        self._prompt_lengths = prompts.note(self._real_tokens(), past, length)

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
    mask = given = arguments.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != (batch, past + length):
        mask = None
    position_ids = arguments.get("position_ids")
    if not isinstance(position_ids, Tensor) or position_ids.shape not in ((batch, length), (1, length)):
        position_ids = None
    if mask is None and position_ids is None:
        mask = prompts.mask(batch, past + length)
    if mask is None and position_ids is None and given is not None:
        return None
    return SequenceFacts(batch, length, past, mask, position_ids, prompts)


def read_decoder_facts(arguments: dict[str, Any], prompts: Prompts) -> SequenceFacts | None:
    """Read what the arguments of an encoder-decoder model tell of the sequence that it decodes.

    Args:
        arguments: The model's arguments by name.
        prompts: The prompts that this thread is generating from.
    """
    prefix = "decoder_"
    own = {name.removeprefix(prefix): value for name, value in arguments.items() if name.startswith(prefix)}
    main = own.get("input_ids") if own.get("input_ids") is not None else own.get("inputs_embeds")
    return read_facts(main, own | {name: arguments.get(name) for name in _CACHE_KEYWORDS}, prompts)


def encoder_of(model: nn.Module) -> nn.Module | None:
    """Return the encoder of an encoder-decoder model, whose sequence is another than the decoder's."""
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return None
    get_encoder: Any = getattr(model, "get_encoder", None)
    encoder = get_encoder() if callable(get_encoder) else None
    return encoder if isinstance(encoder, nn.Module) and encoder is not model else None


def _is_sequence(main: Tensor) -> bool:
    return main.dim() == 3 or (main.dim() == 2 and not main.is_floating_point())


def _past_length(arguments: dict[str, Any]) -> int:
    for keyword in _CACHE_KEYWORDS:
        length = getattr(arguments.get(keyword), "get_seq_length", None)
        if length is not None:
            return int(length())
    return 0
