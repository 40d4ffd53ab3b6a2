"""Layouts: how what attention computes with is shown as (B, H, S, Dh), and put back as the module lays it out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from kamui.hooks.tape import Step, Value

CASTS: Final = frozenset({"to", "float", "type", "type_as", "half", "bfloat16", "double"})

_TRANSPOSITIONS: Final = frozenset({"transpose", "permute", "mT", "T", "swapaxes", "swapdims", "movedim", "mH"})
_COPIES: Final = frozenset({"contiguous", "clone"})
_SCALINGS: Final = frozenset({"mul", "div", "true_divide"})
_REPEATS: Final = frozenset({"expand", "expand_as", "broadcast_to", "repeat", "repeat_interleave"})
_SAME_ELEMENTS: Final = (
    frozenset({"reshape", "view", "flatten", "unflatten", "unsqueeze", "squeeze", "__getitem__"})
    | _TRANSPOSITIONS
    | _COPIES
    | CASTS
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The way from a tensor in a module to (B, H, S, Dh) or (B, H, Sq, Sk), and back.

    Attributes:
        batch: B.
        order: The order of the tensor's dimensions that gives (..., S, Dh).
        rows: S, where heads lie among the rows.
        dtype: The dtype in which it is shown; the tensor's own when None.
    """

    batch: int
    order: tuple[int, ...] = ()
    rows: int | None = None
    dtype: torch.dtype | None = None

    def show(self, tensor: Tensor) -> Tensor:
        """Return (B, H, S, Dh): the tensor itself where it is laid out so."""
        tensor = self._permuted(tensor)
        if tensor.dim() != 4 or self.rows is not None:
            batch = self.batch if math.prod(tensor.shape[:-2]) % self.batch == 0 else 1
            rows = tensor.shape[-2] if self.rows is None else self.rows
            tensor = tensor.reshape(batch, -1, rows, tensor.shape[-1])
        return tensor if self.dtype is None else tensor.to(self.dtype)

    def put_back(self, shown: Tensor, like: Tensor) -> Tensor:
        """Return what was shown in the layout, strides and dtype of `like`: the module may go on with a view."""
        tensor = shown.to(like.dtype).reshape(self._permuted(like).shape)
        if self._is_permuted():
            tensor = tensor.permute([self.order.index(dim) for dim in range(len(self.order))])
        return tensor if tensor.stride() == like.stride() else torch.empty_like(like).copy_(tensor)

    def _is_permuted(self) -> bool:
        return self.order != tuple(range(len(self.order)))

    def _permuted(self, tensor: Tensor) -> Tensor:
        return tensor.permute(self.order) if self._is_permuted() else tensor


def batch_of(query: Value) -> int:
    """Return B of queries (..., H, S, Dh); where B and H are one dimension, of what they were before."""
    shape = query.tensor.shape
    if len(shape) != 3:
        return math.prod(shape[:-3])
    for value in _same_elements(query):
        earlier = value.tensor.shape
        if len(earlier) == 4 and earlier[2:] == shape[1:] and earlier[0] * earlier[1] == shape[0]:
            return earlier[0]
    return shape[0]


def packed_rows(query: Value) -> int | None:
    """Return 1 where the one query of each head was laid among the rows of its key head, as for grouped decoding."""
    step, shape = query.step, query.tensor.shape
    if step is None or step.name not in ("reshape", "view") or len(shape) != 4:
        return None
    before = step.inputs[0].tensor.shape
    packed = len(before) == 4 and before[2] == 1 and shape[2] > 1 and before[1] == shape[1] * shape[2]
    return 1 if packed else None


def before_cast(value: Value) -> Value:
    """Return what a value was before its dtype was changed."""
    while value.step is not None and value.step.name in CASTS:
        value = value.step.inputs[0]
    return value


def before_scaling(value: Value) -> Value:
    """Return what a value was before it was multiplied or divided by one number."""
    while value.step is not None and _scales(value.step):
        value = value.step.inputs[0]
    return value


def before_transposition(value: Value, order: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """Return what was transposed, and perhaps scaled, to enter a product, where `order` would undo just that."""
    current = value
    while current.step is not None and (current.step.name in CASTS | _COPIES or _scales(current.step)):
        current = current.step.inputs[0]
    step = current.step
    if step is not None and step.name in _TRANSPOSITIONS:
        before, undone = step.inputs[0], current.tensor.permute(order)
        if before.tensor.shape == undone.shape and before.tensor.stride() == undone.stride():
            return before, tuple(range(len(order)))
    return value, order


def before_repeat(value: Value, layout: Layout) -> tuple[Value, Layout]:
    """Return keys or values as they were before their heads were repeated, and their layout."""
    _, heads, rows, width = layout.show(value.tensor).shape
    best = value, layout
    for earlier in _same_elements(value, through=_REPEATS):
        shape = earlier.tensor.shape
        if len(shape) != 4 or shape[0] != layout.batch or shape[3] != width:
            continue
        for order, count, length in (((), shape[1], shape[2]), ((0, 2, 1, 3), shape[2], shape[1])):
            if length == rows and count < heads and heads % count == 0:
                best, heads = (earlier, dataclasses.replace(layout, order=order)), count
                break
    return best


def _same_elements(value: Value, through: frozenset[str] = frozenset()) -> Iterator[Value]:
    """Yield what a value was before it was laid out anew, nearest first."""
    while value.step is not None and value.step.name in _SAME_ELEMENTS | through:
        before = value.step.inputs[0]
        if value.step.name not in through and before.tensor.numel() != value.tensor.numel():
            return
        value = before
        yield value


def _scales(step: Step) -> bool:
    return step.name in _SCALINGS and all(value.tensor.dim() == 0 for value in step.inputs[1:])
