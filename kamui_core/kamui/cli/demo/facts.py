"""Where SmolLM2 keeps a fact and on which way it says it, and a vector that changes what it thinks of a thing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch
from torch import Tensor

from kamui.cli.demo.proof import Compared, Snapshot, digest_of
from kamui.cli.demo.smollm2 import SmolLM2
from kamui.cli.demo.steering import random_vector
from kamui.hooks import HookManager, inspect
from kamui_patching import ActivationPatcher, SweepResult

FACT, ANSWER = "The Eiffel Tower is located in the city of", " Paris"
OTHER_FACT, OTHER_ANSWER = (
    "The Colosseum is located in the city of",
    " Rome",
)  # as many tokens, subject in the same place

AT: Final = "blocks.14.output"
PROMPTS: Final = (
    "I went to the new restaurant last night, and the food was",
    "The service at the hotel was",
    "The food at this place is",
)
PRAISE: Final = (" good", " great", " amazing", " wonderful", " excellent", " delicious", " fantastic", " perfect")
BLAME: Final = (" bad", " terrible", " awful", " horrible", " poor", " ugly", " dirty", " worse")
PAIRS: Final = (
    ("I love this movie, it is wonderful.", "I hate this movie, it is terrible."),
    ("What a beautiful and happy day!", "What an ugly and miserable day!"),
    ("The food was delicious and the staff were kind.", "The food was disgusting and the staff were rude."),
    ("I am so glad that I came here.", "I am so sorry that I came here."),
    ("This is the best book I have ever read.", "This is the worst book I have ever read."),
    ("She smiled, full of joy and hope.", "She cried, full of pain and despair."),
    ("The concert was amazing, everyone was delighted.", "The concert was awful, everyone was disappointed."),
    ("Our holiday was perfect and relaxing.", "Our holiday was a disaster and exhausting."),
    ("He is a brilliant and generous friend.", "He is a stupid and selfish enemy."),
    ("I feel great and full of energy.", "I feel sick and full of pain."),
)


class Reading(NamedTuple):
    """What the lens reads at the last position after a block: how likely the answer is, and its rank (0 is the top)."""

    point: str
    probability: float
    rank: int


class Opinion(NamedTuple):
    """How a prompt goes on: the greedy continuation, and how likely words of praise and of blame are next."""

    text: str
    praise: float
    blame: float

    @property
    def share_of_blame(self) -> float:
        """How much of praise and blame is blame."""
        return self.blame / (self.praise + self.blame)


class Opinions(NamedTuple):
    """What the model thinks of each of `PROMPTS`: as it is, steered, and with a random vector of the same length."""

    plain: tuple[Opinion, ...]
    steered: tuple[Opinion, ...]
    control: tuple[Opinion, ...]


@dataclass(frozen=True)
class FactStudy(Compared):
    """What was measured.

    Attributes:
        tokens: The fact, token by token.
        other_tokens: The other fact.
        probability: How likely the model takes the answer to be.
        readings: What the lens reads after each block.
        sweep: How much of the answer each activation brings into the other fact, (blocks, positions).
        opinions: What steering does.
    """

    tokens: tuple[str, ...]
    other_tokens: tuple[str, ...]
    probability: float
    readings: tuple[Reading, ...]
    sweep: SweepResult
    opinions: Opinions

    @property
    def carriers(self) -> tuple[int, ...]:
        """The position that brings most of the answer, for each block."""
        return tuple(self.sweep.scores.argmax(-1).tolist())

    @property
    def handover(self) -> int | None:
        """The block that fetches the answer from one position to the last one, if it goes that way."""
        (first, *_), last = self.carriers, len(self.tokens) - 1
        for block, position in enumerate(self.carriers):
            if position == last:
                return block if first != last and set(self.carriers) == {first, last} else None
        return None


@torch.no_grad()
def study_facts(smol: SmolLM2) -> FactStudy:
    """Measure everything."""
    ids, other_ids = smol.encode(FACT), smol.encode(OTHER_FACT)  # (1, S)
    before = _snapshot(smol, ids)
    return FactStudy(
        tokens=tuple(map(smol.tokenizer.decode, ids[0])),
        other_tokens=tuple(map(smol.tokenizer.decode, other_ids[0])),
        probability=before.logits[0, -1].softmax(-1)[smol.token(ANSWER)].item(),
        readings=read_fact(smol, ids),
        sweep=trace_fact(smol, ids, other_ids),
        opinions=change_opinions(smol),
        before=before,
        after=_snapshot(smol, ids),
    )


def read_fact(smol: SmolLM2, ids: Tensor) -> tuple[Reading, ...]:
    """Return what the lens reads of the answer at the last position of token ids (1, S)."""
    with HookManager(smol.model) as hooks:
        lens = hooks.use("logit_lens", positions=-1)
        smol.model(ids)
    answer = smol.token(ANSWER)
    chances, ranks = lens.probability(answer).flatten(), lens.rank(answer).flatten()  # (L,)
    return tuple(map(Reading, map(str, lens.layers), chances.tolist(), ranks.tolist()))


def trace_fact(smol: SmolLM2, ids: Tensor, other_ids: Tensor) -> SweepResult:
    """Put each activation of one fact into the run of the other; both are token ids (1, S)."""
    right, wrong = smol.token(ANSWER), smol.token(OTHER_ANSWER)

    def metric(logits: Tensor) -> Tensor:
        return (logits[:, -1, right] - logits[:, -1, wrong]).mean()  # ()

    return ActivationPatcher(smol.model).sweep(ids, other_ids, metric=metric, at="blocks.*.output", progress=False)


def change_opinions(smol: SmolLM2) -> Opinions:
    """Fit a vector from praise to blame, and let the model speak without it, with it and with a random one."""
    plain = ask(smol)
    with HookManager(smol.model) as hooks:
        steering = hooks.use("steering", at=AT)
        praise, blame = ([smol.encode(text) for text in side] for side in zip(*PAIRS, strict=True))
        steering.fit(blame, praise)
        steered = ask(smol)
        steering.vector = random_vector(steering.vector, torch.Generator().manual_seed(0))
        control = ask(smol)
    return Opinions(plain, steered, control)


def ask(smol: SmolLM2, n_tokens: int = 12) -> tuple[Opinion, ...]:
    """Let the model continue each of `PROMPTS` greedily, under whatever acts on it."""
    opinions = []
    for ids in map(smol.encode, PROMPTS):
        chances = smol.model(ids).logits[0, -1].softmax(-1)  # (V,)
        said = smol.generate(ids, n_tokens)
        opinions.append(Opinion(said, *(_chance_of(smol, chances, words) for words in (PRAISE, BLAME))))
    return tuple(opinions)


def _chance_of(smol: SmolLM2, chances: Tensor, words: Sequence[str]) -> float:
    return chances[[smol.token(word) for word in words]].sum().item()


def _snapshot(smol: SmolLM2, ids: Tensor) -> Snapshot:
    return Snapshot(smol.model(ids).logits, digest_of(smol.model), tuple(inspect(smol.model)))
