"""Soft tokens: near temperature 0 they are greedy decoding, and steering acts on each step."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from kamui.hooks import HookManager
from kamui.model import ModelConfig, Transformer

EXAMPLE = Path(__file__).parents[2] / "examples" / "soft_tokens.py"
TOKEN_IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])


@pytest.fixture(scope="module")
def example() -> dict[str, Any]:
    return runpy.run_path(str(EXAMPLE))


@pytest.fixture
def reference() -> Transformer:
    torch.manual_seed(0)
    shape = {"n_layers": 2, "d_model": 16, "n_heads": 2, "d_ff": 32, "vocab_size": 16, "context_length": 32}
    return Transformer(ModelConfig(**shape)).eval()


@pytest.fixture
def hugging_face() -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=16, n_embd=16, n_layer=2, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=None, pad_token_id=0
    )
    return transformers.GPT2LMHeadModel(config).eval()


def sharpened(model: nn.Module, head: nn.Module) -> nn.Module:
    """Make greedy choices clear: random models of this size are nearly undecided."""
    with torch.no_grad():
        head.weight.mul_(20)  # type: ignore[union-attr,operator]
    return model


def test_near_temperature_0_it_is_greedy_decoding(example: dict[str, Any], reference: Transformer) -> None:
    sharpened(reference, reference.unembed)
    soft: Tensor = example["soft_continuation"](reference, TOKEN_IDS, 6, temperature=1e-6)
    greedy = reference.generate(TOKEN_IDS, 6)[:, 5:]
    assert torch.equal(soft.argmax(-1), greedy)


def test_on_hugging_face_too(example: dict[str, Any], hugging_face: transformers.GPT2LMHeadModel) -> None:
    soft: Tensor = example["soft_continuation"](hugging_face, TOKEN_IDS, 6, temperature=1e-6)
    greedy = hugging_face.generate(
        TOKEN_IDS, attention_mask=torch.ones_like(TOKEN_IDS), max_new_tokens=6, do_sample=False
    )
    assert torch.equal(soft.argmax(-1), greedy[:, 5:])


def test_a_soft_token_is_the_mean_of_the_embeddings(example: dict[str, Any], reference: Transformer) -> None:
    soft: Tensor = example["soft_continuation"](reference, TOKEN_IDS, 2)
    seen: list[Tensor] = []
    hook = reference.embed.tokens.register_forward_hook(lambda *given: seen.append(given[-1]))
    example["soft_continuation"](reference, TOKEN_IDS, 3)
    hook.remove()
    assert torch.allclose(seen[-1][:, 5], soft[:, 0] @ reference.embed.tokens.weight, atol=1e-6)


def test_steering_acts_on_each_step(example: dict[str, Any], reference: Transformer) -> None:
    plain: Tensor = example["soft_continuation"](reference, TOKEN_IDS, 3)
    with HookManager(reference) as hooks:
        hooks.use("steering", at="blocks.0.output", vector=torch.randn(16), alpha=2.0)
        steered: Tensor = example["soft_continuation"](reference, TOKEN_IDS, 3)
        assert hooks.report().rows[0].changed == 3
    assert (steered - plain).abs().amax((0, 2)).gt(1e-3).all()
    assert torch.equal(example["soft_continuation"](reference, TOKEN_IDS, 3), plain)
