"""Finding induction heads by where they look.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kamui.cli.demo.sequences import Repeated
from kamui.hooks import HookManager
from kamui.model import Transformer

MOST = 0.5


class Head(NamedTuple):
    """One attention head and where it looks: its mean attention in the second occurrence.

    Attributes:
        layer: Its layer.
        number: Its number in the layer.
        induction: Attention to the token that followed the present token's first occurrence.
        previous: Attention to the token just before the present one.
    """

    layer: int
    number: int
    induction: float
    previous: float

    @property
    def module(self) -> str:
        """The attention module that it is part of."""
        return f"blocks.{self.layer}.attn"

    def __str__(self) -> str:
        return f"{self.module} head {self.number}"


class Heads(NamedTuple):
    """All heads, the one that looks most like an induction head first."""

    ranked: tuple[Head, ...]

    @property
    def best(self) -> Head:
        """The head that looks most like an induction head."""
        return self.ranked[0]

    @property
    def induction(self) -> tuple[Head, ...]:
        """Those that give most of their attention to what followed; there may be none."""
        return tuple(head for head in self.ranked if head.induction > MOST)

    @property
    def previous(self) -> tuple[Head, ...]:
        """Those of layers before the best head that give most of their attention to the previous token."""
        return tuple(head for head in self.ranked if head.previous > MOST and head.layer < self.best.layer)

    @property
    def control(self) -> Head:
        """The head that looks least at either."""
        return min(self.ranked, key=lambda head: max(head.induction, head.previous))


def find_heads(model: Transformer, sequences: Repeated) -> Heads:
    """Score every head of the model by its attention weights."""
    with HookManager(model) as hooks:
        attached = hooks.attach("blocks.*.attn", "weights")
        model(sequences.token_ids)
    heads = []
    n = sequences.length
    positions = torch.arange(n, 2 * n)
    for layer, point in enumerate(attached):
        weights = hooks.get(point)  # (B, H, S, S)
        induction = weights[:, :, positions, positions - n + 1].mean((0, 2))  # (H,)
        previous = weights[:, :, positions, positions - 1].mean((0, 2))  # (H,)
        pairs = zip(induction.tolist(), previous.tolist(), strict=True)
        heads += [Head(layer, number, *pair) for number, pair in enumerate(pairs)]
    return Heads(tuple(sorted(heads, key=lambda head: head.induction, reverse=True)))


def attention_of(model: Transformer, head: Head, sequences: Repeated) -> Tensor:
    """Return the attention pattern (2n, 2n) of one head on the first sequence."""
    with HookManager(model) as hooks:
        hooks.attach(head.module, "weights", heads=head.number)
        model(sequences.token_ids[:1])
    return hooks.get(f"{head.module}.weights")[0, 0]  # (S, S)
