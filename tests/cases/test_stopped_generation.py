"""How often a layer runs in a generation: early ends, no cache, and positions that only the prompt has."""

from __future__ import annotations

import pytest
import torch
import transformers

from kamui.errors import CallIndexError
from kamui.hooks import HookManager

PROMPT = torch.tensor([[5, 6, 7, 8]])
POINT = "model.layers.1.output"


@pytest.fixture
def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize(("use_cache", "lengths"), [(True, [4, 1, 1]), (False, [4, 5, 6])])
def test_each_step_is_kept_with_the_length_that_it_had(
    llama: transformers.LlamaForCausalLM, use_cache: bool, lengths: list[int]
) -> None:
    with HookManager(llama) as hooks:
        hooks.use("cache", at=POINT)
        llama.generate(PROMPT, max_new_tokens=3, do_sample=False, use_cache=use_cache)
    assert [hooks.get(POINT, forward=step).shape[1] for step in range(3)] == lengths


def test_a_generation_that_ends_at_once_has_one_pass_and_nothing_to_complain_of(
    llama: transformers.LlamaForCausalLM,
) -> None:
    first = int(llama.generate(PROMPT, max_new_tokens=1, do_sample=False)[0, 4])
    with HookManager(llama, strict=True) as hooks:
        hooks.use("cache", at=POINT)
        llama.generate(PROMPT, max_new_tokens=9, do_sample=False, eos_token_id=first)
    assert hooks.get(POINT, forward="all").shape == (1, 4, 16)
    assert hooks.report().finished == 1
    with pytest.raises(CallIndexError, match="there is no forward pass 5: 1 finished in this scope") as caught:
        hooks.get(POINT, forward=5)
    assert isinstance(caught.value, IndexError)


def test_a_position_of_the_prompt_is_edited_once_and_the_edits_are_counted(
    llama: transformers.LlamaForCausalLM,
) -> None:
    with HookManager(llama) as hooks:
        hooks.use("patching", at=POINT, value=torch.zeros_like, positions=2)
        generated = llama.generate(PROMPT, max_new_tokens=3, do_sample=False)
    (row,) = hooks.report().rows
    assert generated.shape == (1, 7)
    assert (row.calls, row.changed, row.missed) == (3, 1, 2)
