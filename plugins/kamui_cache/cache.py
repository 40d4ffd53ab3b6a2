"""The `cache` intervention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Literal

import torch
from torch import Tensor

import kamui
from kamui.hooks import Call, Captures, HookPoint, Positions, head_indices, take_positions


class Cache(kamui.Intervention):
    """Keep the activations at one or several points, to be read with the scope's `get`.

    What is kept is a copy of the chosen positions and heads alone, without a graph: nothing that happens later
    reaches it, it keeps neither the model's tensor nor its inputs alive, and it can be used everywhere, also when
    it was captured under `torch.inference_mode`.

    Attributes:
        at: The point or pattern, or several.
        positions: Which tokens to keep (-1: the last one of the prompt, in every step of a generation); their
            dimension stays, (B, ..., n, D). Where none of them is in a call, nothing of it is kept.
        heads: Which heads to keep at `q`, `k`, `v`, `pre_softmax`, `weights` or `z`; their dimension stays,
            (B, n, ..., ...), in ascending order.
        device: Where to keep the values; None where they are.
        dtype: The dtype to keep them in; None for their own.
        keep: `"last"` keeps the latest forward pass alone.
        copy: False hands out the model's own tensor, as long as nothing has written to it. What is chosen by
            positions or heads, or goes to another device or dtype, is a copy all the same.
        raw: Keep what the module gave, before any intervention; otherwise what the model went on with.
        detach: False keeps the graph, so that a loss on the captured value reaches the model. With `copy=False`
            as well, `retain_grad` on it gives the gradient of what the model computed from there.
        captures: What was captured in the scope that the instance is in, or was in last.
    """

    at: str | Sequence[str]
    positions: Positions = None
    heads: int | Sequence[int] | None = None
    device: str | torch.device | None = None
    dtype: torch.dtype | None = None
    keep: Literal["all", "last"] = "all"
    copy: bool = True
    raw: bool = False
    detach: bool = True
    captures: Captures = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.captures = Captures(self.keep)
        if self.device is not None:
            self.device = torch.device(self.device)

    @kamui.hookimpl
    def opened(self) -> None:
        """Start empty."""
        self.captures = Captures(self.keep)

    @kamui.hookimpl
    def points(self) -> str | Sequence[str]:
        """Listen where the user said."""
        return self.at

    @kamui.hookimpl(trylast=True)
    def activation(self, point: HookPoint, value: Tensor, call: Call) -> None:
        """Keep the value.

        Raises:
            HeadError: The value does not have these heads.
            NotCapturedError: `copy=False` under `torch.inference_mode`.
            PositionError: The positions cannot be known in this call, or differ in number between rows.
        """
        passing = call.original if self.raw and call.original is not None else value
        if not torch.is_inference_mode_enabled():
            self._keep(point, passing.detach() if self.detach else passing, call)
            return
        with torch.inference_mode(mode=False):  # what is made here is a normal tensor
            self._keep(point, passing.detach(), call)

    def _keep(self, point: HookPoint, passing: Tensor, call: Call) -> None:
        chosen = take_positions(self.positions, point, passing, call)
        if chosen is None:
            return
        heads = head_indices(self.heads, point, chosen)
        if heads is not None:
            chosen = chosen[:, heads]  # (B, n, ..., ...)
        kept = chosen.to(device=self.device, dtype=self.dtype, copy=self.copy and chosen is passing)
        self.captures.add(point, kept, call, live=kept is passing)
