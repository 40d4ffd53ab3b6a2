"""Where each family computes attention, and what is known about it without us."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from families.zoo import FAMILIES, make
from families.zoo import inputs_of as inputs_of_kind

IOS = ("q", "k", "v", "pre_softmax", "weights", "z")
WITH_TOKENS = [name for name, family in FAMILIES.items() if family.kind not in ("vision", "audio")]
_OUTPUT_PROJECTIONS = ("c_proj", "out_proj", "dense", "o_proj", "out_lin", "Wo", "o")


@cache
def built(name: str, *, eager: bool) -> PreTrainedModel:
    """Return the family's model, the same one every time: nothing that a test does to it may stay."""
    return make(name, eager=eager)[0]


BOTH_IMPLEMENTATIONS = [name for name in FAMILIES if built(name, eager=False).config._attn_implementation == "sdpa"]


def inputs_of(name: str, *, padded: bool = False) -> dict[str, Tensor]:
    """Return what the family is called with; padded, the second row begins with three pads."""
    inputs = inputs_of_kind(FAMILIES[name].kind)
    if padded:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
        inputs["attention_mask"][1, :3] = 0
    return inputs


def attentions(model: nn.Module) -> list[str]:
    """Return the paths of the innermost modules that call themselves attention."""
    paths = [path for path, module in model.named_modules() if "Attention" in type(module).__name__]
    return [path for path in paths if not any(other.startswith(path + ".") for other in paths)]


def points(model: nn.Module, *ios: str) -> list[str]:
    """Return those points of every attention module."""
    return [f"{path}.{io}" for path in attentions(model) for io in ios]


@cache
def expected_weights(name: str, *, padded: bool) -> dict[str, Tensor]:
    """Return the weights that the eager model hands out, by the key under which they are captured."""
    model = built(name, eager=True)
    given = {"use_cache": False} if hasattr(model.config, "use_cache") else {}
    with torch.no_grad():
        output = model(**inputs_of(name, padded=padded), output_attentions=True, **given)
    if name == "albert":
        (path,) = attentions(model)
        return {f"{path}.weights#{call}": weights for call, weights in enumerate(output.attentions)}
    queues = {key: list(output[key]) for key in output if key.endswith("attentions")}
    return {f"{path}.weights": queues[_field(path, output)].pop(0) for path in attentions(model)}


def real_rows(value: Tensor, inputs: Mapping[str, Tensor]) -> Tensor:
    """Return `value`, (B, H, S, ...), with 0 where S is padding."""
    mask = inputs.get("attention_mask")
    return value if mask is None or mask.shape[1] != value.shape[2] else value * mask[:, None, :, None]


def tensors(value: Any) -> list[Tensor]:
    """Return the tensors of a model's output."""
    if isinstance(value, Tensor):
        return [value]
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple | list) else ()
    return [tensor for child in children for tensor in tensors(child)]


def output_projection(model: PreTrainedModel, path: str) -> nn.Module:
    """Return the module that takes the joined heads."""
    attention = model.get_submodule(path)
    own = [module for name in _OUTPUT_PROJECTIONS if (module := getattr(attention, name, None)) is not None]
    return own[0] if own else model.get_submodule(path.rpartition(".")[0]).output.dense  # type: ignore[union-attr]


def _field(path: str, output: Mapping[str, Any]) -> str:
    if "attentions" in output:
        return "attentions"
    if "encoder_attn" in path or "EncDecAttention" in path:
        return "cross_attentions"
    return "decoder_attentions" if "decoder." in path else "encoder_attentions"
