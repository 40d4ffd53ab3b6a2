from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from families.attending import (
    BOTH_IMPLEMENTATIONS,
    IOS,
    WITH_TOKENS,
    attentions,
    built,
    expected_weights,
    inputs_of,
    output_projection,
    points,
    real_rows,
    tensors,
)
from families.zoo import FAMILIES, make
from kamui.errors import AttentionError
from kamui.hooks import HookManager

CASES = [
    pytest.param(name, eager, padded, id=f"{name}-{'eager' if eager else 'sdpa'}{'-padded' if padded else ''}")
    for name in FAMILIES
    for eager in (True, False)
    if eager or name in BOTH_IMPLEMENTATIONS
    for padded in (False, True)
    if not padded or name in WITH_TOKENS
]
# transformers adds the position bias of these once with the kernel and twice step by step.
ONE_OF_TWO_MODELS = ("falcon_rw",)
# These hand out no attention weights of their own.
SILENT = ("clip",)


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    """Let the threads of so small models not wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def build(name: str, eager: bool, padded: bool) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    return built(name, eager=eager), inputs_of(name, padded=padded)


def capture(model: PreTrainedModel, inputs: dict[str, Tensor], *ios: str) -> tuple[Any, dict[str, Tensor]]:
    with HookManager(model) as hooks:
        hooks.use("cache", at=points(model, *ios))
        output = model(**inputs)
        return output, hooks.get_all()


@pytest.mark.parametrize(("name", "eager", "padded"), CASES)
@torch.no_grad()
def test_weights_are_those_that_the_eager_model_hands_out(name: str, eager: bool, padded: bool) -> None:
    if name in SILENT or (name in ONE_OF_TWO_MODELS and not eager):
        return
    model, inputs = build(name, eager, padded)
    _, found = capture(model, inputs, "weights")
    expected = expected_weights(name, padded=padded)
    assert found.keys() == expected.keys()
    for key, weights in found.items():
        torch.testing.assert_close(real_rows(weights, inputs), real_rows(expected[key], inputs), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("name", "eager", "padded"), CASES)
@torch.no_grad()
def test_observing_leaves_the_output_as_it_is_to_the_bit(name: str, eager: bool, padded: bool) -> None:
    model, inputs = build(name, eager, padded)
    bare = tensors(model(**inputs))
    for ios in (IOS, *((io,) for io in IOS)):
        output, found = capture(model, inputs, *ios)
        assert {key.partition("#")[0] for key in found} == set(points(model, *ios))
        assert all(torch.equal(one, other) for one, other in zip(tensors(output), bare, strict=True))


@pytest.mark.parametrize(("name", "eager", "padded"), CASES)
@torch.no_grad()
def test_internals_belong_together(name: str, eager: bool, padded: bool) -> None:
    model, inputs = build(name, eager, padded)
    _, found = capture(model, inputs, *IOS)
    for key in [key for key in found if ".weights" in key]:
        q, k, v, scores, weights, z = (found[key.replace(".weights", f".{io}")] for io in IOS)
        heads = q.shape[1]
        k, v = (part.repeat_interleave(heads // part.shape[1], 1) for part in (k, v))
        assert weights.shape == scores.shape == (*q.shape[:3], k.shape[2])
        assert scores.min() > -1e4
        torch.testing.assert_close(weights @ v, z, atol=1e-5, rtol=1e-4)
        assert not any(value.isnan().any() for value in (q, k, v, scores, weights, z))


@pytest.mark.parametrize(("name", "eager", "padded"), CASES)
@torch.no_grad()
def test_replaced_by_itself_each_gives_the_same_output(name: str, eager: bool, padded: bool) -> None:
    model, inputs = build(name, eager, padded)
    bare = tensors(model(**inputs))
    for io in IOS:
        with HookManager(model) as hooks:
            hooks.use(lambda value: value.clone(), at=points(model, io))
            output = tensors(model(**inputs))
        for one, other in zip(output, bare, strict=True):
            assert_close_to_scale(one, other)
            assert not one.is_floating_point() or not one.isnan().any()


def assert_close_to_scale(one: Tensor, other: Tensor) -> None:
    scale = max(1.0, other.abs().max().item())
    torch.testing.assert_close(one, other, atol=1e-5 * scale, rtol=1e-5)


def without_first_head(value: Tensor) -> None:
    value[:, 0] = 0


@pytest.mark.parametrize(("name", "eager", "padded"), CASES)
@torch.no_grad()
def test_a_head_zeroed_in_z_is_its_slice_zeroed_before_the_output_projection(
    name: str, eager: bool, padded: bool
) -> None:
    model, inputs = build(name, eager, padded)
    path = attentions(model)[1 if name != "albert" else 0]
    _, found = capture(model, inputs, "z")
    width = next(z.shape[-1] for key, z in found.items() if key.startswith(path))

    def zero(module: Any, args: tuple[Tensor]) -> Tensor:
        joined = args[0].clone()
        joined[..., :width] = 0
        return joined

    handle = output_projection(model, path).register_forward_pre_hook(zero)
    by_hand = tensors(model(**inputs))
    handle.remove()
    with HookManager(model) as hooks:
        hooks.use(without_first_head, at=f"{path}.z")
        output = tensors(model(**inputs))
    assert not all(torch.equal(one, other) for one, other in zip(output, tensors(model(**inputs)), strict=True))
    for one, other in zip(output, by_hand, strict=True):
        assert_close_to_scale(one, other)


@pytest.mark.parametrize("name", [name for name in BOTH_IMPLEMENTATIONS if name not in ONE_OF_TWO_MODELS])
@pytest.mark.parametrize("padded", [False, True])
@torch.no_grad()
def test_queries_keys_and_values_do_not_depend_on_the_implementation(name: str, padded: bool) -> None:
    if padded and name not in WITH_TOKENS:
        return
    (fused, inputs), (eager, _) = build(name, False, padded), build(name, True, padded)
    _, expected = capture(eager, inputs, "q", "k", "v")
    _, found = capture(fused, inputs, "q", "k", "v")
    assert found.keys() == expected.keys()
    for key, value in found.items():
        assert value.shape == expected[key].shape
        assert_close_to_scale(real_rows(value, inputs), real_rows(expected[key], inputs))


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "qwen3", "falcon", "gpt_bigcode", "falcon_40b"])
@pytest.mark.parametrize("eager", [True, False])
@torch.no_grad()
def test_keys_and_values_have_the_heads_that_the_config_says(name: str, eager: bool) -> None:
    model, inputs = build(name, eager, True)
    _, found = capture(model, inputs, "k", "v")
    heads = {"falcon": 1, "gpt_bigcode": 1, "falcon_40b": 4}.get(
        name, FAMILIES[name].settings.get("num_key_value_heads")
    )
    assert {value.shape[1] for value in found.values()} == {heads}


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bloom", "gptj", "t5", "mpt", "gpt_oss"])
@pytest.mark.parametrize("eager", [True, False])
@torch.no_grad()
def test_bf16_agrees_to_its_precision_and_keeps_the_dtype_of_the_queries(name: str, eager: bool) -> None:
    (model, inputs), (twin, _) = make(name, eager=eager), make(name, eager=True)
    model, twin = model.bfloat16(), twin.bfloat16()
    expected = twin(**inputs, output_attentions=True)
    key = "attentions" if "attentions" in expected else "encoder_attentions"
    _, found = capture(model, inputs, "weights")
    path = attentions(model)[0]
    assert found[f"{path}.weights"].dtype == torch.bfloat16
    torch.testing.assert_close(found[f"{path}.weights"].float(), expected[key][0].float(), atol=1e-2, rtol=0)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "bloom", "deberta-v2", "gpt_oss", "bert"])
@pytest.mark.parametrize("io", ["q", "k", "v", "pre_softmax", "weights", "z"])
@pytest.mark.parametrize("eager", [True, False])
def test_gradients_reach_a_replacement(name: str, io: str, eager: bool) -> None:
    model, inputs = build(name, eager, True)
    path = attentions(model)[1]
    factor = torch.ones((), requires_grad=True)
    with HookManager(model) as hooks:
        hooks.use(lambda value: value * factor, at=f"{path}.{io}")
        loss = model(**inputs).logits.float().square().sum()
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        gradient, *others = torch.autograd.grad(loss, [factor, *parameters], allow_unused=True)
    assert gradient.isfinite()
    assert gradient != 0
    assert all(other is None or other.isfinite().all() for other in others)


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "bloom", "falcon", "gpt_oss", "gpt_bigcode"])
@pytest.mark.parametrize("eager", [True, False])
@torch.no_grad()
def test_the_cache_grows_the_keys_and_generation_stays_the_same(name: str, eager: bool) -> None:
    model, inputs = build(name, eager, True)
    path = attentions(model)[-1]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None}
    bare = model.generate(**inputs, **options)
    with HookManager(model) as hooks:
        hooks.use("cache", at=[f"{path}.{io}" for io in IOS])
        assert torch.equal(model.generate(**inputs, **options), bare)
        for forward in range(1, 4):
            q, k, v, scores, weights, z = (hooks.get(f"{path}.{io}", forward=forward) for io in IOS)
            assert q.shape[2] == z.shape[2] == 1
            assert weights.shape == scores.shape == (2, 4, 1, k.shape[2])
            groups = 4 // v.shape[1]
            torch.testing.assert_close(weights @ v.repeat_interleave(groups, 1), z, atol=1e-5, rtol=1e-4)
        assert name in ("mistral", "gemma2", "gpt_oss") or k.shape[2] == 11
        hooks.use(lambda value: value.clone(), at=points(model, *IOS))
        assert torch.equal(model.generate(**inputs, **options), bare)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bloom", "falcon", "gemma"])
@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("io", ["k", "v"])
@torch.no_grad()
def test_an_edit_of_keys_or_values_is_not_written_to_the_cache(name: str, eager: bool, io: str) -> None:
    model, inputs = build(name, eager, True)
    first = attentions(model)[0]
    bare = model(**inputs, use_cache=True)
    with HookManager(model) as hooks:
        hooks.use(lambda value: value * 0.5, at=f"{first}.{io}")
        edited = model(**inputs, use_cache=True)
    assert not torch.equal(edited.logits, bare.logits)
    kept, expected = (output.past_key_values.layers[0] for output in (edited, bare))
    assert torch.equal(kept.keys, expected.keys)
    assert torch.equal(kept.values, expected.values)


@pytest.mark.parametrize("name", ["llama", "gpt_oss", "gpt2"])
@pytest.mark.parametrize("eager", [True, False])
@torch.no_grad()
def test_a_static_cache_is_read_and_left_as_it_is(name: str, eager: bool) -> None:
    model, inputs = build(name, eager, False)
    path = attentions(model)[0]
    options = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": None, "cache_implementation": "static"}
    bare = model.generate(**inputs, **options, disable_compile=True)
    with HookManager(model) as hooks:
        hooks.use("cache", at=[f"{path}.{io}" for io in IOS])
        hooks.use(lambda value: value.clone(), at=points(model, *IOS))
        assert torch.equal(model.generate(**inputs, **options, disable_compile=True), bare)
        k, weights, v, z = (hooks.get(f"{path}.{io}", forward=3) for io in ("k", "weights", "v", "z"))
    assert weights.shape[-1] == k.shape[2]
    torch.testing.assert_close(weights @ v.repeat_interleave(4 // v.shape[1], 1), z, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_scores_before_the_mask_hold_the_position_bias() -> None:
    model, inputs = build("t5", True, True)
    _, found = capture(model, inputs, "q", "k", "pre_softmax")
    path = "encoder.block.0.layer.0.SelfAttention"
    q, k, scores = (found[f"{path}.{io}"] for io in ("q", "k", "pre_softmax"))
    bias = model.get_submodule(path).compute_bias(8, 8)  # (1, H, S, S)
    torch.testing.assert_close(scores, q @ k.mT + bias)

    model, inputs = build("bloom", True, False)
    _, found = capture(model, inputs, "q", "k", "pre_softmax")
    q, k, scores = (found[f"transformer.h.1.self_attention.{io}"] for io in ("q", "k", "pre_softmax"))
    slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8])
    alibi = slopes[:, None, None] * torch.arange(8.0)  # (H, 1, S)
    torch.testing.assert_close(scores, q @ k.mT / 8**0.5 + alibi)


@torch.no_grad()
def test_scores_before_the_mask_are_soft_capped_and_have_no_column_for_sinks() -> None:
    model, inputs = build("gemma2", True, True)
    _, found = capture(model, inputs, "pre_softmax")
    assert all(1.0 < scores.abs().max() <= 2.0 for scores in found.values())
    model, inputs = build("gpt_oss", True, True)
    _, found = capture(model, inputs, "pre_softmax", "weights")
    assert {value.shape for value in found.values()} == {(2, 4, 8, 8)}
    assert all((value.sum(-1) < 0.99).any() for key, value in found.items() if key.endswith("weights"))


@torch.no_grad()
def test_attention_in_pieces_is_an_error_that_says_so() -> None:
    config = transformers.LongformerConfig(
        vocab_size=67,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        attention_window=4,
    )
    model = transformers.LongformerModel(config).eval()
    with HookManager(model) as hooks:
        hooks.use("cache", at="encoder.layer.0.attention.self.weights")
        with pytest.raises(AttentionError, match="computes attention in pieces"):
            model(inputs_of("bert")["input_ids"])


@torch.no_grad()
def test_an_implementation_that_shows_nothing_is_named() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.AttentionInterface.register("flash_by_hand", lambda module, query, *_, **__: (query.mT.mT, None))
    llama, inputs = make("llama")
    llama.config._attn_implementation = "flash_by_hand"
    with HookManager(llama) as hooks:
        hooks.use("cache", at="model.layers.0.self_attn.weights")
        with pytest.raises(AttentionError, match=r"'flash_by_hand', which never .*set_attn_implementation\('eager'\)"):
            llama(**inputs)
