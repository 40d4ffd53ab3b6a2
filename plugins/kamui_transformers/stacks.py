"""The stacks of a model: its lists of blocks, what they are called, and what surrounds them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from torch import nn

from kamui_transformers.blocks import Block, parts_of
from kamui_transformers.shapes import attentions_in, is_norm

_FINAL_NORM: Final = re.compile(r"^(?!.*(emb|pre_|rel_|vocab))[a-z0-9_]*(norm|ln)[a-z0-9_]*$")


@dataclass(frozen=True)
class Stack:
    """A list of blocks.

    Attributes:
        prefix: What stands before `blocks.N`, with its dot; empty for the only or the main stack.
        blocks: The path of each block; one block that is called many times stands here as often.
        calls: Which call of its module each block is; None where each block is a module of its own.
        parts: The parts of each block.
        final_norm: The path of the norm after the last block, if there is one.
    """

    prefix: str
    blocks: tuple[str, ...]
    calls: tuple[int | None, ...]
    parts: tuple[Block, ...]
    final_norm: str | None


def stacks_of(model: nn.Module) -> list[Stack]:
    """Return the stacks of a model, the main one last; none where it has no list of blocks with attention."""
    lists = dict(_block_lists(model))
    if not lists:
        return []
    prefixes = _prefixes(model, list(lists))
    stacks = [_stack(model, prefixes[path], path, blocks) for path, blocks in lists.items()]
    return sorted(stacks, key=lambda stack: stack.prefix in ("", "decoder."))


def _stack(model: nn.Module, prefix: str, path: str, blocks: list[str]) -> Stack:
    parts = [parts_of(model.get_submodule(block)) for block in blocks]
    calls: list[int | None] = [None] * len(blocks)
    times = _configured_layers(model)
    if len(blocks) == 1 and times > 1 and not prefix:
        blocks, parts, calls = blocks * times, parts * times, list(range(times))
    return Stack(prefix, tuple(blocks), tuple(calls), tuple(parts), _final_norm(model, path))


def _block_lists(model: nn.Module) -> Iterator[tuple[str, list[str]]]:
    found: list[str] = []
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList) or any(path.startswith(f"{outer}.") for outer in found):
            continue
        if any(map(attentions_in, module)) and not any(map(_holds_blocks, module)):
            found.append(path)
            yield path, [f"{path}.{index}" for index in range(len(module))]


def _holds_blocks(module: nn.Module) -> bool:
    """Tell whether whole blocks, with attention and feed-forward, lie in a list inside of `module`."""
    inner = (each for each in module.modules() if isinstance(each, nn.ModuleList))
    parts = (parts_of(block) for each in inner for block in each)
    return any(part.attention and part.feed_forward for part in parts)


def _prefixes(model: nn.Module, lists: list[str]) -> dict[str, str]:
    if len(lists) == 1:
        return {lists[0]: ""}
    sides = {path: [side for side in ("encoder", "decoder") if side in path.split(".")] for path in lists}
    if sorted(sides.values()) == [["decoder"], ["encoder"]]:
        return {path: f"{side[0]}." for path, side in sides.items()}
    main = _main(model, lists)
    return {path: "" if path == main else f"{_tower(path, lists)}." for path in lists}


def _main(model: Any, lists: list[str]) -> str | None:
    """Return the list that the model's unembedding reads, where it has one."""
    if model.get_output_embeddings() is None:
        return None
    embeddings = model.get_input_embeddings()
    paths = [path for path, module in model.named_modules() if module is embeddings]
    return max(lists, key=lambda each: max(len(_shared(each, path)) for path in paths)) if paths else None


def _tower(path: str, lists: list[str]) -> str:
    """Return the first segment that tells a list from all the others."""
    deepest = max(len(_shared(path, other)) for other in lists if other != path)
    return path.split(".")[deepest]


def _shared(one: str, other: str) -> list[str]:
    shared = []
    for left, right in zip(one.split("."), other.split("."), strict=False):
        if left != right:
            break
        shared.append(left)
    return shared


def _configured_layers(model: Any) -> int:
    layers = getattr(model.config.get_text_config(), "num_hidden_layers", 0)
    return layers if isinstance(layers, int) else 0


def _final_norm(model: nn.Module, path: str) -> str | None:
    """Return the norm that stands beside the list of blocks, or beside the module that holds it."""
    while path:
        path = path.rpartition(".")[0]
        around = model.get_submodule(path)
        norms = [name for name, child in around.named_children() if is_norm(child) and _FINAL_NORM.match(name)]
        if norms:
            return f"{path}.{norms[-1]}" if path else norms[-1]
    return None
