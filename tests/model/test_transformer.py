from __future__ import annotations

import ast
import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

import kamui.model.transformer
from kamui.model import KVCache, ModelConfig, Transformer

CONFIG = ModelConfig(3, 32, 4, 48, 61, 20)
SINUSOIDAL = ModelConfig(2, 32, 4, 48, 61, 20, "sinusoidal")


@pytest.fixture(params=[CONFIG, SINUSOIDAL], ids=["learned", "sinusoidal"])
def model(request: pytest.FixtureRequest) -> Transformer:
    return build(request.param)


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(61, (2, 7), generator=torch.Generator().manual_seed(1))  # (B, S)


def build(config: ModelConfig) -> Transformer:
    torch.manual_seed(0)
    model = Transformer(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


def gpt2_names(n_layers: int) -> Iterator[tuple[str, str, bool]]:
    """Yield our name, that of transformers, and whether it is stored the other way round there."""
    yield "embed.tokens.weight", "wte.weight", False
    yield "embed.positions.weight", "wpe.weight", False
    yield "final_ln.weight", "ln_f.weight", False
    yield "final_ln.bias", "ln_f.bias", False
    parts = {"ln1": "ln_1", "attn.qkv": "attn.c_attn", "attn.out": "attn.c_proj", "ln2": "ln_2"}
    parts |= {"ffn.up": "mlp.c_fc", "ffn.down": "mlp.c_proj"}
    for layer in range(n_layers):
        for ours, theirs in parts.items():
            yield f"blocks.{layer}.{ours}.weight", f"h.{layer}.{theirs}.weight", "ln" not in ours
            yield f"blocks.{layer}.{ours}.bias", f"h.{layer}.{theirs}.bias", False


def gpt2_twin(model: Transformer) -> GPT2LMHeadModel:
    config = model.config
    sizes = {"n_embd": config.d_model, "n_layer": config.n_layers, "n_head": config.n_heads}
    sizes |= {"n_inner": config.d_ff, "vocab_size": config.vocab_size, "n_positions": config.context_length}
    twin = GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    weights = model.state_dict()
    body = {}
    for ours, theirs, turned in gpt2_names(config.n_layers):
        body[theirs] = weights.pop(ours).T if turned else weights.pop(ours)
    assert set(weights) == {"unembed.weight"}
    twin.transformer.load_state_dict(body)
    return twin


def test_logits_are_those_of_gpt2_with_the_same_weights(token_ids: Tensor) -> None:
    model = build(CONFIG)
    twin = gpt2_twin(model)
    with torch.no_grad():
        torch.testing.assert_close(model(token_ids), twin(token_ids).logits, atol=1e-5, rtol=0)


def test_gradients_are_those_of_gpt2_with_the_same_weights(token_ids: Tensor) -> None:
    model = build(CONFIG)
    twin = gpt2_twin(model)
    model(token_ids).logsumexp(-1).sum().backward()
    twin(token_ids).logits.logsumexp(-1).sum().backward()
    theirs = dict(twin.transformer.named_parameters())
    for ours, name, turned in gpt2_names(CONFIG.n_layers):
        expected = theirs[name].grad
        assert expected is not None
        expected = expected.T if turned else expected
        torch.testing.assert_close(model.get_parameter(ours).grad, expected, atol=1e-4, rtol=1e-4)


def test_greedy_generation_is_that_of_gpt2_with_the_same_weights(token_ids: Tensor) -> None:
    model = build(CONFIG)
    theirs = gpt2_twin(model).generate(
        token_ids,
        attention_mask=torch.ones_like(token_ids),
        max_new_tokens=9,
        do_sample=False,
        pad_token_id=0,
    )
    assert torch.equal(model.generate(token_ids, 9), theirs)


def test_modules_are_named_and_called_in_order(token_ids: Tensor) -> None:
    model = build(CONFIG)
    names = {module: name for name, module in model.named_modules()}
    order: list[str] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, _, __: order.append(names[module]))
    model(token_ids)
    block = ["ln1", "attn.qkv", "attn.out", "attn.dropout", "attn"]
    block += ["ln2", "ffn.up", "ffn.act", "ffn.down", "ffn.dropout", "ffn"]
    expected = ["embed.tokens", "embed.positions", "embed.dropout", "embed"]
    for layer in range(CONFIG.n_layers):
        expected += [f"blocks.{layer}.{name}" for name in block] + [f"blocks.{layer}"]
    assert order == [*expected, "final_ln", "unembed", ""]


def test_the_residual_stream_is_the_sum_of_what_the_parts_give(model: Transformer, token_ids: Tensor) -> None:
    given: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: given.update({name: output}))
    model.final_ln.register_forward_pre_hook(lambda _, args: given.update(stream=args[0]))
    model.blocks[1].ffn.down.register_forward_pre_hook(lambda _, args: given.update(hidden=args[0]))
    model(token_ids)
    total = given["embed"]
    for layer in range(model.config.n_layers):
        total = total + given[f"blocks.{layer}.attn"] + given[f"blocks.{layer}.ffn"]
    torch.testing.assert_close(total, given["stream"], atol=1e-5, rtol=1e-5)
    assert given["hidden"] is given["blocks.1.ffn.act"]
    assert given["hidden"].shape == (2, 7, 48)
    assert given["embed"].shape == given["blocks.0.attn"].shape == (2, 7, 32)
    assert given["unembed"].shape == (2, 7, 61)


def test_sinusoidal_positions_follow_the_paper() -> None:
    table = build(SINUSOIDAL).embed.positions.table  # (S, D)
    for position, place in [(0, 0), (0, 1), (3, 8), (19, 31)]:
        angle = position / 10_000 ** (2 * (place // 2) / 32)
        expected = math.cos(angle) if place % 2 else math.sin(angle)
        assert table[position, place].item() == pytest.approx(expected, abs=1e-5)
    assert not any("positions" in name for name in build(SINUSOIDAL).state_dict())


def test_a_position_does_not_see_later_ones(model: Transformer, token_ids: Tensor) -> None:
    changed = token_ids.clone()
    changed[:, 4:] = (changed[:, 4:] + 1) % 61
    before, after = model(token_ids), model(changed)
    torch.testing.assert_close(before[:, :4], after[:, :4], atol=1e-6, rtol=0)
    assert not torch.allclose(before[:, 4:], after[:, 4:])


@pytest.mark.parametrize("cuts", [[7], [1] * 7, [3, 4], [4, 2, 1]])
def test_a_sequence_in_pieces_gives_the_same_logits(model: Transformer, token_ids: Tensor, cuts: list[int]) -> None:
    cache = KVCache()
    assert cache.get_seq_length() == 0
    pieces = [model(piece, cache=cache) for piece in token_ids.split(cuts, dim=1)]
    torch.testing.assert_close(torch.cat(pieces, dim=1), model(token_ids), atol=1e-5, rtol=1e-5)
    assert [cache.get_seq_length(layer) for layer in range(model.config.n_layers)] == [7] * model.config.n_layers


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7}, {"temperature": 1.5, "top_k": 5}])
def test_cached_and_uncached_generation_agree(model: Transformer, token_ids: Tensor, options: dict[str, Any]) -> None:
    cached, uncached = (
        model.generate(token_ids, 13, **options, generator=torch.Generator().manual_seed(3), use_cache=use_cache)
        for use_cache in (True, False)
    )
    assert torch.equal(cached, uncached)
    assert cached.shape == (2, 20)
    assert torch.equal(cached[:, :7], token_ids)


def test_sampling_repeats_with_the_seed_and_leaves_the_global_one(model: Transformer, token_ids: Tensor) -> None:
    state = torch.get_rng_state()
    first, second, other = (
        model.generate(token_ids, 10, temperature=1.0, generator=torch.Generator().manual_seed(seed))
        for seed in (5, 5, 6)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.get_rng_state(), state)


def test_top_k_of_one_is_greedy_and_sampling_follows_the_softmax(token_ids: Tensor) -> None:
    model = build(CONFIG)
    greedy = model.generate(token_ids, 5)
    assert torch.equal(model.generate(token_ids, 5, temperature=2.0, top_k=1), greedy)
    prompts = token_ids[:1].expand(20_000, -1)
    drawn = model.generate(prompts, 1, temperature=8.0, top_k=4, generator=torch.Generator().manual_seed(0))
    best = model(token_ids[:1])[0, -1].topk(4)
    shares = torch.bincount(drawn[:, -1], minlength=61) / 20_000
    torch.testing.assert_close(shares[best.indices], (best.values / 8).softmax(-1), atol=0.015, rtol=0)
    assert shares[best.indices].sum() == 1


@pytest.mark.parametrize("training", [True, False])
def test_generation_leaves_mode_gradients_and_weights_alone(token_ids: Tensor, training: bool) -> None:
    model = build(CONFIG).train(training)
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    weights = copy.deepcopy(model.state_dict())
    generated = model.generate(token_ids, 3)
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    assert not generated.requires_grad
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), weights, atol=0, rtol=0)
    assert all(not module._forward_hooks for module in model.modules())


def test_dropout_acts_in_training_mode_alone(token_ids: Tensor) -> None:
    model = build(ModelConfig(2, 32, 4, 48, 61, 20, dropout=0.5))
    assert torch.equal(model(token_ids), model(token_ids))
    model.train()
    assert not torch.allclose(model(token_ids), model(token_ids))


def test_embedding_and_unembedding_share_one_weight() -> None:
    model = build(CONFIG)
    for one in (model, copy.deepcopy(model)):
        assert one.unembed.weight is one.embed.tokens.weight
    assert model.unembed.bias is None


def test_initial_weights_are_spread_as_in_gpt2() -> None:
    torch.manual_seed(0)
    model = Transformer(ModelConfig(8, 128, 4, 256, 512, 64))
    assert model.embed.tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert model.embed.positions.weight.std().item() == pytest.approx(0.02, rel=0.05)
    for block in model.blocks:
        assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.05)
        assert block.attn.out.weight.std().item() == pytest.approx(0.005, rel=0.05)
        assert block.ffn.down.weight.std().item() == pytest.approx(0.005, rel=0.05)
        assert not block.attn.qkv.bias.any()
        assert torch.equal(block.ln1.weight, torch.ones(128))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (
            torch.zeros(2, 3),
            r"token_ids are torch.float32 of shape \(2, 3\); expected int64 or int32 of shape",
        ),
        (torch.zeros(3, dtype=torch.long), r"token_ids are torch.int64 of shape \(3,\); expected"),
        (torch.zeros(1, 0, dtype=torch.long), r"of shape \(1, 0\); expected .* with at least one position"),
        (torch.tensor([[0, 61]]), "token_ids go from 0 to 61; vocab_size is 61, so 0 to 60 are known"),
        (torch.tensor([[-1, 3]]), "token_ids go from -1 to 3; vocab_size is 61"),
        (
            torch.zeros(1, 21, dtype=torch.long),
            r"would have 21 positions \(21 in token_ids and 0 more\); context_length is 20",
        ),
    ],
)
def test_token_ids_that_do_not_fit_are_refused(model: Transformer, wrong: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model(wrong)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_new_tokens": 14}, r"would have 21 positions \(7 in token_ids and 14 more\)"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1; expected at least 0"),
        ({"max_new_tokens": 1, "temperature": -0.5}, "temperature is -0.5; expected at least 0"),
        ({"max_new_tokens": 1, "top_k": 0}, "top_k is 0; expected 1 to 61 or None"),
        ({"max_new_tokens": 1, "top_k": 62}, "top_k is 62; expected 1 to 61 or None"),
    ],
)
def test_generation_refuses_what_it_cannot_do(
    model: Transformer, token_ids: Tensor, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        model.generate(token_ids, **options)


def test_a_cache_counts_towards_the_context_length(model: Transformer, token_ids: Tensor) -> None:
    cache = KVCache()
    model(token_ids.repeat(1, 2), cache=cache)
    with pytest.raises(ValueError, match=r"would have 21 positions \(7 in token_ids and 14 more\)"):
        model(token_ids, cache=cache)


def test_an_index_error_of_a_hook_is_not_taken_for_ours(model: Transformer, token_ids: Tensor) -> None:
    def fail(*_: object) -> None:
        raise IndexError("of the hook")

    model.embed.register_forward_hook(fail)
    with pytest.raises(IndexError, match="of the hook"):
        model(token_ids)


def test_int32_token_ids_and_no_new_tokens_are_fine(model: Transformer, token_ids: Tensor) -> None:
    assert torch.equal(model(token_ids.int()), model(token_ids))
    assert torch.equal(model.generate(token_ids, 0), token_ids)


def test_it_can_be_compiled_as_a_whole_graph(token_ids: Tensor) -> None:
    model = build(CONFIG)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(token_ids), model(token_ids))


def test_the_model_imports_only_torch_and_its_cache() -> None:
    tree = ast.parse(Path(kamui.model.transformer.__file__).read_text(encoding="utf-8"))
    imported = {node.module for node in tree.body if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("kamui")} == {"kamui.model.kv_cache"}
