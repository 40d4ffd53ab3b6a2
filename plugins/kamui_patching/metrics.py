"""Metrics: what a sweep measures on the logits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Metric = Callable[[Tensor], float | Tensor]


def logit_difference(right: int | Tensor, wrong: int | Tensor) -> Metric:
    """Return a metric: how far, at the last position, the logit of `right` lies above that of `wrong`.

    Args:
        right: A token id, or one for each row, (B,).
        wrong: A token id, or one for each row, (B,).

    Returns:
        A function of logits (B, S, V) that gives the mean over the rows.

    Source: Wang et al. 2022, "Interpretability in the Wild: a Circuit for Indirect Object Identification in GPT-2
    small", section 2.
    """

    def measure(logits: Tensor) -> Tensor:
        last = logits[:, -1]  # (B, V)
        return (_logits_of(right, last) - _logits_of(wrong, last)).mean()

    return measure


def _logits_of(tokens: int | Tensor, last: Tensor) -> Tensor:
    if isinstance(tokens, int) or tokens.dim() == 0:
        return last[:, tokens]  # (B,)
    return last.gather(1, tokens.to(last.device)[:, None])[:, 0]  # (B,)
