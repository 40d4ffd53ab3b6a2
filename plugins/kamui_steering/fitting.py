"""Steering vectors as a difference of means.

Source: Rimsky et al. 2023, "Steering Llama 2 via Contrastive Activation Addition".
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kamui import HookManager, HookPoint, Intervention, hookimpl
from kamui.errors import NotCapturedError, OptionError, ReplacementError
from kamui.hooks import Call, suspended, take_positions, token_mask

Inputs = Tensor | Mapping[str, Any] | Sequence[Tensor | Mapping[str, Any]]


class Summaries(Intervention):
    """Reduce every value at some points to one vector for each input."""

    at: Sequence[HookPoint]
    over: Literal["last", "mean"]
    rows: dict[HookPoint, list[Tensor]] = field(init=False, default_factory=dict)

    @hookimpl
    def points(self) -> Sequence[HookPoint]:
        """Listen where the vector will be added."""
        return self.at

    @hookimpl
    def activation(self, point: HookPoint, value: Tensor, call: Call) -> None:
        """Keep one vector (D,) for each input of the batch."""
        precise = value.to(torch.promote_types(value.dtype, torch.float32))
        if value.dim() > 2 and self.over == "last":
            chosen = take_positions("last", point, precise, call)  # (B, ..., 1, D)
            assert chosen is not None
            precise = chosen.flatten(1, -2).mean(1)  # (B, D)
        elif value.dim() > 2:
            mask = token_mask(slice(None), point, precise, call)
            assert mask is not None
            mask = mask.expand_as(precise).flatten(1, -2)
            precise = (precise.flatten(1, -2) * mask).sum(1) / mask.sum(1)  # (B, D)
        self.rows.setdefault(point, []).append(precise.reshape(-1, value.shape[-1]))

    def mean_at(self, point: HookPoint) -> Tensor:
        """Return the mean of all inputs at one point, (D,).

        Raises:
            NotCapturedError: The point was not reached.
            ReplacementError: The inputs gave values of several widths.
        """
        rows = self.rows.get(point)
        if not rows:
            raise NotCapturedError(f"no vector can be fitted at point {str(point)!r}: the inputs never reached it")
        widths = sorted({part.shape[-1] for part in rows})
        if len(widths) > 1:
            raise ReplacementError(
                f"no vector can be fitted at point {str(point)!r}: its width differs between inputs ({widths}); "
                f"fit at a point whose width does not depend on the sequence"
            )
        return torch.cat(rows).mean(0)  # (D,)


def difference_of_means(
    model: nn.Module,
    points: Sequence[HookPoint],
    positive: Inputs,
    negative: Inputs,
    over: Literal["last", "mean"],
) -> dict[str, Tensor]:
    """Return the mean activation of `positive` minus that of `negative` at each point, (D,).

    Raises:
        OptionError: There are no inputs, or they are of another type.
        NotCapturedError: A point was not reached.
    """
    if over not in ("last", "mean"):
        raise OptionError(f"fit takes over='last' or over='mean', not {over!r}")
    sides = [list(_calls(inputs, side)) for side, inputs in (("positive", positive), ("negative", negative))]
    with suspended(), torch.inference_mode(mode=False), torch.no_grad():
        towards, away = (_means(model, points, calls, over) for calls in sides)
        return {str(point): towards[point] - away[point] for point in points}


def _means(
    model: nn.Module,
    points: Sequence[HookPoint],
    calls: Sequence[tuple[tuple[Any, ...], Mapping[str, Any]]],
    over: Literal["last", "mean"],
) -> dict[HookPoint, Tensor]:
    with HookManager(model) as hooks:
        summaries = Summaries(at=points, over=over)
        hooks.use(summaries)
        for args, kwargs in calls:
            model(*args, **kwargs)
        return {point: summaries.mean_at(point) for point in points}


def _calls(inputs: Inputs, side: str) -> Iterator[tuple[tuple[Any, ...], Mapping[str, Any]]]:
    """Yield the arguments of each call of the model."""
    each: Sequence[Any] = [inputs] if isinstance(inputs, Tensor | Mapping) else inputs
    if not isinstance(each, Sequence) or isinstance(each, str) or not each:
        given = "none" if isinstance(each, Sequence) and not each else repr(each)
        raise OptionError(f"fit needs {side} inputs: token ids, keyword arguments or a sequence of them, not {given}")
    for one in each:
        if isinstance(one, Mapping):
            yield (), one
        elif isinstance(one, Tensor) and one.numel():
            is_one_sequence = one.dim() == 1 and not one.is_floating_point()
            yield ((one[None] if is_one_sequence else one),), {}
        else:
            given = "an empty tensor" if isinstance(one, Tensor) else f"a {type(one).__name__}"
            raise OptionError(f"fit takes tensors or mappings of keyword arguments as {side} inputs, not {given}")
