"""The scores of a sweep as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kamui.errors import MissingExtraError, SweepError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from kamui_patching.result import SweepResult


def draw(result: SweepResult, path: str | Path | None, labels: Sequence[str] | None) -> Figure:
    """Draw a heat map of points against positions or heads, and save it if a path is given.

    Raises:
        MissingExtraError: matplotlib is not installed.
        SweepError: There are more or fewer labels than columns.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingExtraError(
            "plot needs matplotlib, which is not installed; install it with: pip install 'kamui-core[viz]'"
        ) from error
    names = [str(column) for column in result.columns] if labels is None else list(labels)
    if len(names) != len(result.columns):
        raise SweepError(f"{len(names)} labels were given for {len(result.columns)} {result.over}; give one for each")
    width = min(3.5 + 0.35 * len(names), 24)
    figure = Figure(figsize=(width, 1.8 + 0.3 * len(result.points)), layout="constrained")
    axes = figure.subplots()
    reach = max(1.0, float(result.scores.abs().max()))
    image = axes.imshow(result.scores.cpu().numpy(), cmap="RdBu_r", vmin=-reach, vmax=reach, aspect="auto")
    every = -(-len(names) // 60)
    axes.set_xticks(range(0, len(names), every), names[::every], rotation=0 if labels is None else 60)
    axes.set_yticks(range(len(result.points)), [str(point) for point in result.points])
    axes.set_xlabel(result.over.removesuffix("s"))
    axes.set_title("recovery of the clean run, by patched activation")
    figure.colorbar(image, ax=axes, label="0 corrupted, 1 clean")
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure
