"""What a module of Hugging Face takes and gives: a bare tensor, a tuple, a keyword, an object that is no tensor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from kamui.errors import ValueStructureError
from kamui.hooks import HookManager

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])
SIZES: dict[str, Any] = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}


@pytest.fixture
def llama() -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, num_hidden_layers=2, num_key_value_heads=2)
    return transformers.LlamaForCausalLM(config).eval()


def test_a_layer_that_gives_a_bare_tensor_is_edited_in_every_row(llama: transformers.LlamaForCausalLM) -> None:
    given: list[Tensor] = []
    with torch.no_grad(), HookManager(llama) as hooks:
        llama.model.norm.register_forward_pre_hook(lambda module, args: given.append(args[0]))
        hooks.attach("model.layers.1", replace_with=torch.zeros_like)
        hooks.attach("model.layers.1", raw=True)
        logits = llama(input_ids=IDS).logits
    assert type(given[0]) is Tensor
    assert given[0].shape == (2, 3, 16)
    assert (logits == 0).all()
    assert hooks.get("model.layers.1.output").ne(0).any(-1).all()


@pytest.mark.parametrize("module", ["attention", "attention.output", "attention.self"])
def test_a_module_called_output_and_its_parent_are_edited_apart(module: str) -> None:
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**SIZES, num_hidden_layers=1)).eval()
    layer = model.encoder.layer[0]
    gave: dict[str, Any] = {}
    for name in ("attention", "attention.output", "attention.self"):
        layer.get_submodule(name).register_forward_hook(
            lambda made, args, output, name=name: gave.update({name: output})
        )
    with torch.no_grad(), HookManager(model) as hooks:
        hooks.attach(f"encoder.layer.0.{module}", replace_with=lambda value: torch.full_like(value, 7.0))
        model(input_ids=IDS)
    seen = {name: bool((value if name == "attention.output" else value[0]).eq(7).all()) for name, value in gave.items()}
    # What attention gives is what its child called output gave; not the other way round.
    assert seen == {name: name == module or (name, module) == ("attention", "attention.output") for name in gave}
    assert {name: type(value) for name, value in gave.items()} == {
        "attention": tuple,
        "attention.output": Tensor,
        "attention.self": tuple,
    }


def test_attention_that_is_given_keywords_only_is_edited_with_the_rest_untouched(
    llama: transformers.LlamaForCausalLM,
) -> None:
    attention, given = "model.layers.0.self_attn", []

    def look() -> None:
        llama.get_submodule(attention).register_forward_pre_hook(
            lambda module, args, kwargs: given.append((args, kwargs)), with_kwargs=True
        )
        llama(input_ids=IDS)

    with torch.no_grad(), HookManager(llama) as hooks:
        look()
        hooks.attach(attention, "input")
        hooks.attach(attention, "input[position_embeddings][0]")
        hooks.attach(attention, "input", replace_with=lambda value: value * 2)
        given.clear()
        look()  # the hook of before runs first and sees what was given, the one of now what is handed on
    (_, plain), (args, keywords) = given
    assert args == ()
    assert list(keywords) == list(plain)
    assert torch.equal(keywords["hidden_states"], plain["hidden_states"] * 2)
    assert torch.equal(keywords["position_embeddings"][0], plain["position_embeddings"][0])
    assert torch.equal(hooks.get(f"{attention}.input"), keywords["hidden_states"])
    assert torch.equal(hooks.get(f"{attention}.input[position_embeddings][0]"), plain["position_embeddings"][0])


def test_a_wrong_name_of_an_argument_is_told_with_the_right_ones(llama: transformers.LlamaForCausalLM) -> None:
    with HookManager(llama) as hooks:
        hooks.attach("model.layers.0.self_attn", "input[states]")
        with pytest.raises(ValueStructureError, match=r"no 'states' in a dict; it holds 'hidden_states', 'attention_m"):
            llama(input_ids=IDS)


def test_a_captured_step_of_a_chat_does_not_grow_with_the_cache(llama: transformers.LlamaForCausalLM) -> None:
    first, second = torch.tensor([[1, 2, 3]]), torch.tensor([[4]])
    with torch.no_grad(), HookManager(llama) as hooks:
        hooks.attach("model")
        for io in ("k", "v"):
            hooks.attach("model.layers.0.self_attn", io)
        output = llama(input_ids=first, use_cache=True)
        keys = hooks.get("model.layers.0.self_attn.k")
        before = keys.clone()
        llama(input_ids=second, cache=output.cache, use_cache=True)
    assert output.cache.get_seq_length() == 4
    assert torch.equal(keys, before)
    for io in ("k", "v"):
        lengths = [hooks.get(f"model.layers.0.self_attn.{io}", forward=step).shape[2] for step in (0, 1)]
        assert lengths == [3, 4]
    assert [hooks.get("model.output", forward=step).shape[1] for step in (0, 1)] == [3, 1]


def test_a_cache_is_no_tensor_and_is_said_to_be_none(llama: transformers.LlamaForCausalLM) -> None:
    with HookManager(llama) as hooks:
        hooks.attach("model", "output[cache]")
        message = r"'model\.output\[cache\]' has no tensor: LlamaModel has a DynamicCache there"
        with pytest.raises(ValueStructureError, match=message):
            llama(input_ids=IDS, use_cache=True)
