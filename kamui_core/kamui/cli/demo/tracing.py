"""Which activations carry the answer from where it stands to where it is said.

Source: Meng et al. 2022, "Locating and Editing Factual Associations in GPT", section 2.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kamui.cli.demo.sequences import Repeated
from kamui.model import Transformer
from kamui_patching import ActivationPatcher, SweepResult


class Trace(NamedTuple):
    """A sweep of patches, and where the answer should pass if induction heads look it up.

    Attributes:
        result: How much each activation of the clean run brings back, (layers, positions).
        token: Where the last token stood before.
        follower: The position after that, which holds the answer.
        last: The last position.
    """

    result: SweepResult
    token: int
    follower: int
    last: int

    def role(self, position: int) -> str:
        """Return what stands at a position, in words."""
        roles = {
            self.token: "the last token's first occurrence",
            self.follower: "what followed it there",
            self.last: "the last token",
        }
        return roles.get(position, "another token")


def trace_answer(model: Transformer, sequences: Repeated, generator: torch.Generator) -> Trace:
    """Patch each activation of a run that can know the answer into a run that cannot.

    The clean input stops in the middle of the second occurrence. In the corrupted one, the last token's first
    occurrence is another token, so that there is nothing to look up.
    """
    last = sequences.length + sequences.length // 2
    token = last - sequences.length
    clean = sequences.token_ids[:, : last + 1]
    corrupted = clean.clone()
    corrupted[:, token] = absent_tokens(clean, model.config.vocab_size, generator)
    right = sequences.following[:, last, None]  # (B, 1)

    def log_probability(logits: Tensor) -> Tensor:
        return logits[:, -1].log_softmax(-1).gather(1, right).mean()  # ()

    patcher = ActivationPatcher(model)
    result = patcher.sweep(clean, corrupted, metric=log_probability, at="blocks.*.output", progress=False)
    return Trace(result, token, token + 1, last)


def absent_tokens(token_ids: Tensor, vocab_size: int, generator: torch.Generator) -> Tensor:
    """Draw for each row of token ids (B, S) a token that is not in it, (B,)."""
    chances = torch.rand(len(token_ids), vocab_size, generator=generator)  # (B, V)
    return chances.scatter(1, token_ids, -1.0).argmax(-1)
