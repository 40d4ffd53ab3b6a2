"""How the parts of a page look, whatever they say."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text

_BAR = 12


def code(*lines: str) -> Text:
    """Return lines of code, as they stand in the module of that step."""
    return Text("\n".join(f"│ {line}" for line in lines), "cyan")


def verdict(holds: bool, yes: str, no: str) -> Text:
    """Return what the numbers say: `yes` where a claim holds, and plainly `no` where it does not."""
    return Text.assemble(("-> ", "bold green"), (yes, "bold")) if holds else Text.assemble(("-> no: ", "bold red"), no)


def columns(*names: str) -> Table:
    """Return a table without lines; without names it has no header."""
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim", show_header=bool(names))
    for name in names:
        table.add_column(name)
    return table


def grid(*names: str) -> Table:
    """Return a table whose narrow columns hold numbers; without names it has no header."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim", show_header=bool(names))
    for number, name in enumerate(names):
        table.add_column(name, justify="right" if number else "left")
    return table


def share(value: float) -> Text:
    """Return a share from 0 to 1 as a percentage and a bar."""
    filled = round(_BAR * value)
    return Text.assemble(f"{value:6.1%} ", ("█" * filled, "cyan"), " " * (_BAR - filled))


def loss_bar(loss: float) -> Text:
    """Return a loss as a bar, three marks to one."""
    return Text("█" * round(3 * loss), "red" if loss > 1 else "green")
