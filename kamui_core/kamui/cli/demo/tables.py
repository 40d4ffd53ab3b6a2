"""The larger tables of the story."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

from kamui.cli.demo.layout import columns, grid, loss_bar
from kamui.cli.demo.study import Study


def sequence_table(study: Study) -> Table:
    """Return the first sequence with the loss on each token, its two occurrences one above the other."""
    n = study.sequences.length
    tokens = study.sequences.token_ids[0].tolist()
    losses = [None, *study.losses[0].tolist()]
    table = grid()
    for title, part in (("first", slice(0, n)), ("again", slice(n, 2 * n))):
        table.add_row(Text(f"{title}  token", "bold"), *(f"{token:>3}" for token in tokens[part]))
        table.add_row("       loss", *map(_loss_cell, losses[part]))
    return table


def rank_table(study: Study) -> Table:
    """Return the rank of the right token after each layer, the last on top, at each position of one sequence."""
    positions = range(*study.sequences.second.indices(2 * study.sequences.length))
    table = grid("position", *(f"{position:>3}" for position in positions), "likely")
    for reading in reversed(study.readings):
        ranks = (Text(str(rank), _rank_style(rank)) for rank in reading.ranks[0].tolist())
        table.add_row(reading.point, *ranks, f"{reading.probabilities.mean().item():.1%}")
    return table


def knockout_table(study: Study) -> Table:
    """Return the loss on both occurrences without each of the things that were taken from the model."""
    heads, found = study.heads, study.knockouts
    table = columns("taken from the model", "first", "again", "")
    rows = {
        "nothing": found.nothing,
        str(heads.best): found.best,
        f"{heads.control} (control)": found.control,
        f"all induction heads ({len(heads.induction)})": found.together,
        "their sight of what followed": found.cut,
        "their sight of one place on (control)": found.cut_beside,
    }
    for what, loss in rows.items():
        table.add_row(what, f"{loss.first:.2f}", f"{loss.second:.2f}", loss_bar(loss.second))
    return table


def trace_table(study: Study, rows: int = 4) -> Table:
    """Return the activations that bring most of the answer back."""
    table = columns("activation", "position", "brings back", "what stands there")
    for point, position, score in study.trace.result.best(rows):
        table.add_row(Text(point), str(position), f"{score:.3f}", study.trace.role(position))
    return table


def _loss_cell(loss: float | None) -> Text:
    return Text() if loss is None else Text(f"{loss:3.1f}", "green" if loss < 1 else "dim")


def _rank_style(rank: int) -> str:
    return "bold green" if rank == 0 else "yellow" if rank < 10 else "dim"
