"""Attention in one call of the fused kernel, taken apart only as far as somebody asks."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from kamui.hooks.internals import Internals
from kamui.hooks.kernel import AttentionInputs
from kamui.hooks.layout import Layout, batch_of, before_repeat, packed_rows
from kamui.hooks.tape import Tape


def attend(internals: Internals, tape: Tape, inputs: AttentionInputs) -> Tensor:
    """Answer a call of the kernel.

    What is only observed is computed beside the kernel, whose result stays what it was to the bit; what is replaced
    is put in its place, and the explicit form is computed from there on.
    """
    internals.claim()
    query = tape.value(inputs.query)
    layout = Layout(batch_of(query))
    by_query = dataclasses.replace(layout, rows=packed_rows(query))
    inputs = dataclasses.replace(
        inputs,
        query=internals.emit("q", inputs.query, by_query),
        key=_repeated(internals, tape, "k", inputs.key, layout),
        value=_repeated(internals, tape, "v", inputs.value, layout),
    )
    return internals.emit("z", _mixed(internals, inputs, by_query), by_query)


def _repeated(internals: Internals, tape: Tape, io: str, heads: Tensor, layout: Layout) -> Tensor:
    """Offer keys or values before their heads were repeated, and return what enters the kernel then."""
    if not internals.hears(io):
        return heads
    entering = tape.value(heads)
    before, layout = before_repeat(entering, layout)
    new = internals.emit(io, before.tensor, layout)
    return heads if new is before.tensor else tape.replay(entering, {before.key: new})


def _mixed(internals: Internals, inputs: AttentionInputs, layout: Layout) -> Tensor:
    if not internals.hears("pre_softmax", "weights"):
        return inputs.fused()
    scores = inputs.scores()
    changed_scores = internals.emit("pre_softmax", scores, layout)
    beside = changed_scores is scores and not internals.needs_path("pre_softmax", scores)
    if beside and not internals.hears("weights"):
        return inputs.fused()
    weights = inputs.weights(changed_scores)
    changed_weights = internals.emit("weights", weights, layout)
    if beside and changed_weights is weights and not internals.needs_path("weights", scores):
        return inputs.fused()
    return inputs.mix(changed_weights)
