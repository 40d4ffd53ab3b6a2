"""The `patching` intervention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from typing import ClassVar

import torch
from torch import Tensor

import kamui
from kamui.errors import ReplacementError
from kamui.hooks import Call, EditFunction, HookPoint, Positions, head_indices, take_positions, token_mask


class Patching(kamui.Intervention):
    """Replace the activation at one or several points.

    The replacement is a tensor, such as an activation from another run, or a function of the activation::

        with HookManager(model) as hooks:
            hooks.attach("blocks.3.attn", "output")
            model(clean_ids)
            clean = hooks.get("blocks.3.attn.output")  # (B, S, D)

        with HookManager(model) as hooks:
            hooks.use("patching", at="blocks.3.attn.output", value=clean, positions=-1)
            model(corrupted_ids)

    A tensor has the shape of the activation, of which the chosen positions and heads are taken, or the shape of
    the chosen part alone: (B, ..., n, D) for n positions in the order of the sequence, (B, n, ..., ...) for n
    heads in ascending order. The same holds for what a function returns.

    Attributes:
        at: The point or pattern, or several.
        value: The replacement. A function takes the activation as its first argument, or any of `value`, `point`
            and `call` by name. It gets a copy of the whole activation, which it may write to; None leaves that
            copy in place of the activation.
        positions: Which tokens to replace (-1: the last one of the prompt, in every step of a generation); nothing
            happens in a call that has none of them.
        heads: Which heads to replace at `q`, `k`, `v`, `pre_softmax`, `weights` or `z`.
        broadcast: Repeat a smaller replacement, for example that of one row in every row.
    """

    replaces: ClassVar[bool] = True

    at: str | Sequence[str]
    value: Tensor | Callable[..., Tensor | None]
    positions: Positions = None
    heads: int | Sequence[int] | None = None
    broadcast: bool = False
    _edit: EditFunction | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.value, Tensor):
            self._edit = EditFunction(self.value)

    @kamui.hookimpl
    def points(self) -> str | Sequence[str]:
        """Listen where the user said."""
        return self.at

    @kamui.hookimpl
    def activation(self, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
        """Return the activation with the replacement in it.

        Raises:
            HeadError: The activation does not have these heads.
            PositionError: The positions cannot be known in this call.
            ReplacementError: The replacement has another shape, dtype or device.
        """
        mask = self._chosen(point, value, call)
        if mask is not None and not mask.any():
            return None
        new = self._replacement(point, value, call)
        if new is None:
            return None
        if new.shape != value.shape and mask is not None:
            new = self._spread(new, mask, point, value, call)
        elif new.shape != value.shape:
            new = self._expanded(new, value.shape, point)
        # A copy either way: a module that works in place must not write to the user's tensor.
        return new.clone() if mask is None else torch.where(mask, new, value)

    def _replacement(self, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
        new: object = self.value if self._edit is None else self._edit(point, value, call)
        if new is None:
            return None
        refused = f"intervention {self.label!r} cannot replace the value at point {point!r}"
        if not isinstance(new, Tensor):
            raise ReplacementError(
                f"{refused}: its function returned a {type(new).__name__}, not a tensor of shape {tuple(value.shape)}"
            )
        for name, given, expected in (("dtype", new.dtype, value.dtype), ("device", new.device, value.device)):
            if given != expected:
                raise ReplacementError(
                    f"{refused}: {name} {expected} is expected, the replacement has {given}; convert it with .to(...)"
                )
        return new

    def _chosen(self, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
        """Return a mask of what is replaced that broadcasts against `value`, or None for all of it."""
        tokens = token_mask(self.positions, point, value, call)  # (B, 1, ..., S, 1)
        indices = head_indices(self.heads, point, value)
        if indices is None:
            return tokens
        heads = torch.zeros(1, value.shape[1], 1, 1, dtype=torch.bool, device=value.device)
        heads[:, indices] = True
        return heads if tokens is None else tokens & heads

    def _spread(self, part: Tensor, mask: Tensor, point: HookPoint, value: Tensor, call: Call) -> Tensor:
        """Return a tensor of the activation's shape in which the chosen part is `part`."""
        if self.broadcast and _can_expand(part, value.shape):
            return part.expand(value.shape)
        chosen = take_positions(self.positions, point, value, call)
        shape = list(value.shape if chosen is None else chosen.shape)
        indices = head_indices(self.heads, point, value)
        if indices is not None:
            shape[1] = len(indices)
        part = self._expanded(part, torch.Size(shape), point, value.shape)
        return value.masked_scatter(mask.expand_as(value), part)

    def _expanded(self, new: Tensor, shape: torch.Size, point: HookPoint, or_shape: torch.Size | None = None) -> Tensor:
        if new.shape == shape or (self.broadcast and _can_expand(new, shape)):
            return new.expand(shape)
        expected = str(tuple(shape)) if or_shape is None else f"{tuple(shape)} or {tuple(or_shape)}"
        remedy = "" if self.broadcast else "; broadcast=True repeats a smaller one, where it fits"
        raise ReplacementError(
            f"intervention {self.label!r} cannot replace the value at point {point!r}: shape {expected} is expected, "
            f"the replacement has {tuple(new.shape)}{remedy}"
        )


def _can_expand(new: Tensor, shape: torch.Size) -> bool:
    return new.dim() <= len(shape) and all(
        have in (1, want) for have, want in zip(reversed(new.shape), reversed(shape), strict=False)
    )
