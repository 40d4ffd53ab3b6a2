"""Activation patching sweeps: every layer against every position or head."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from kamui.errors import SweepError
from kamui.hooks import HookManager, HookPoint, HookRegistry, suspended
from kamui_patching.metrics import Metric
from kamui_patching.patching import Patching
from kamui_patching.result import Over, SweepResult

_DEFAULT_POINTS: Final[Mapping[Over, str]] = {"positions": "blocks.*.output", "heads": "blocks.*.attn.z"}
_DIMENSIONS: Final[Mapping[Over, int]] = {"positions": -2, "heads": 1}


class ActivationPatcher:
    """Finds the activations that a behaviour depends on, by patching them one at a time.

    Usage::

        patcher = ActivationPatcher(model.eval())
        result = patcher.sweep(clean_ids, corrupted_ids, metric=logit_difference(right=7, wrong=3))
        print(result)

    Args:
        model: The model. It is run as it is: in training mode, dropout makes the scores random.

    Source: Meng et al. 2022, "Locating and Editing Factual Associations in GPT", section 2.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def sweep(
        self,
        clean: Tensor,
        corrupted: Tensor,
        *,
        metric: Metric,
        at: str | None = None,
        over: Over = "positions",
        batch_size: int = 32,
        progress: bool = True,
    ) -> SweepResult:
        """Run the corrupted input once for each patch, with one activation of the clean run in it.

        The recovery score of a patch is 0 where the metric stays that of the corrupted run and 1 where it
        becomes that of the clean one. Patches at one point share forward passes. Scopes that are open
        meanwhile neither act nor capture.

        Args:
            clean: The input that shows the behaviour, token ids (B, S).
            corrupted: An input of the same shape that does not, with the same positions in each row.
            metric: Takes logits (B, S, V) and gives a number.
            at: A pattern; each point that it stands for is a row of the scores. By default the residual
                stream `"blocks.*.output"`, and `"blocks.*.attn.z"` for heads.
            over: What the columns are: positions of the sequence, or attention heads.
            batch_size: The most rows in one forward pass; at least one patch is always made.
            progress: Show a bar, where there is a terminal.

        Raises:
            SweepError: The inputs differ in shape, the metric does not tell them apart or gives no number, or the
                activations at these points have no such positions or heads.
            UnknownPointError: `at` matches nothing.
        """
        if clean.shape != corrupted.shape:
            raise SweepError(
                f"clean and corrupted inputs differ in shape, {tuple(clean.shape)} and {tuple(corrupted.shape)}; a "
                f"position of one must be the same position of the other"
            )
        if over not in _DIMENSIONS:
            raise SweepError(f"a sweep goes over 'positions' or 'heads', not {over!r}")
        runs = _Runs(self._model, metric, _DIMENSIONS[over])
        with torch.no_grad(), suspended():
            activations, clean_metric = runs.clean(clean, at or _DEFAULT_POINTS[over])
            corrupted_metric = runs.corrupted(corrupted)
            _check_apart(clean_metric, corrupted_metric)
            n_columns = _count_columns(activations, _DIMENSIONS[over], len(clean))
            measured: list[float] = []
            with _bar(len(activations) * n_columns, shown=progress) as advance:
                for point, columns in _passes(activations, n_columns, batch_size // len(clean)):
                    measured += runs.patched(corrupted, point, activations[point], columns)
                    advance(len(columns))
        scores = (torch.tensor(measured, dtype=torch.float64) - corrupted_metric) / (clean_metric - corrupted_metric)
        return SweepResult(
            scores=scores.float().view(len(activations), n_columns),
            points=tuple(activations),
            columns=tuple(range(n_columns)),
            over=over,
            clean=clean_metric,
            corrupted=corrupted_metric,
        )


class _Runs:
    """The forward passes of one sweep, each of which gives the metric."""

    def __init__(self, model: nn.Module, metric: Metric, dim: int) -> None:
        self._model = model
        self._metric = metric
        self._dim = dim

    def clean(self, clean: Tensor, at: str) -> tuple[dict[HookPoint, Tensor], float]:
        """Return the activations of the clean input at every point, and its metric."""
        points = HookRegistry.resolve(self._model, at)
        with HookManager(self._model) as hooks:
            hooks.use("cache", at=points)
            metric = self._measure(_logits(self._model(clean)))
            return {point: hooks.get(point) for point in points}, metric

    def corrupted(self, corrupted: Tensor) -> float:
        """Return the metric of the corrupted input."""
        return self._measure(_logits(self._model(corrupted)))

    def patched(self, corrupted: Tensor, point: HookPoint, clean: Tensor, columns: Sequence[int]) -> list[float]:
        """Return the metric of the corrupted input with each column of one clean activation in turn."""
        copies = corrupted.repeat(len(columns), *(1 for _ in corrupted.shape[1:]))  # (n * B, S)
        edit = partial(_put_columns, clean, columns, self._dim)
        with HookManager(self._model) as hooks:
            hooks.use(Patching, at=point, value=edit)
            logits = _logits(self._model(copies))  # (n * B, S, V)
        return [self._measure(rows) for rows in logits.chunk(len(columns))]

    def _measure(self, logits: Tensor) -> float:
        measured = self._metric(logits)
        if isinstance(measured, Tensor) and measured.dim() != 0:
            raise SweepError(
                f"the metric gave a tensor of shape {tuple(measured.shape)} for logits {tuple(logits.shape)}; it "
                f"gives one number, such as the mean over the rows"
            )
        if not isinstance(measured, Tensor | float | int):
            raise SweepError(f"the metric gave a {type(measured).__name__}, not a number; it takes logits (B, S, V)")
        number = float(measured)
        if not math.isfinite(number):
            raise SweepError(f"the metric gave {number!r} for logits of shape {tuple(logits.shape)}, not a number")
        return number


def _put_columns(clean: Tensor, columns: Sequence[int], dim: int, value: Tensor) -> None:
    """Write column `columns[n]` of the clean activation (B, ...) into the n-th copy of the batch (n * B, ...)."""
    for rows, column in zip(value.chunk(len(columns)), columns, strict=True):
        rows.select(dim, column).copy_(clean.select(dim, column))


def _logits(output: Any) -> Tensor:
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor):
        raise SweepError(f"the model gave a {type(output).__name__}, not logits (B, S, V) or something with logits")
    return logits


def _check_apart(clean: float, corrupted: float) -> None:
    if math.isclose(clean, corrupted, rel_tol=1e-6):
        raise SweepError(
            f"the metric does not tell the inputs apart: it is {clean!r} on the clean and {corrupted!r} on the "
            f"corrupted one, so there is nothing to recover; choose inputs or a metric that differ"
        )


def _count_columns(activations: Mapping[HookPoint, Tensor], dim: int, n_rows: int) -> int:
    """Return how many positions or heads every activation has.

    Raises:
        SweepError: One has none, not the rows of the input, or another number than the first.
    """
    first = next(iter(activations))
    for point, activation in activations.items():
        needs = 4 if dim == 1 else 3
        if activation.dim() < needs or len(activation) != n_rows:
            wanted = "heads (B, H, ..., ...)" if dim == 1 else "positions (B, ..., S, D)"
            raise SweepError(
                f"point {point!r} has no {wanted} to sweep over: its activation has shape {tuple(activation.shape)}, "
                f"the input {n_rows} row(s)"
            )
        if activation.shape[dim] != activations[first].shape[dim]:
            raise SweepError(
                f"points {first!r} and {point!r} differ in what is swept over, {activations[first].shape[dim]} and "
                f"{activation.shape[dim]}; sweep over each by itself"
            )
    return activations[first].shape[dim]


def _passes(points: Iterable[HookPoint], n_columns: int, at_once: int) -> Iterator[tuple[HookPoint, range]]:
    """Return the forward passes to make: a point, and the columns that are patched there side by side."""
    step = max(1, at_once)
    for point in points:
        for start in range(0, n_columns, step):
            yield point, range(start, min(start + step, n_columns))


@contextmanager
def _bar(total: int, *, shown: bool) -> Iterator[Callable[[int], None]]:
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not (shown and console.is_terminal)) as bar:
        task = bar.add_task("patching", total=total)
        yield lambda done: bar.advance(task, done)
