"""After which layer the model knows what comes next.

Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from kamui.cli.demo.sequences import Repeated
from kamui.hooks import HookManager
from kamui.model import Transformer


class LayerReading(NamedTuple):
    """What the logit lens reads after one layer, at the L positions whose next token can be known.

    Attributes:
        point: Where the residual stream was read.
        ranks: How many tokens are taken to be likelier than the right one, (B, L).
        probabilities: How likely the right one is taken to be, (B, L).
    """

    point: str
    ranks: Tensor
    probabilities: Tensor

    @property
    def share_on_top(self) -> float:
        """At how many of the positions the right token is the likeliest."""
        return (self.ranks == 0).float().mean().item()


def read_layers(model: Transformer, sequences: Repeated) -> list[LayerReading]:
    """Read the residual stream after the embedding and after each block as the model's own head would."""
    with HookManager(model) as hooks:
        lens = hooks.use("logit_lens", at=["embed.output", "blocks.*.output"], positions=sequences.second)
        model(sequences.token_ids)
    right = sequences.following[:, sequences.second]  # (B, L)
    readings = zip(lens.layers, lens.rank(right), lens.probability(right), strict=True)
    return [LayerReading(str(point), ranks, probabilities) for point, ranks, probabilities in readings]
