"""What a sweep found."""

from __future__ import annotations

import dataclasses
from io import StringIO
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from kamui.hooks import HookPoint

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.figure import Figure

Over = Literal["positions", "heads"]

_MOST_COLUMNS: Final = 8


class Cell(NamedTuple):
    """One patch of a sweep and its recovery score."""

    point: HookPoint
    column: int
    score: float


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """The recovery scores of a sweep: 0 where a patch changes nothing, 1 where it brings the clean metric back.

    Attributes:
        scores: The scores, (points, columns).
        points: What was patched, one point for each row.
        columns: The positions or heads that were patched.
        over: Whether the columns are positions or heads.
        clean: The metric of the clean run.
        corrupted: The metric of the corrupted run.
    """

    scores: Tensor
    points: tuple[HookPoint, ...]
    columns: tuple[int, ...]
    over: Over
    clean: float
    corrupted: float

    def best(self, k: int = 5) -> list[Cell]:
        """Return the k patches that recover most, best first."""
        found = self.scores.flatten().topk(min(k, self.scores.numel()))
        places = [divmod(index, len(self.columns)) for index in found.indices.tolist()]
        return [
            Cell(self.points[row], self.columns[column], score)
            for (row, column), score in zip(places, found.values.tolist(), strict=True)
        ]

    def plot(self, path: str | Path | None = None, *, labels: Sequence[str] | None = None) -> Figure:
        """Draw the scores as a heat map.

        Args:
            path: Where to save the picture, in the format that its ending says.
            labels: What to write below the columns, such as the tokens, instead of their numbers.

        Returns:
            The figure.

        Raises:
            MissingExtraError: matplotlib is not installed.
        """
        from kamui_patching.heatmap import draw

        return draw(self, path, labels)

    def __repr__(self) -> str:
        best = self.best(1)[0]
        return (
            f"SweepResult({len(self.points)} points x {len(self.columns)} {self.over}, best {best.score:.3f} at "
            f"{best.point!r}, {self.over.removesuffix('s')} {best.column})"
        )

    def __str__(self) -> str:
        text = StringIO()
        Console(file=text, width=160, color_system=None).print(self._table(box.ASCII))
        return "\n".join(line.rstrip() for line in text.getvalue().rstrip().splitlines())

    def __rich__(self) -> Table:
        return self._table(box.SIMPLE_HEAD)

    def _table(self, lines: box.Box) -> Table:
        shown = self._columns_to_show()
        caption = f"metric: clean {self.clean:.4g}, corrupted {self.corrupted:.4g}"
        if len(shown) < len(self.columns):
            caption += f"; {len(shown)} of {len(self.columns)} {self.over}, those with the highest scores"
        table = Table(
            title=f"recovery by point and {self.over.removesuffix('s')}",
            caption=caption,
            box=lines,
            collapse_padding=True,
        )
        table.add_column("point", no_wrap=True)
        for column in shown:
            table.add_column(str(self.columns[column]), justify="right", no_wrap=True)
        for point, scores in zip(self.points, self.scores.tolist(), strict=True):
            table.add_row(str(point), *(f"{round(scores[column], 2) + 0.0:.2f}" for column in shown))
        return table

    def _columns_to_show(self) -> list[int]:
        highest = self.scores.amax(0)
        chosen: list[int] = highest.topk(min(_MOST_COLUMNS, len(self.columns))).indices.tolist()
        return sorted(chosen)
