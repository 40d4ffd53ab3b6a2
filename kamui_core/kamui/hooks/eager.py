"""Attention that a module computes step by step: a product, a softmax and another product."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kamui.hooks.internals import Internals
from kamui.hooks.layout import (
    Layout,
    batch_of,
    before_cast,
    before_repeat,
    before_scaling,
    before_transposition,
)
from kamui.hooks.products import PRODUCTS, Product
from kamui.hooks.scores import Scores, is_over_last, rules_out, scores_behind, split_baddbmm
from kamui.hooks.tape import Tape, Value, is_in_place, name_of, tensors_in, with_tensors

Function = Callable[..., Any]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class EagerAttention:
    """Follows the steps of one running call, and finds attention in them.

    Args:
        internals: Who listens.
        tape: What the call has computed so far.

    Attributes:
        batch: B, where it is joined with the heads and somebody knows it; else it is looked for.
        is_multihead: Whether the steps are those of torch's own multi-head attention, which scales the queries before
            the product when it forms weights, and leaves that to the kernel when not.
    """

    def __init__(self, internals: Internals, tape: Tape) -> None:
        self._internals = internals
        self._tape = tape
        self._from_weights: set[int] = set()
        self._layout = Layout(1)
        self._keys = 0
        self.batch: int | None = None
        self.is_multihead = False
        self._awaits_weights = False

    def softmax(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a softmax; where it normalises the scores of queries and keys, its result is the weights."""
        entering = self._tape.value(args[0] if args else kwargs["input"])
        scores = scores_behind(entering) if is_over_last(args, kwargs, entering.tensor) else None
        if scores is None:
            return self.compute(func, args, kwargs)
        self._internals.claim()
        self._check(scores, entering.tensor)
        given = self._scored(scores, entering)
        changed = with_tensors((args, kwargs), {id(entering.tensor): given})
        weights = func(*changed[0], **changed[1])
        self._awaits_weights = True
        weights = self._weighted(weights)
        step = self._tape.record(func, args, kwargs, weights)
        self._from_weights = set() if step is None else {id(step)}
        return weights

    def compute(self, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make any other call of the module, and note it."""
        name = name_of(func)
        is_derived = self._is_from_weights(args, kwargs)
        product = Product.read(name, args, kwargs) if is_derived else None
        if product is not None:
            return self._mixed(product, func, args, kwargs)
        if is_in_place(name) and isinstance(args[0], Tensor) and self._internals.hears("q", "k", "pre_softmax"):
            self._tape.keep(args[0])
        result = func(*args, **kwargs)
        if is_derived and isinstance(result, Tensor):
            result = self._weighted(result)
        if name == "baddbmm" and self._internals.hears("pre_softmax") and self._record_baddbmm(args, kwargs, result):
            return result
        step = self._tape.record(func, args, kwargs, result)
        if step is not None and is_derived and name not in PRODUCTS:
            self._from_weights.add(id(step))
        return result

    def _check(self, scores: Scores, entering: Tensor) -> None:
        result = scores.step.result
        rows, self._keys = result.shape[-2:]
        as_many = entering.numel() // entering.shape[-1] == result.numel() // self._keys
        if entering.dim() < 3 or entering.shape[-2] != rows or entering.shape[-1] < self._keys or not as_many:
            raise self._internals.refusal(
                f"is not one tensor (B, H, Sq, Sk): its module computes attention in pieces, of shapes "
                f"{tuple(result.shape)} and {tuple(entering.shape)}; use the module's 'output'"
            )

    def _scored(self, scores: Scores, entering: Value) -> Tensor:
        query, query_order, key, key_order = scores.product.as_scores()
        asked = before_cast(self._tape.value(query))
        if self.is_multihead:
            asked = before_scaling(asked)
        is_joined = entering.tensor.dim() == 3
        batch = batch_of(asked if is_joined else entering)
        self._layout = Layout(self.batch if is_joined and self.batch else batch, dtype=asked.tensor.dtype)
        changes: dict[int, Tensor] = {}
        self._offer("q", asked, dataclasses.replace(self._layout, order=query_order), changes)
        if self._internals.hears("k"):
            self._offer("k", *self._keys_before(key, key_order), changes)
        if self._internals.hears("pre_softmax"):
            before = self._tape.replay(scores.before_mask, changes)
            self._offer("pre_softmax", scores.before_mask._replace(tensor=before), self._layout, changes)
        return self._tape.replay(entering, changes) if changes else entering.tensor

    def _keys_before(self, key: Tensor, order: tuple[int, ...]) -> tuple[Value, Layout]:
        value, order = before_transposition(self._tape.value(key), order)
        return before_repeat(before_cast(value), dataclasses.replace(self._layout, order=order))

    def _offer(self, io: str, value: Value, layout: Layout, changes: dict[int, Tensor]) -> None:
        new = self._internals.emit(io, value.tensor, layout)
        if new is not value.tensor:
            changes[value.key] = new

    def _weighted(self, weights: Tensor) -> Tensor:
        """Take the weights where they have a column for each key; sinks are columns more, cut off later."""
        if not self._awaits_weights or weights.shape[-1] != self._keys:
            return weights
        self._awaits_weights = False
        return self._internals.emit("weights", weights, self._layout)

    def _mixed(self, product: Product, func: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        weights_first = self._tape.value(product.left).key in self._from_weights
        values, order, mixture_order = product.as_mixture(weights_first=weights_first)
        self._from_weights.clear()
        if self._internals.hears("v"):
            entering = self._tape.value(values)
            layout = dataclasses.replace(self._layout, order=order, dtype=None)
            changes: dict[int, Tensor] = {}
            self._offer("v", *before_repeat(before_cast(entering), layout), changes)
            new = self._tape.replay(entering, changes)
            args, kwargs = with_tensors((args, kwargs), {id(values): new})
        mixture = func(*args, **kwargs)
        layout = dataclasses.replace(self._layout, order=mixture_order, dtype=None)
        mixture = self._internals.emit("z", mixture, layout)
        self._tape.record(func, args, kwargs, mixture)
        return mixture

    def _is_from_weights(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return bool(self._from_weights) and any(
            self._tape.value(tensor).key in self._from_weights for tensor in tensors_in(args, kwargs)
        )

    def _record_baddbmm(self, args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> bool:
        """Note a product that adds the mask as two steps, so that the scores before the mask are one of them."""
        addend, left, right, beta, alpha = split_baddbmm(args, kwargs)
        if beta == 0 or not rules_out(addend):
            return False
        scores = torch.baddbmm(addend, left, right, beta=0, alpha=alpha)
        self._tape.record(torch.baddbmm, (addend, left, right), {"beta": 0, "alpha": alpha}, scores)
        self._tape.record(torch.add, (scores, addend), {"alpha": beta}, result)
        return True
