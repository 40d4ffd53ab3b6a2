"""Making the model look for another token than the one that it reads.

A vector is fitted from prompts that end in one token and prompts that end in another. Added where the second layer
reads, it should make the induction heads look for the other token's first occurrence and say what came after it there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from kamui.hooks import HookManager
from kamui.model import Transformer

AT = "blocks.0.output"
ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)
FULL = 1.0
ROWS, LENGTH = 64, 16


class Prompts(NamedTuple):
    """Random sequences in which two tokens each occur once, to be continued after either.

    Attributes:
        segments: Token ids (B, n) that hold both tokens.
        read: The token that prompts end in.
        other: The other one.
    """

    segments: Tensor
    read: int
    other: int

    def ending_in(self, token: int) -> Tensor:
        """Return the segments followed by a token, (B, n + 1)."""
        return torch.cat([self.segments, torch.full((len(self.segments), 1), token)], dim=1)

    def after(self, token: int) -> Tensor:
        """Return what came after the token's first occurrence, (B,)."""
        places = (self.segments == token).int().argmax(-1)  # (B,)
        return self.segments[torch.arange(len(self.segments)), places + 1]


class Effect(NamedTuple):
    """What the model says at one strength of steering, as mean probabilities.

    Attributes:
        alpha: The strength.
        read: Probability of what came after the token that the prompt ends in.
        other: Probability of what came after the other token.
    """

    alpha: float
    read: float
    other: float


class Steered(NamedTuple):
    """What steering does to prompts that the vector was not fitted on.

    Attributes:
        read: The token that the prompts end in.
        other: The token that the model is made to look for.
        effects: With the fitted vector, at each strength.
        control: With a random vector of the same length, at full strength.
    """

    read: int
    other: int
    effects: tuple[Effect, ...]
    control: Effect

    def at(self, alpha: float) -> Effect:
        """Return the effect at one strength."""
        return next(effect for effect in self.effects if effect.alpha == alpha)


def steer_lookup(model: Transformer, generator: torch.Generator) -> Steered:
    """Fit a vector on some prompts and measure what it does to others, against a random one."""
    vocab_size = model.config.vocab_size
    read, other = torch.randperm(vocab_size, generator=generator)[:2].tolist()
    vector = fit_vector(model, random_prompts(vocab_size, read, other, generator))
    fresh = random_prompts(vocab_size, read, other, generator)
    (control,) = steer(model, fresh, random_vector(vector, generator), [FULL])
    return Steered(read, other, tuple(steer(model, fresh, vector, ALPHAS)), control)


def random_prompts(vocab_size: int, read: int, other: int, generator: torch.Generator) -> Prompts:
    """Draw sequences of distinct tokens that hold both tokens, neither at the end."""
    chances = torch.rand(ROWS, vocab_size, generator=generator)  # (B, V)
    chances[:, [read, other]] = -1.0
    segments = chances.argsort(-1, descending=True)[:, :LENGTH]  # (B, n)
    places = torch.rand(ROWS, LENGTH - 1, generator=generator).argsort(-1)  # (B, n - 1)
    segments.scatter_(1, places[:, :2], torch.tensor([read, other]).expand(ROWS, 2))
    return Prompts(segments, read, other)


def fit_vector(model: Transformer, prompts: Prompts) -> Tensor:
    """Return the mean difference (D,) that it makes to end in the other token."""
    with HookManager(model) as hooks:
        steering = hooks.use("steering", at=AT)
        steering.fit(prompts.ending_in(prompts.other), prompts.ending_in(prompts.read))
        vector: Tensor = steering.vector
    return vector


def steer(model: Transformer, prompts: Prompts, vector: Tensor, alphas: Sequence[float]) -> list[Effect]:
    """Return what the model says after the token read, with the vector added at the last position."""
    effects = []
    with HookManager(model) as hooks:
        steering = hooks.use("steering", vector=vector, at=AT, positions=-1)
        for alpha in alphas:
            steering.alpha = alpha
            chances: Tensor = model(prompts.ending_in(prompts.read))[:, -1].softmax(-1)  # (B, V)
            said = (_mean_of(chances, prompts.after(token)) for token in (prompts.read, prompts.other))
            effects.append(Effect(alpha, *said))
    return effects


def random_vector(like: Tensor, generator: torch.Generator) -> Tensor:
    """Return a vector (D,) in a random direction, as long as another."""
    direction = F.normalize(torch.randn(like.shape, generator=generator), dim=0)  # (D,)
    return direction.mul(like.norm())


def _mean_of(chances: Tensor, tokens: Tensor) -> float:
    return chances.gather(1, tokens[:, None]).mean().item()
