"""Families that nobody listed are recognised by their structure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlavaConfig, LlavaForConditionalGeneration, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from families.zoo import FAMILIES
from kamui import HookManager, HookRegistry


class TomorrowConfig(PretrainedConfig):
    model_type = "tomorrow"


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(16, 48)
        self.out = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        q, k, v = (part.unflatten(-1, (2, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))  # (B, H, S, Dh)
        z = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(z.transpose(1, 2).flatten(2)), None


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(16, 24), nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.gate(x)) * self.up(x))


class Unit(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_a, self.mixer, self.norm_b, self.gated = nn.LayerNorm(16), Mixer(), nn.LayerNorm(16), Gated()

    def forward(self, x: Tensor) -> tuple[Tensor]:
        x = x + self.mixer(self.norm_a(x))[0]
        return (x + self.gated(self.norm_b(x)),)


class Tomorrow(PreTrainedModel):
    config_class = TomorrowConfig

    def __init__(self, config: TomorrowConfig) -> None:
        super().__init__(config)
        self.words = nn.Embedding(31, 16)
        self.units = nn.ModuleList(Unit() for _ in range(2))
        self.norm_out = nn.LayerNorm(16)
        self.head = nn.Linear(16, 31)

    def get_input_embeddings(self) -> nn.Module:
        return self.words

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, input_ids: Tensor, **_: Any) -> CausalLMOutput:
        x = self.words(input_ids) * 4
        for unit in self.units:
            (x,) = unit(x)
        logits = self.head(self.norm_out(x))
        return CausalLMOutput(logits=5 * torch.tanh(logits / 5) - 1)


def test_a_family_that_is_published_tomorrow() -> None:
    torch.manual_seed(0)
    model, ids = Tomorrow(TomorrowConfig()).eval(), torch.randint(31, (2, 5))
    names = ["embed", "blocks.1.attn", "blocks.1.ffn", "blocks.1"]
    with torch.no_grad(), HookManager(model) as hooks:
        for name in (*names, "units.1.mixer", "units.1.gated"):
            hooks.attach(name)
        hooks.attach("blocks.1.ffn", "mid")
        hooks.attach("unembed", "input")
        logits = model(ids).logits
        assert torch.equal(hooks.architecture.readout(model, hooks.get("blocks.1.output")), logits)
    assert torch.equal(hooks.get("embed.output"), model.words(ids) * 4)
    assert torch.equal(hooks.get("blocks.1.attn.output"), hooks.get("units.1.mixer.output"))
    assert torch.equal(model.units[1].gated.down(hooks.get("blocks.1.ffn.mid")), hooks.get("blocks.1.ffn.output"))
    assert torch.equal(hooks.get("unembed.input"), model.norm_out(hooks.get("blocks.1.output")))


@pytest.fixture
def llava() -> LlavaForConditionalGeneration:
    text = FAMILIES["llama"].settings | {"model_type": "llama"}
    vision = FAMILIES["clip_vision"].settings | {"model_type": "clip_vision_model"}
    return LlavaForConditionalGeneration(
        LlavaConfig(text_config=text, vision_config=vision, image_token_index=3)
    ).eval()


def test_of_several_stacks_the_one_that_speaks_has_the_plain_names(llava: LlavaForConditionalGeneration) -> None:
    points = HookRegistry.all_points(llava)
    assert "blocks.0.attn.weights" in points
    assert "vision_tower.blocks.2.ffn.mid" in points
    with HookManager(llava) as hooks:
        assert hooks.module("blocks.1") is llava.model.language_model.layers[1]
        assert hooks.module("vision_tower.blocks.1").self_attn is not hooks.module("blocks.1.attn")
        assert hooks.module("final_ln") is llava.model.language_model.norm
