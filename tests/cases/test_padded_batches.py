"""Batches with padding: the last token of each row, and attention that must not see the padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kamui.hooks import HookManager

SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
IDS = torch.tensor([[2, 3, 4, 5, 6], [2, 3, 4, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


@pytest.mark.parametrize("positions", [-1, "last", torch.tensor([4, 2])])
def test_the_last_token_of_a_shorter_row_is_no_padding(positions: Any) -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, num_attention_heads=2)).eval()

    def by_hand(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[torch.arange(2), torch.tensor([4, 2])] += 5
        return output

    with torch.no_grad():
        handle = model.encoder.layer[0].register_forward_hook(by_hand)
        expected = model(input_ids=IDS, attention_mask=MASK).last_hidden_state
        handle.remove()
        bare = model(input_ids=IDS, attention_mask=MASK).last_hidden_state
        with HookManager(model) as hooks:
            hooks.use("steering", at="encoder.layer.0.output", vector=torch.full((16,), 5.0), positions=positions)
            steered = model(input_ids=IDS, attention_mask=MASK).last_hidden_state
    assert torch.equal(steered, expected)
    assert not torch.allclose(steered[1, :3], bare[1, :3], atol=1e-3)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_that_is_looked_into_still_leaves_the_padding_out(implementation: str) -> None:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_attention_heads=4, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config).eval()
    model.set_attn_implementation(implementation)
    ids, mask = IDS.flip(1), MASK.flip(1)
    with torch.no_grad():
        bare = model(input_ids=ids, attention_mask=mask).logits
        alone = model(input_ids=ids[1:, 2:]).logits
        with HookManager(model) as hooks:
            for io in ("q", "k", "v", "pre_softmax", "weights", "z"):
                hooks.attach("blocks.*.attn", io)
            assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, bare)
            hooks.attach("blocks.*.attn", "weights", replace_with=lambda value: value.clone())
            replaced = model(input_ids=ids, attention_mask=mask).logits
    assert model.config._attn_implementation == implementation
    torch.testing.assert_close(replaced[mask.bool()], bare[mask.bool()], atol=1e-6, rtol=0)
    torch.testing.assert_close(bare[1, 2:], alone[0], atol=1e-6, rtol=0)
    weights = hooks.get("blocks.0.attn.weights")
    assert (weights[1, :, 2:, :2] == 0).all()
    assert hooks.get("blocks.0.attn.pre_softmax").isfinite().all()
