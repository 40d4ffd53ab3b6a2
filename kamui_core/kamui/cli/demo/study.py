"""The whole study: everything that the demo measures, in order."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kamui.cli.demo.heads import Heads, attention_of, find_heads
from kamui.cli.demo.knockout import Knockouts, knock_out_heads
from kamui.cli.demo.layers import LayerReading, read_layers
from kamui.cli.demo.proof import Compared, snapshot
from kamui.cli.demo.sequences import Repeated, repeated_sequences, token_losses
from kamui.cli.demo.steering import Steered, steer_lookup
from kamui.cli.demo.tracing import Trace, trace_answer
from kamui.model import ModelConfig, Transformer

ROWS = 16
LENGTH = 14


@dataclass(frozen=True)
class Study(Compared):
    """What was measured.

    Attributes:
        config: The sizes of the model.
        sequences: The sequences that it was measured on.
        losses: The loss on every next token, (B, 2n - 1).
        readings: What the logit lens reads after each layer.
        heads: All heads and where they look.
        attention: The attention pattern of the best induction head on the first sequence, (2n, 2n).
        knockouts: The loss without the heads.
        trace: Where the answer passes.
        steered: What steering does.
    """

    config: ModelConfig
    sequences: Repeated
    losses: Tensor
    readings: list[LayerReading]
    heads: Heads
    attention: Tensor
    knockouts: Knockouts
    trace: Trace
    steered: Steered


@torch.no_grad()
def conduct(model: Transformer, seed: int) -> Study:
    """Measure everything on sequences drawn from a seed."""
    generator = torch.Generator().manual_seed(seed)
    sequences = repeated_sequences(model.config.vocab_size, ROWS, LENGTH, generator)
    before = snapshot(model, sequences.token_ids)
    heads = find_heads(model, sequences)
    return Study(
        config=model.config,
        sequences=sequences,
        losses=token_losses(before.logits, sequences),
        readings=read_layers(model, sequences),
        heads=heads,
        attention=attention_of(model, heads.best, sequences),
        knockouts=knock_out_heads(model, heads, sequences),
        trace=trace_answer(model, sequences, generator),
        steered=steer_lookup(model, generator),
        before=before,
        after=snapshot(model, sequences.token_ids),
    )
