"""What KAMUI costs on a GPT-2 of Hugging Face (12 layers, d 768, random weights), as ratios within one run.

    python benchmarks/hugging_face.py [--rounds N]

Steering every step of a cached generation, all attention weights under the fused kernel beside those of the eager
model, an early stop, and how the cost of a scope grows with its points.
"""

from __future__ import annotations

import argparse
import copy

import torch
import transformers
from timing import Comparison, in_turns, show
from torch import Tensor

from kamui.hooks import HookManager


def gpt2(attention: str = "sdpa") -> transformers.GPT2LMHeadModel:
    """Make the model; the same weights for each attention."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(bos_token_id=0, eos_token_id=None, pad_token_id=0)
    model: transformers.GPT2LMHeadModel = transformers.GPT2LMHeadModel(copy.deepcopy(config)).eval()
    model.set_attn_implementation(attention)
    return model


def generate(model: transformers.GPT2LMHeadModel, token_ids: Tensor) -> Tensor:
    """Generate 20 tokens greedily, with the cache."""
    tokens: Tensor = model.generate(
        token_ids, attention_mask=torch.ones_like(token_ids), max_new_tokens=20, min_new_tokens=20, do_sample=False
    )
    return tokens


def steering(model: transformers.GPT2LMHeadModel, token_ids: Tensor, rounds: int) -> Comparison:
    """Steer every step of a generation."""
    twin = copy.deepcopy(model)
    with HookManager(model) as hooks:
        hooks.use("steering", at="blocks.6.output", vector=torch.randn(768))
        pair = in_turns(lambda: generate(twin, token_ids), lambda: generate(model, token_ids), rounds)
    return Comparison("steer every step of 20 cached tokens, against the bare model", *pair, 1.05)


def weights(model: transformers.GPT2LMHeadModel, token_ids: Tensor, rounds: int) -> Comparison:
    """Observe the weights of all layers."""
    eager = gpt2("eager")
    with HookManager(model) as hooks:
        hooks.attach("blocks.*.attn", "weights", keep="last")
        ours, theirs = model(token_ids), eager(token_ids, output_attentions=True)
        for layer in range(12):
            torch.testing.assert_close(hooks.get(f"blocks.{layer}.attn.weights"), theirs.attentions[layer])
        del ours, theirs
        pair = in_turns(lambda: eager(token_ids, output_attentions=True), lambda: model(token_ids), rounds)
    return Comparison("all attention weights under sdpa, against eager output_attentions", *pair, 1.3)


def early_stop(model: transformers.GPT2LMHeadModel, token_ids: Tensor, rounds: int) -> Comparison:
    """Capture an early layer and stop there."""
    twin = copy.deepcopy(model)
    with HookManager(model) as hooks:
        hooks.attach("blocks.3", keep="last")
        pair = in_turns(
            lambda: twin(token_ids, use_cache=False), lambda: hooks.run(token_ids, use_cache=False, stop=True), rounds
        )
    return Comparison("stop after layer 3 of 12, against the whole forward pass", *pair, 0.35)


def growth(model: transformers.GPT2LMHeadModel, rounds: int) -> list[Comparison]:
    """Open and close a scope with more and more points in one use, against one with a single point."""

    def opener(n_points: int) -> None:
        names = [f"blocks.{layer}.{part}" for layer in range(12) for part in ("output", "attn.output", "ffn.output")]
        with HookManager(model) as hooks:
            hooks.use("cache", at=names[:n_points])

    rows = []
    for n_points in (2, 4, 9, 18, 36):
        pair = in_turns(lambda: opener(1), lambda n=n_points: opener(n), rounds)  # type: ignore[misc]
        rows.append(Comparison(f"open and close with {n_points} points, against 1", *pair, float("inf")))
    return rows


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = gpt2()
    token_ids = torch.randint(0, 50257, (1, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        rows = [test(model, token_ids, options.rounds) for test in (steering, weights, early_stop)]
        rows += growth(model, options.rounds * 20)
    show(rows)


if __name__ == "__main__":
    main()
