"""Sequences in which a random segment comes twice, and the loss on each of its occurrences."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Repeated(NamedTuple):
    """Sequences that consist of a random segment of n distinct tokens and the same segment once more.

    Attributes:
        token_ids: Token ids (B, 2n).
        length: The length of the segment, n.
    """

    token_ids: Tensor
    length: int

    @property
    def following(self) -> Tensor:
        """The right next token of every position but the last, (B, 2n - 1)."""
        return self.token_ids[:, 1:]

    @property
    def second(self) -> slice:
        """The positions whose next token can be known: those of the second occurrence but the last."""
        return slice(self.length, 2 * self.length - 1)


class Loss(NamedTuple):
    """The mean loss on the first occurrence, where nothing can be known, and on the second."""

    first: float
    second: float


def repeated_sequences(vocab_size: int, rows: int, length: int, generator: torch.Generator) -> Repeated:
    """Draw sequences (rows, 2 * length) that each repeat a random segment."""
    segments = torch.rand(rows, vocab_size, generator=generator).argsort(-1)[:, :length]  # (B, n)
    return Repeated(torch.cat([segments, segments], dim=1), length)


def token_losses(logits: Tensor, sequences: Repeated) -> Tensor:
    """Return the loss of logits (B, 2n, V) on every next token, (B, 2n - 1)."""
    return F.cross_entropy(logits[:, :-1].transpose(1, 2), sequences.following, reduction="none")


def mean_loss(logits: Tensor, sequences: Repeated) -> Loss:
    """Return the mean loss of logits (B, 2n, V) on both occurrences."""
    losses = token_losses(logits, sequences)  # (B, 2n - 1)
    return Loss(losses[:, : sequences.length - 1].mean().item(), losses[:, sequences.second].mean().item())
