"""Timing of two rivals that take turns, and how the rows are shown."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch


class Comparison(NamedTuple):
    """One row: how long each way takes, in seconds, and the ratio that is to stay under `limit`."""

    work: str
    by_hand: float
    kamui: float
    limit: float

    @property
    def ratio(self) -> float:
        """KAMUI's median over that of the work done by hand."""
        return self.kamui / self.by_hand


def in_turns(first: Callable[[], object], second: Callable[[], object], rounds: int) -> tuple[float, float]:
    """Return the median seconds of two rivals that take turns."""
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(rounds + 3):
        for rival, spent in zip((first, second), times, strict=True):
            start = time.perf_counter()
            rival()
            if round_number >= 3:
                spent.append(time.perf_counter() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def show(rows: Iterable[Comparison]) -> None:
    """Print the ratios."""
    print(f"torch {torch.__version__}, Python {platform.python_version()}, one thread, medians")
    for row in rows:
        aim = "" if row.limit == float("inf") else f"  (aim: at most {row.limit})"
        print(f"{row.work}: {row.by_hand * 1e6:.0f} µs -> {row.kamui * 1e6:.0f} µs, ratio {row.ratio:.3f}{aim}")
