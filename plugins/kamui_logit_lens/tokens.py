"""What logits say of tokens: which are likeliest, and how likely and how far up given ones are."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kamui.errors import OptionError, PositionError


class Top(NamedTuple):
    """The likeliest next tokens of each layer and position, best first.

    Attributes:
        token_ids: The tokens, (L, B, S, k).
        probabilities: How likely the layer takes each to be, (L, B, S, k).
    """

    token_ids: Tensor
    probabilities: Tensor


def top_of(logits: Tensor, k: int) -> Top:
    """Return the `k` likeliest tokens of logits (B, S, V).

    Raises:
        OptionError: There are not that many tokens.
    """
    if not 1 <= k <= logits.shape[-1]:
        raise OptionError(f"top takes k from 1 to the {logits.shape[-1]} tokens of the vocabulary, not {k!r}")
    probabilities, token_ids = _probabilities(logits).topk(k)
    return Top(token_ids, probabilities)  # (B, S, k) each


def probability_of(token_ids: int | Tensor, logits: Tensor) -> Tensor:
    """Return how likely logits (B, S, V) take the given tokens to be, (B, S).

    Raises:
        OptionError: A token is not in the vocabulary.
        PositionError: There is not one for each position.
    """
    return _probabilities(logits).gather(-1, _as_index(token_ids, logits)).squeeze(-1)  # (B, S)


def rank_of(token_ids: int | Tensor, logits: Tensor) -> Tensor:
    """Return how many tokens are likelier in logits (B, S, V) than the given ones, (B, S).

    Raises:
        OptionError: A token is not in the vocabulary.
        PositionError: There is not one for each position.
    """
    return (logits > logits.gather(-1, _as_index(token_ids, logits))).sum(-1)  # (B, S)


def _probabilities(logits: Tensor) -> Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).softmax(-1)  # (B, S, V)


def _as_index(token_ids: int | Tensor, logits: Tensor) -> Tensor:
    """Return token ids as an index for every position of logits (B, S, V): (B, S, 1)."""
    index = torch.as_tensor(token_ids, device=logits.device).long()
    size = logits.shape[-1]
    if index.numel() and (index.min() < 0 or index.max() >= size):
        raise OptionError(f"token ids go from 0 to {size - 1} in this vocabulary, not {token_ids!r}")
    try:
        return index.expand(logits.shape[:-1]).unsqueeze(-1)
    except RuntimeError as error:
        raise PositionError(
            f"token ids of shape {tuple(index.shape)} do not fit logits of {tuple(logits.shape[:-1])} (rows, "
            f"positions); give one token, or one for each position"
        ) from error
