"""The scores behind a softmax: followed backwards from what it is given to the product of queries and keys."""

from __future__ import annotations

import math
from typing import Any, Final, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from kamui.hooks.layout import CASTS
from kamui.hooks.products import PRODUCTS, Product
from kamui.hooks.tape import Step, Value

SOFTMAXES: Final = frozenset({F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax})

_FILLS: Final = frozenset({"masked_fill", "masked_fill_", "where", "__setitem__", "index_put_"})
_SUMS: Final = frozenset({"add", "add_", "__add__", "__radd__"})
_DIFFERENCES: Final = frozenset({"sub", "sub_", "__sub__"})
_BARRIERS: Final = frozenset(
    {
        "linear",
        "addmm",
        "embedding",
        "conv1d",
        "conv2d",
        "layer_norm",
        "rms_norm",
        "group_norm",
        "batch_norm",
        "softmax",
        "scaled_dot_product_attention",
    }
)


class Link(NamedTuple):
    """One step on the way from the product to the softmax, and the scores that it was given."""

    step: Step
    scores: Value


class Scores(NamedTuple):
    """How a softmax's input was made.

    Attributes:
        step: The step that multiplied queries and keys.
        product: That product.
        before_mask: The scores just before the mask.
    """

    step: Step
    product: Product
    before_mask: Value


def scores_behind(entering: Value) -> Scores | None:
    """Follow a softmax's input back; None where it does not come from a product of two activations."""
    found = _way_to_product(entering)
    if found is None:
        return None
    step, product, links = found
    if not product.may_be_scores:
        return None
    return Scores(step, product, _before_mask(entering, Value(step.result, step), links))


def _way_to_product(entering: Value) -> tuple[Step, Product, list[Link]] | None:
    waiting: list[tuple[Value, tuple[Link, ...]]] = [(entering, ())]
    seen: set[int] = set()
    while waiting:
        value, links = waiting.pop()
        step = value.step
        if step is None or value.key in seen or step.name in _BARRIERS:
            continue
        seen.add(value.key)
        product = Product.read(step.name, step.args, step.kwargs)
        if product is not None:
            return step, product, list(links)
        if step.name not in PRODUCTS:
            waiting += [(before, (*links, Link(step, before))) for before in reversed(step.inputs)]
    return None


def _before_mask(entering: Value, product: Value, links: list[Link]) -> Value:
    """Return the scores before the last mask; links are in order from the softmax back."""
    masks = [index for index, link in enumerate(links) if _is_mask(*link)]
    if not masks:
        return next((link.scores for link in reversed(links) if link.step.name in ("cat", "concat")), entering)
    first = last = masks[0]
    while last + 1 < len(links) and links[last + 1].step.name in _FILLS | CASTS:
        last += 1
        if links[last].step.name in _FILLS:
            first = last
    return links[first].scores


def _is_mask(step: Step, scores: Value) -> bool:
    if step.name in _FILLS:
        return True
    others = [value.tensor for value in step.inputs if value.tensor is not scores.tensor]
    if not others or step.name not in _SUMS | _DIFFERENCES:
        return False
    return _forbids(others[0], scores.tensor, sign=1 if step.name in _SUMS else -1)


def _forbids(addend: Tensor, scores: Tensor, *, sign: int) -> bool:
    """Tell a mask from a position bias: it is the same for every head, or it rules something out."""
    is_for_each_head = addend.dim() >= 3 and addend.shape[-3] > 1
    if sign > 0 and not is_for_each_head and scores.dim() > 3:
        return True
    return rules_out(addend * sign)


def rules_out(addend: Tensor) -> bool:
    """Tell whether adding this to scores rules some keys out; it has to be read for that."""
    if not addend.is_floating_point() or isinstance(addend, FakeTensor):
        return addend.is_floating_point()
    return bool((addend <= max(-1e9, torch.finfo(addend.dtype).min / 2)).any())


def split_baddbmm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor, float, float]:
    """Return the addend, both factors, beta and alpha of a call of `baddbmm`."""
    bound = dict(zip(("input", "batch1", "batch2"), args, strict=False)) | kwargs
    return bound["input"], bound["batch1"], bound["batch2"], bound.get("beta", 1), bound.get("alpha", 1)


def is_over_last(args: tuple[Any, ...], kwargs: dict[str, Any], scores: Tensor) -> bool:
    """Tell whether a softmax is over the last dimension."""
    dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
    return dim in (-1, scores.dim() - 1) and math.prod(scores.shape) > 0
