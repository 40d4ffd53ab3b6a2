"""Families of Hugging Face models, tiny and random, with the settings of the checkpoints that are published.

Defaults often switch off what makes a family special (relative attention, soft caps, multipliers, windows, sinks);
here it is on. No bias or norm is left at 0 or 1, so that nothing is hidden.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

Kind = Literal["causal", "encoder", "seq2seq", "audio", "vision", "text", "contrastive"]

VOCABULARY = 67
BATCH, LENGTH = 2, 8


@dataclass(frozen=True)
class Family:
    """One family: its model class, what it takes, and the settings that differ from the defaults."""

    model: str
    kind: Kind
    settings: dict[str, Any] = field(default_factory=dict)
    n_layers: int = 3


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32} | _SPECIAL
_LLAMA = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
} | _SPECIAL
_MULTI_HEAD = {key: value for key, value in _LLAMA.items() if key != "num_key_value_heads"}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_BERT = _MULTI_HEAD | {"type_vocab_size": 2}
_ROBERTA = _BERT | {"pad_token_id": 1, "bos_token_id": 0, "max_position_embeddings": 40}
_BART = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 32,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
} | _SPECIAL
_T5 = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "decoder_start_token_id": 0,
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 8,
    "patch_size": 4,
}
_CLIP_TEXT = _MULTI_HEAD | {"max_position_embeddings": 16}
_WHISPER = _BART | {
    "num_mel_bins": 8,
    "max_source_positions": 8,
    "max_target_positions": 32,
    "decoder_start_token_id": 1,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
}
del _WHISPER["max_position_embeddings"], _WHISPER["forced_eos_token_id"]
_FALCON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "ffn_hidden_size": 48,
} | _SPECIAL

FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2LMHeadModel", "causal", _GPT2),
    "gptj": Family("GPTJForCausalLM", "causal", _GPT2 | {"rotary_dim": 4}),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        "causal",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "num_layers": 3,
            "num_heads": 4,
            "attention_types": [[["global", "local", "global"], 1]],
            "window_size": 4,
            "max_position_embeddings": 32,
        }
        | _SPECIAL,
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "causal",
        _MULTI_HEAD | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.25}, "use_parallel_residual": True},
    ),
    "gpt_bigcode": Family(
        "GPTBigCodeForCausalLM", "causal", _GPT2 | {"multi_query": True, "activation_function": "gelu_pytorch_tanh"}
    ),
    "opt": Family(
        "OPTForCausalLM",
        "causal",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 32,
        }
        | _SPECIAL,
    ),
    "opt_350m": Family(
        "OPTForCausalLM",
        "causal",
        {
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            "ffn_dim": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 32,
            "word_embed_proj_dim": 16,
            "do_layer_norm_before": False,
        }
        | _SPECIAL,
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "causal",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 3, "n_head": 4} | _SPECIAL,
    ),
    "llama": Family(
        "LlamaForCausalLM",
        "causal",
        _LLAMA
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mistral": Family("MistralForCausalLM", "causal", _LLAMA | {"sliding_window": 4, "head_dim": 8}),
    "mixtral": Family("MixtralForCausalLM", "causal", _LLAMA | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2": Family("Qwen2ForCausalLM", "causal", _LLAMA),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM",
        "causal",
        _LLAMA
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 24,
        },
    ),
    "qwen3": Family("Qwen3ForCausalLM", "causal", _LLAMA | {"head_dim": 16}),
    "gemma": Family("GemmaForCausalLM", "causal", _LLAMA | {"head_dim": 16, "num_key_value_heads": 1}),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "causal",
        _LLAMA
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 4,
            "attn_logit_softcapping": 2.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "gemma3": Family(
        "Gemma3ForCausalLM",
        "causal",
        _LLAMA
        | {
            "head_dim": 16,
            "query_pre_attn_scalar": 24,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "phi": Family("PhiForCausalLM", "causal", _LLAMA | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}),
    "phi3": Family("Phi3ForCausalLM", "causal", _LLAMA | {"sliding_window": 4}),
    "falcon": Family("FalconForCausalLM", "causal", _FALCON | {"multi_query": True, "parallel_attn": True}),
    "falcon_40b": Family(
        "FalconForCausalLM", "causal", _FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2}
    ),
    "falcon_rw": Family(
        "FalconForCausalLM",
        "causal",
        _FALCON | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "mpt": Family(
        "MptForCausalLM",
        "causal",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "n_layers": 3,
            "n_heads": 4,
            "expansion_ratio": 2,
            "max_seq_len": 32,
            "attn_config": {"alibi": True},
        }
        | _SPECIAL,
    ),
    "codegen": Family("CodeGenForCausalLM", "causal", _GPT2 | {"rotary_dim": 4}),
    "starcoder2": Family("Starcoder2ForCausalLM", "causal", _LLAMA | {"sliding_window": 4, "use_bias": True}),
    "stablelm": Family(
        "StableLmForCausalLM",
        "causal",
        _LLAMA
        | {
            "rope_parameters": _ROPE | {"partial_rotary_factor": 0.25},
            "use_qkv_bias": True,
            "qk_layernorm": True,
            "use_parallel_residual": True,
        },
    ),
    "olmo": Family("OlmoForCausalLM", "causal", _LLAMA | {"clip_qkv": 1.0}),
    "olmo2": Family("Olmo2ForCausalLM", "causal", _LLAMA),
    "cohere": Family("CohereForCausalLM", "causal", _LLAMA | {"logit_scale": 0.25, "use_qk_norm": True}),
    "granite": Family(
        "GraniteForCausalLM",
        "causal",
        _LLAMA
        | {
            "embedding_multiplier": 12.0,
            "logits_scaling": 8.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.2,
        },
    ),
    "glm": Family(
        "GlmForCausalLM",
        "causal",
        _LLAMA | {"head_dim": 8, "attention_bias": True, "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}},
    ),
    "nemotron": Family(
        "NemotronForCausalLM", "causal", _LLAMA | {"rope_parameters": _ROPE | {"partial_rotary_factor": 0.5}}
    ),
    "smollm3": Family("SmolLM3ForCausalLM", "causal", _LLAMA | {"no_rope_layers": [1, 0, 1]}),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "causal",
        _LLAMA
        | {
            "head_dim": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 4,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 2.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 16,
            },
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "xglm": Family(
        "XGLMForCausalLM",
        "causal",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "ffn_dim": 48,
            "num_layers": 3,
            "attention_heads": 4,
            "max_position_embeddings": 32,
        }
        | _SPECIAL,
    ),
    "bert": Family("BertForMaskedLM", "encoder", _BERT),
    "roberta": Family("RobertaForMaskedLM", "encoder", _ROBERTA),
    "distilbert": Family(
        "DistilBertForMaskedLM",
        "encoder",
        {
            "vocab_size": VOCABULARY,
            "dim": 32,
            "hidden_dim": 48,
            "n_layers": 3,
            "n_heads": 4,
            "max_position_embeddings": 32,
            "pad_token_id": 0,
        },
    ),
    "electra": Family("ElectraForMaskedLM", "encoder", _BERT | {"embedding_size": 16}),
    "albert": Family("AlbertForMaskedLM", "encoder", _BERT | {"embedding_size": 16}),
    "deberta-v2": Family(
        "DebertaV2ForMaskedLM",
        "encoder",
        _BERT
        | {
            "type_vocab_size": 0,
            "relative_attention": True,
            "position_buckets": 4,
            "max_relative_positions": -1,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_biased_input": False,
        },
    ),
    "modernbert": Family(
        "ModernBertForMaskedLM",
        "encoder",
        _MULTI_HEAD | {"local_attention": 4, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2},
    ),
    "t5": Family("T5ForConditionalGeneration", "seq2seq", _T5),
    "flan_t5": Family(
        "T5ForConditionalGeneration",
        "seq2seq",
        _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "bart": Family("BartForConditionalGeneration", "seq2seq", _BART),
    "whisper": Family("WhisperForConditionalGeneration", "audio", _WHISPER),
    "vit": Family("ViTForImageClassification", "vision", _VISION | {"num_labels": 5}),
    "clip_text": Family("CLIPTextModel", "text", _CLIP_TEXT),
    "clip_vision": Family("CLIPVisionModel", "vision", _VISION),
    "clip": Family(
        "CLIPModel", "contrastive", {"text_config": _CLIP_TEXT, "vision_config": _VISION, "projection_dim": 24}
    ),
}


def make(name: str, *, eager: bool = False, seed: int = 0) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Build a family's model, in eval mode, and the inputs it is called with.

    Args:
        name: A key of `FAMILIES`.
        eager: Compute attention step by step; otherwise through `scaled_dot_product_attention` where the family
            can. The weights are the same.
        seed: Another seed gives other weights, and the same inputs.
    """
    return build(FAMILIES[name], eager=eager, seed=seed)


def build(family: Family, *, eager: bool = False, seed: int = 0) -> tuple[PreTrainedModel, dict[str, Tensor]]:
    """Build the model of a family that need not be in the table; as `make`."""
    cls = getattr(transformers, family.model)
    config = cls.config_class(**copy.deepcopy(family.settings))
    if eager:
        config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = cls(config).eval()
        _stir(model)
    return model, inputs_of(family.kind)


def inputs_of(kind: Kind) -> dict[str, Tensor]:
    """Return what a model of that kind is called with: no padding, no special tokens."""
    random = torch.Generator().manual_seed(1)
    ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH), generator=random)  # (B, S)
    decoder_ids = torch.randint(5, VOCABULARY, (BATCH, LENGTH - 2), generator=random)  # (B, S')
    sound = torch.randn(BATCH, 8, 16, generator=random)  # (B, mel bins, frames)
    images = torch.randn(BATCH, 3, 8, 8, generator=random)  # (B, channels, height, width)
    match kind:
        case "seq2seq":
            return {"input_ids": ids, "decoder_input_ids": decoder_ids}
        case "audio":
            return {"input_features": sound, "decoder_input_ids": decoder_ids}
        case "vision":
            return {"pixel_values": images}
        case "contrastive":
            return {"input_ids": ids, "pixel_values": images}
        case _:
            return {"input_ids": ids}


def _stir(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter += (0.2 if parameter.ndim > 1 else 0.3) * torch.randn_like(parameter)
        for name, buffer in model.named_buffers():
            if name == "final_logits_bias":
                buffer += torch.randn_like(buffer)
