"""What the canonical points are on each family, written down by hand from its modelling code."""

from __future__ import annotations

import pytest
import torch

from families.zoo import FAMILIES, make
from kamui import HookManager, HookRegistry
from kamui.errors import UnknownPointError

LLAMA = ("model.layers.1", "self_attn", "self_attn.output", "mlp.down_proj.input", "mlp.output")
LLAMA_LIKE = (
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi3 stablelm olmo olmo2 cohere granite glm nemotron smollm3"
)
MIXTURE = ("model.layers.1", "self_attn", "self_attn.output", None, "mlp.output")
SCATTERED = ("self_attn", "self_attn.output", "fc2.input", "fc2.output")
BERT = ("attention.self", "attention.output.dense.output", "output.dense.input", "output.dense.output")
FALCON = ("transformer.h.1", "self_attention", "self_attention.output", "mlp.dense_4h_to_h.input", "mlp.output")
CLIP = ("self_attn", "self_attn.output", "mlp.fc2.input", "mlp.output")
T5_SELF = ("layer.0.SelfAttention", "layer.0.SelfAttention.output")

# family: (block 1, attention module, attn.output, ffn.mid, ffn.output)
SPELLINGS: dict[str, tuple[str | None, ...]] = {
    **dict.fromkeys(LLAMA_LIKE.split(), LLAMA),
    **dict.fromkeys(("mixtral", "qwen2_moe", "gpt_oss"), MIXTURE),
    **dict.fromkeys(("falcon", "falcon_40b", "falcon_rw"), FALCON),
    "gpt2": ("transformer.h.1", "attn", "attn.output", "mlp.c_proj.input", "mlp.output"),
    "gpt_bigcode": ("transformer.h.1", "attn", "attn.output", "mlp.c_proj.input", "mlp.output"),
    "gptj": ("transformer.h.1", "attn", "attn.output", "mlp.fc_out.input", "mlp.output"),
    "codegen": ("transformer.h.1", "attn", "attn.output", "mlp.fc_out.input", "mlp.output"),
    "gpt_neo": ("transformer.h.1", "attn.attention", "attn.attention.output", "mlp.c_proj.input", "mlp.output"),
    "gpt_neox": ("gpt_neox.layers.1", "attention", "attention.output", "mlp.dense_4h_to_h.input", "mlp.output"),
    "phi": ("model.layers.1", "self_attn", "self_attn.output", "mlp.fc2.input", "mlp.output"),
    "starcoder2": ("model.layers.1", "self_attn", "self_attn.output", "mlp.c_proj.input", "mlp.output"),
    "bloom": (  # both parts add the residual stream inside of the module
        "transformer.h.1",
        "self_attention",
        "self_attention.dense.output",
        "mlp.dense_4h_to_h.input",
        "mlp.dense_4h_to_h.output",
    ),
    "mpt": ("transformer.blocks.1", "attn", "attn.output", "ffn.down_proj.input", "ffn.down_proj.output"),
    "opt": ("model.decoder.layers.1", *SCATTERED),
    "opt_350m": ("model.decoder.layers.1", *SCATTERED),
    "xglm": ("model.layers.1", *SCATTERED),
    "bert": ("bert.encoder.layer.1", *BERT),
    "roberta": ("roberta.encoder.layer.1", *BERT),
    "electra": ("electra.encoder.layer.1", *BERT),
    "deberta-v2": ("deberta.encoder.layer.1", *BERT),
    "distilbert": ("distilbert.transformer.layer.1", "attention", "attention.output", "ffn.lin2.input", "ffn.output"),
    "albert": (
        "albert.encoder.albert_layer_groups.0.albert_layers.0",
        "attention",
        "attention.dense.output",
        "ffn_output.input",
        "ffn_output.output",
    ),
    "modernbert": ("model.layers.1", "attn", "attn.output", "mlp.Wo.input", "mlp.output"),
    "t5": ("decoder.block.1", *T5_SELF, "layer.2.DenseReluDense.wo.input", "layer.2.DenseReluDense.output"),
    "flan_t5": ("decoder.block.1", *T5_SELF, "layer.2.DenseReluDense.wo.input", "layer.2.DenseReluDense.output"),
    "bart": ("model.decoder.layers.1", *SCATTERED),
    "whisper": ("model.decoder.layers.1", *SCATTERED),
    "vit": ("vit.layers.1", "attention", "attention.output", "mlp.fc2.input", "mlp.output"),
    "clip_text": ("encoder.layers.1", *CLIP),
    "clip_vision": ("encoder.layers.1", *CLIP),
    "clip": ("vision_model.encoder.layers.1", *CLIP),
}
PREFIXES = {"t5": "decoder.", "flan_t5": "decoder.", "bart": "decoder.", "whisper": "decoder.", "clip": "vision_model."}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_canonical_name_is_the_place_that_the_modelling_code_shows(name: str) -> None:
    model, inputs = make(name)
    path, *parts = SPELLINGS[name]
    block = f"{PREFIXES.get(name, '')}blocks.1"
    call = 1 if name == "albert" else None
    pairs = {f"{block}.output": f"{path}.output", f"{block}.attn.input": f"{path}.{parts[0]}.input"}
    for point, real in zip(("attn.output", "ffn.mid", "ffn.output"), parts[1:], strict=True):
        if real is not None:
            pairs[f"{block}.{point}"] = f"{path}.{real}"
    with torch.no_grad(), HookManager(model) as hooks:
        for point in (*pairs, *pairs.values()):
            hooks.attach(*point.rsplit(".", 1))
        model(**inputs)
    for point, real in pairs.items():
        assert torch.equal(hooks.get(point), hooks.get(real, call=call)), point
    assert hooks.module(f"{block}.attn") is model.get_submodule(f"{path}.{parts[0]}")
    assert f"{path}.{parts[0]}" in hooks.architecture.attentions


@pytest.mark.parametrize("name", sorted(set(FAMILIES) - {"mixtral", "qwen2_moe", "gpt_oss"}))
def test_mid_is_what_enters_the_last_matrix_of_the_feed_forward(name: str) -> None:
    model, inputs = make(name)
    path, _, _, mid, _ = SPELLINGS[name]
    seen = []
    down = model.get_submodule(f"{path}.{mid}".removesuffix(".input"))
    handle = down.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone()))
    with torch.no_grad(), HookManager(model) as hooks:
        hooks.attach(f"{PREFIXES.get(name, '')}blocks.1.ffn", "mid")
        model(**inputs)
    handle.remove()
    point = f"{PREFIXES.get(name, '')}blocks.1.ffn.mid"
    assert torch.equal(hooks.get(point), seen[1 if name == "albert" else 0])


@pytest.mark.parametrize("name", FAMILIES)
def test_canonical_points_are_real_places(name: str) -> None:
    model, _ = make(name)
    points = HookRegistry.all_points(model)
    assert len(points) == len(set(points))
    assert all(HookRegistry.resolve(model, point) == [point] for point in points)


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "albert"])
def test_negative_indices_and_slices_count_blocks(name: str) -> None:
    model, _ = make(name)
    assert HookRegistry.resolve(model, "blocks.-1.output") == ["blocks.2.output"]
    assert HookRegistry.resolve(model, "blocks.1:3.attn.output") == ["blocks.1.attn.output", "blocks.2.attn.output"]


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "gpt_oss"])
def test_a_mixture_of_experts_says_that_it_has_no_mid(name: str) -> None:
    model, _ = make(name)
    with pytest.raises(UnknownPointError) as caught:
        HookRegistry.validate(model, "blocks.0.ffn.mid")
    assert str(caught.value) == (
        "point 'blocks.0.ffn.mid' is not in this model: its feed-forward is a mixture of experts, in which each token "
        "goes through matrices of its own; use 'output', or what is inside by its module path"
    )


@pytest.mark.parametrize("name", ["opt", "bert"])
def test_a_feed_forward_that_is_no_module_says_so(name: str) -> None:
    model, _ = make(name)
    with pytest.raises(UnknownPointError) as caught:
        HookRegistry.validate(model, "blocks.0.ffn.input")
    assert str(caught.value) == (
        "point 'blocks.0.ffn.input' is not in this model: its feed-forward is no module of its own; only 'mid' and "
        "'output' of it are places"
    )
    with HookManager(model) as hooks, pytest.raises(UnknownPointError, match="no module of its own"):
        hooks.module("blocks.0.ffn")


def test_a_model_without_final_norm_says_so() -> None:
    model, _ = make("bert")
    with pytest.raises(
        UnknownPointError, match=r"'final_ln\.output' is not in this model: this model has no norm after"
    ):
        HookRegistry.validate(model, "final_ln.output")


def test_names_of_modules_lead_to_the_modules_and_not_to_where_their_points_are() -> None:
    model, _ = make("bert")
    with HookManager(model) as hooks:
        assert hooks.module("embed") is model.bert.embeddings.word_embeddings
        assert hooks.module("unembed") is model.cls.predictions.decoder
