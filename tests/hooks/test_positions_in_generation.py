"""Positions in the generation of Hugging Face models: with and without a cache they mean the same tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from kamui.errors import PositionError
from kamui.hooks import HookManager, Positions
from kamui.testing import leaves_no_trace

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")

TOKENS = {"vocab_size": 64, "bos_token_id": 0, "eos_token_id": None, "pad_token_id": 0}
NEW = 5
VECTOR = 3 * torch.randn(16, generator=torch.Generator().manual_seed(2))

IDS = torch.randint(1, 64, (2, 8), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :3] = 0
IDS[0, :3] = 0


def gpt2() -> Any:
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, n_positions=32, **TOKENS)
    )


def llama() -> Any:
    sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, **sizes, **TOKENS)
    return transformers.LlamaForCausalLM(config)


def bloom() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(hidden_size=16, n_layer=2, n_head=2, **TOKENS))


def t5() -> Any:
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, **TOKENS))


BLOCKS = {gpt2: "transformer.h.0", llama: "model.layers.0", bloom: "transformer.h.0", t5: "decoder.block.0"}
DECODERS = [gpt2, llama, bloom]


@cache
def made(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    model.generation_config.eos_token_id = None
    return model


def steered(make: Callable[[], Any], positions: Positions, **options: Any) -> tuple[Tensor, list[Tensor]]:
    """Generate with steering at positions; return the tokens, and the steered block's output pass by pass."""
    model, point = made(make), f"{BLOCKS[make]}.output"
    with HookManager(model) as hooks:
        hooks.use("steering", vector=VECTOR, at=point, positions=positions)
        captures = hooks.use("cache", at=point).captures
        tokens = model.generate(
            input_ids=IDS, attention_mask=MASK, max_new_tokens=NEW, do_sample=False, pad_token_id=0, **options
        )
        passes = [value for index in range(hooks.report().finished) for value in captures.calls(point, index)]
    return tokens, passes


@pytest.mark.parametrize("make", list(BLOCKS))
@pytest.mark.parametrize(
    "positions", [7, [3, 5], slice(2, 6), -1, "prompt", "generated", "last", torch.tensor([2, 4])], ids=str
)
@pytest.mark.filterwarnings("ignore:the positions asked for were in no call")  # some are in none, on purpose
def test_with_and_without_a_cache_the_tokens_and_the_steered_activations_agree(
    make: Callable[[], Any], positions: Positions
) -> None:
    tokens, passes = steered(make, positions, use_cache=True)
    recomputed, whole = steered(make, positions, use_cache=False)
    assert torch.equal(tokens, recomputed)
    joined = torch.cat(passes, dim=1)
    real = torch.cat([MASK, MASK.new_ones(2, NEW - 1)], dim=1).bool()[:, -joined.shape[1] :]
    torch.testing.assert_close(joined[real], whole[-1][real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", list(BLOCKS))
@pytest.mark.filterwarnings("ignore:the positions asked for were in no call")  # some are in none, on purpose
def test_steering_the_generated_tokens_changes_exactly_those(make: Callable[[], Any]) -> None:
    _, bare = steered(make, [])
    _, passes = steered(make, "generated")
    torch.testing.assert_close(passes[0], bare[0])
    torch.testing.assert_close(passes[1][:, 0] - VECTOR, bare[1][:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("make", DECODERS)
@pytest.mark.parametrize("positions", [7, -1, "generated", "last"])
@pytest.mark.parametrize(
    "options", [{"cache_implementation": "static"}, {"prefill_chunk_size": 3}, {"num_beams": 2}], ids=str
)
@pytest.mark.filterwarnings("ignore")  # of transformers, about these options
def test_a_static_cache_a_prompt_in_chunks_and_beams_mean_the_same_tokens(
    make: Callable[[], Any], positions: Positions, options: dict[str, Any]
) -> None:
    tokens, _ = steered(make, positions, **options)
    beams = {"num_beams": options.get("num_beams", 1)}
    assert torch.equal(tokens, steered(make, positions, use_cache=False, **beams)[0])


def test_a_prompt_in_chunks_without_a_mask_has_no_known_end() -> None:
    model = made(llama)
    with HookManager(model) as hooks:
        hooks.attach("model.layers.0", positions="last")
        with pytest.raises(PositionError, match="where the prompt ends is not known"):
            model.generate(input_ids=IDS[1:], max_new_tokens=2, do_sample=False, pad_token_id=0, prefill_chunk_size=3)


@pytest.mark.parametrize("make", [gpt2, llama])
def test_a_direct_call_with_left_padding_counts_real_tokens(make: Callable[[], Any]) -> None:
    model, block = made(make), BLOCKS[make]
    with HookManager(model) as hooks:
        every, some = (hooks.use("cache", at=f"{block}.output", positions=one).captures for one in (None, 2))
        model(input_ids=IDS, attention_mask=MASK)
        whole, third = (captures.calls(f"{block}.output", 0)[0] for captures in (every, some))
    assert torch.equal(third[0, 0], whole[0, 5])
    assert torch.equal(third[1, 0], whole[1, 2])


def test_a_mask_that_does_not_tell_padding_is_refused() -> None:
    model = made(llama)
    with HookManager(model) as hooks:
        hooks.attach("model.layers.0", positions=2)
        with pytest.raises(PositionError, match="a mask that does not tell which of them are padding"):
            model(input_ids=IDS, attention_mask=torch.ones(2, 1, 8, 8, dtype=torch.bool).tril())


def test_where_the_model_keeps_one_logit_the_last_position_is_still_there() -> None:
    model = made(llama)
    with HookManager(model) as hooks:
        hooks.attach("lm_head", "input", positions=-1)
        model(input_ids=IDS, attention_mask=MASK, logits_to_keep=1)
        kept = hooks.get("lm_head.input")
        model(input_ids=IDS, attention_mask=MASK)
        torch.testing.assert_close(hooks.get("lm_head.input"), kept)


@pytest.mark.parametrize("positions", [[3, 4], -1, "last"], ids=str)
def test_an_encoder_has_the_positions_of_its_own_sequence(positions: Positions) -> None:
    model = made(t5)
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        hooks.attach("encoder.block.0", positions=positions)
        hooks.attach("decoder.block.0", positions="generated")
        run(input_ids=IDS, attention_mask=MASK, decoder_input_ids=torch.tensor([[0, 5], [0, 6]]))
        called = hooks.get("encoder.block.0.output")
        hooks.clear()
        run.apply(lambda model: model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=4, pad_token_id=0))
        torch.testing.assert_close(hooks.get("encoder.block.0.output", forward=0), called)
        assert hooks.get("decoder.block.0.output", forward="all").shape == (2, 3, 16)
