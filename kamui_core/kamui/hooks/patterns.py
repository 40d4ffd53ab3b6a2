"""Patterns: one string for many names.

`*` stands for any characters within one segment, `-1` for the last numbered child, `2:5` for a range of
numbered children. A segment that exists as written is never a pattern.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

_SIGNS: Final = re.compile(r"[*:-]")
_SLICE: Final = re.compile(r"(-?[0-9]{1,9})?:(-?[0-9]{1,9})?(?::(-?[0-9]{1,9}))?")
_NEGATIVE: Final = re.compile(r"-[1-9][0-9]{0,8}")

Tree = dict[str, "Tree"]
_IS_NAME: Final = ""


def is_pattern(text: str) -> bool:
    """Tell whether any segment of `text` could stand for something else than itself."""
    return _SIGNS.search(text) is not None and any(
        "*" in segment or _NEGATIVE.fullmatch(segment) or _SLICE.fullmatch(segment) for segment in text.split(".")
    )


def tree_of(names: Iterable[str]) -> Tree:
    """Arrange dotted names as nested dictionaries, in their order."""
    root: Tree = {}
    for name in names:
        node = root
        for segment in name.split("."):
            node = node.setdefault(segment, {})
        node[_IS_NAME] = {}
    return root


def expand(pattern: str, names: Tree) -> list[str]:
    """Return the names that `pattern` stands for, in the order of the tree."""
    return [".".join(path) for path in _walk(pattern.split("."), names, ())]


def matches(pattern: str, segment: str) -> bool:
    """Tell whether one segment fits a pattern in which only `*` is special, in linear time."""
    first, *middle = pattern.split("*")
    if not middle:
        return pattern == segment
    last = middle.pop()
    if len(segment) < len(first) + len(last) or not segment.startswith(first) or not segment.endswith(last):
        return False
    start, end = len(first), len(segment) - len(last)
    for piece in middle:
        found = segment.find(piece, start, end)
        if found < 0:
            return False
        start = found + len(piece)
    return True


def _walk(segments: list[str], node: Tree, path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if not segments:
        if _IS_NAME in node:
            yield path
        return
    head, *rest = segments
    for child in _children(head, node):
        yield from _walk(rest, node[child], (*path, child))


def _children(segment: str, node: Tree) -> list[str]:
    if segment and segment in node:
        return [segment]
    if "*" in segment:
        return [child for child in node if child and matches(segment, child)]
    numbered = sorted((child for child in node if child.isdecimal()), key=int)
    if _NEGATIVE.fullmatch(segment):
        index = int(segment)
        return [numbered[index]] if len(numbered) >= -index else []
    ranged = _SLICE.fullmatch(segment)
    if ranged is None:
        return []
    start, stop, step = (int(part) if part else None for part in ranged.groups())
    return [] if step == 0 else numbered[start:stop:step]
