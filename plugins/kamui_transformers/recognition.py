"""Recognising a model of transformers, and writing down how it spells the canonical names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from torch import nn

from kamui import HookPoint
from kamui.hooks import Architecture, Target
from kamui_transformers.blocks import Attention, Block
from kamui_transformers.readout import Readout
from kamui_transformers.stacks import Stack, stacks_of

_CLASSIFIERS: Final = ("classifier", "score", "classification_head")
_MIXTURE: Final = (
    "its feed-forward is a mixture of experts, in which each token goes through matrices of its own; "
    "use 'output', or what is inside by its module path"
)
_SCATTERED: Final = "its feed-forward is no module of its own; only 'mid' and 'output' of it are places"


def recognise(model: nn.Module) -> Architecture | None:
    """Recognise a model of transformers that has a list of blocks with attention."""
    if not _is_of_transformers(model):
        return None
    stacks = stacks_of(model)
    if not stacks:
        return None
    spelling = _Spelling(model)
    for stack in stacks:
        spelling.add(stack)
    return spelling.architecture(stacks[-1])


def _is_of_transformers(model: nn.Module) -> bool:
    bases = {(base.__module__, base.__qualname__) for base in type(model).__mro__}
    return ("transformers.modeling_utils", "PreTrainedModel") in bases


class _Spelling:
    """What is gathered about one model."""

    def __init__(self, model: Any) -> None:
        self._points: dict[HookPoint, Target] = {}
        self._modules: dict[str, str] = {}
        self._calls: dict[str, int] = {}
        self._missing: dict[str, str] = {}
        self._attentions: dict[str, None] = {}
        self._feed_forwards: dict[str, HookPoint] = {}
        self._name = str(model.config.model_type)
        self._embed = _path_of(model, _embeddings(model))
        self._unembed = _unembedding(model)

    def add(self, stack: Stack) -> None:
        """Write down one stack; the main one comes last."""
        prefix = stack.prefix
        self._points[HookPoint(f"{prefix}embed.output")] = Target(HookPoint(f"{stack.blocks[0]}.input"), stack.calls[0])
        if self._embed is not None and prefix in ("", "decoder."):
            self._modules[f"{prefix}embed"] = self._embed
        for index, (path, call, parts) in enumerate(zip(stack.blocks, stack.calls, stack.parts, strict=True)):
            self._add_block(f"{prefix}blocks.{index}", path, call, parts)
        if stack.final_norm is None:
            self._missing[f"{prefix}final_ln"] = "this model has no norm after its last block"
        else:
            self._modules[f"{prefix}final_ln"] = stack.final_norm

    def architecture(self, main: Stack) -> Architecture:
        """Return what was gathered."""
        if self._unembed is None:
            self._missing["unembed"] = "this model has no unembedding; load it with its language-model head"
        else:
            self._points[HookPoint("unembed.input")] = Target(HookPoint.at(self._unembed, "input"))
            self._modules["unembed"] = self._unembed
        return Architecture(
            name=f"transformers:{self._name}",
            points=self._points,
            modules=self._modules,
            attentions=tuple(self._attentions),
            feed_forwards=self._feed_forwards,
            readout=Readout(main.blocks[-1], main.calls[-1], main.final_norm, self._unembed),
            calls=self._calls,
            missing=self._missing,
        )

    def _add_block(self, name: str, path: str, call: int | None, parts: Block) -> None:
        self._add_module(name, path, call)
        self._add_attention(f"{name}.attn", parts.attention, path, call)
        if parts.cross_attention is not None:
            self._add_attention(f"{name}.cross_attn", parts.cross_attention, path, call)
        for io, point in _feed_forward_points(parts):
            self._points[HookPoint(f"{name}.ffn.{io}")] = Target(HookPoint(f"{path}.{point}"), call)
        ffn = parts.feed_forward
        if ffn is None:
            self._missing[f"{name}.ffn"] = "this block has no feed-forward that is recognised"
        elif ffn.path is None:
            self._missing[f"{name}.ffn"] = _SCATTERED
        else:
            self._add_module(f"{name}.ffn", f"{path}.{ffn.path}", call)
        if ffn is not None and ffn.mid is None:
            self._missing[f"{name}.ffn.mid"] = _MIXTURE
        if ffn is not None and ffn.path and ffn.mid:
            self._feed_forwards[f"{path}.{ffn.path}"] = HookPoint(f"{path}.{ffn.mid}")

    def _add_attention(self, name: str, attention: Attention | None, block: str, call: int | None) -> None:
        if attention is None:
            self._missing[name] = "this block computes no attention"
            return
        path = f"{block}.{attention.path}"
        self._attentions[path] = None
        self._add_module(name, path, call)
        for io in ("pre_softmax", "weights"):
            self._points[HookPoint.at(name, io)] = Target(HookPoint.at(path, io), call)
        self._points[HookPoint.at(name, "output")] = Target(HookPoint(f"{block}.{attention.output}"), call)

    def _add_module(self, name: str, path: str, call: int | None) -> None:
        self._modules[name] = path
        if call is not None:
            self._calls[name] = call


def _feed_forward_points(parts: Block) -> Iterator[tuple[str, str]]:
    ffn = parts.feed_forward
    if ffn is not None and ffn.mid is not None:
        yield "mid", ffn.mid
    if ffn is not None:
        yield "output", ffn.output


def _embeddings(model: Any) -> nn.Module | None:
    try:
        found = model.get_input_embeddings()
    except NotImplementedError:  # models of images and sound
        return None
    return found if isinstance(found, nn.Module) else None


def _unembedding(model: Any) -> str | None:
    path = _path_of(model, model.get_output_embeddings())
    if path is not None:
        return path
    return next((name for name in _CLASSIFIERS if isinstance(model._modules.get(name), nn.Linear)), None)


def _path_of(model: nn.Module, wanted: nn.Module | None) -> str | None:
    return next((path for path, module in model.named_modules() if module is wanted), None)
