"""What the model can no longer do without some heads."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from kamui.cli.demo.heads import Head, Heads
from kamui.cli.demo.sequences import Loss, Repeated, mean_loss
from kamui.hooks import HookManager
from kamui.model import Transformer


class Knockouts(NamedTuple):
    """The loss of the model as it is, and of the same model with something taken from it.

    Attributes:
        nothing: As it is.
        best: Without the best induction head.
        control: Without the control head.
        together: Without all induction heads.
        cut: With induction heads that cannot look at what followed.
        cut_beside: With induction heads that cannot look one place further on, as the control.
    """

    nothing: Loss
    best: Loss
    control: Loss
    together: Loss
    cut: Loss
    cut_beside: Loss


def knock_out_heads(model: Transformer, heads: Heads, sequences: Repeated) -> Knockouts:
    """Measure the loss with and without the heads that were found."""
    found = heads.induction or (heads.best,)
    return Knockouts(
        nothing=mean_loss(model(sequences.token_ids), sequences),
        best=loss_without(model, [heads.best], sequences),
        control=loss_without(model, [heads.control], sequences),
        together=loss_without(model, found, sequences),
        cut=loss_unseeing(model, found, sequences, offset=1),
        cut_beside=loss_unseeing(model, found, sequences, offset=2),
    )


def average(z: Tensor) -> Tensor:
    """Return what heads give on average, (B, H, S, Dh), the same whatever they see."""
    return z.mean((0, 2), keepdim=True).expand_as(z)


def loss_without(model: Transformer, heads: Iterable[Head], sequences: Repeated) -> Loss:
    """Return the loss while each of the heads gives its average output."""
    with HookManager(model) as hooks:
        for head in heads:
            hooks.attach(head.module, "z", replace_with=average, heads=head.number)
        return mean_loss(model(sequences.token_ids), sequences)


def loss_unseeing(model: Transformer, heads: Iterable[Head], sequences: Repeated, offset: int) -> Loss:
    """Return the loss while heads are kept from looking at one single place.

    Args:
        model: The model.
        heads: The heads.
        sequences: The sequences.
        offset: The place, counted from the present token's first occurrence: 1 is what followed it.
    """
    positions = torch.arange(sequences.length, 2 * sequences.length)

    def cut(weights: Tensor) -> Tensor:
        weights[:, :, positions, positions - sequences.length + offset] = 0.0  # a copy, ours to write to
        return weights

    with HookManager(model) as hooks:
        for head in heads:
            hooks.attach(head.module, "weights", replace_with=cut, heads=head.number)
        return mean_loss(model(sequences.token_ids), sequences)
