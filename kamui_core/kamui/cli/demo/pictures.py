"""The study as pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kamui.errors import MissingExtraError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from kamui.cli.demo.study import Study

_DPI = 150


def require_matplotlib() -> None:
    """Refuse early what cannot be drawn later.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise MissingExtraError(
            "option '--out' needs matplotlib, which is not installed; install it with: pip install 'kamui-core[viz]'"
        ) from error


def draw(study: Study, folder: Path) -> list[Path]:
    """Write the pictures to a folder and return their paths."""
    figures = {"attention.png": draw_attention(study), "lens.png": draw_lens(study), "trace.png": draw_trace(study)}
    for name, figure in figures.items():
        figure.savefig(folder / name, dpi=_DPI)
    return [folder / name for name in figures]


def draw_attention(study: Study) -> Figure:
    """Draw where the best induction head looks in the first sequence."""
    figure, axes = _figure(7.0, 6.2)
    image = axes.imshow(study.attention.tolist(), cmap="magma", vmin=0, vmax=1)
    n = study.sequences.length
    axes.plot(range(1, n + 1), range(n, 2 * n), "o", mfc="none", mec="cyan", ms=9, mew=0.8, label="what followed")
    _label_tokens(axes, study)
    axes.set_xlabel("token looked at")
    axes.set_ylabel("token that looks")
    axes.set_title(
        f"attention of {study.heads.best}: {study.heads.best.induction:.0%} to what followed, on average",
        fontsize="medium",
    )
    axes.legend(loc="upper right")
    figure.colorbar(image, ax=axes, label="attention weight")
    return figure


def draw_lens(study: Study) -> Figure:
    """Draw how likely each layer takes the right token to be, at each position of the repetition."""
    figure, axes = _figure(8.5, 2.8)
    readings = list(reversed(study.readings))
    image = axes.imshow(
        [reading.probabilities[0].tolist() for reading in readings], cmap="viridis", vmin=0, vmax=1, aspect="auto"
    )
    for row, reading in enumerate(readings):
        for column, rank in enumerate(reading.ranks[0].tolist()):
            colour = "black" if reading.probabilities[0, column] > 0.6 else "white"
            axes.text(column, row, str(rank), ha="center", va="center", fontsize=8, color=colour)
    tokens = study.sequences.token_ids[0, study.sequences.second].tolist()
    axes.set_xticks(range(len(tokens)), [str(token) for token in tokens])
    axes.set_yticks(range(len(readings)), [reading.point for reading in readings])
    axes.set_xlabel("token of the repetition")
    axes.set_title("logit lens: probability of the right next token, and its rank")
    figure.colorbar(image, ax=axes, label="probability")
    return figure


def draw_trace(study: Study) -> Figure:
    """Draw what patching each activation brings back."""
    return study.trace.result.plot()


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.subplots()


def _label_tokens(axes: Axes, study: Study) -> None:
    tokens = [str(token) for token in study.sequences.token_ids[0].tolist()]
    axes.set_xticks(range(len(tokens)), tokens, rotation=90, fontsize=7)
    axes.set_yticks(range(len(tokens)), tokens, fontsize=7)
    for edge in (axes.axhline, axes.axvline):
        edge(study.sequences.length - 0.5, color="white", linewidth=0.8, linestyle="--")
