"""Reports: what fired where, as a table, as a dictionary and in a notebook."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from kamui.hooks.chain import Listener
    from kamui.hooks.scope import Scope


@dataclasses.dataclass(frozen=True)
class Row:
    """What one intervention did at one point.

    Attributes:
        intervention: The intervention's name.
        point: The point.
        calls: How often it was called there.
        changed: How often it returned another value.
        missed: How often the token positions that it asks for were not in the call.
        note: Why nothing came to a gradient point, where that is known.
    """

    intervention: str
    point: str
    calls: int
    changed: int
    missed: int
    note: str = ""

    @classmethod
    def of(cls, listener: Listener) -> Row:
        """Read the counters of one listener."""
        note = "no graph" if listener.without_graph and not listener.calls else ""
        return cls(listener.label, str(listener.point), listener.calls, listener.changed, listener.missed, note)

    @property
    def called(self) -> str:
        """How often it was called, or why not."""
        return f"{self.calls} ({self.note})" if self.note else str(self.calls)


@dataclasses.dataclass(frozen=True)
class Report:
    """What a scope saw and did so far.

    Attributes:
        rows: One for each intervention and point, in the order of use.
        finished: Forward passes that ended well.
        dropped: Forward passes that failed.
        foreign: Runs of the model in threads or tasks that do not have the scope.
    """

    rows: tuple[Row, ...]
    finished: int
    dropped: int
    foreign: int

    @classmethod
    def of(cls, scope: Scope) -> Report:
        """Read the counters of a scope."""
        rows = tuple(Row.of(one) for one in scope.listeners())
        passes = scope.passes
        return cls(rows, passes.finished, passes.dropped, passes.foreign)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [self._summary()]
        lines += [
            f"{row.intervention}  {row.point}  called {row.called}  changed {row.changed}{_missed(row)}"
            for row in self.rows
        ]
        return "\n".join(lines)

    def __rich__(self) -> Table:
        from rich.table import Table
        from rich.text import Text

        table = Table("intervention", "point", title=self._summary())
        table.add_column("called", justify="right")
        table.add_column("changed", justify="right")
        table.add_column("missed", justify="right")
        for row in self.rows:
            table.add_row(Text(row.intervention), Text(row.point), row.called, str(row.changed), str(row.missed))
        return table

    def _repr_html_(self) -> str:
        from html import escape

        cells = "".join(
            f"<tr><td>{escape(row.intervention)}</td><td>{escape(row.point)}</td>"
            f"<td>{row.called}</td><td>{row.changed}</td><td>{row.missed}</td></tr>"
            for row in self.rows
        )
        head = "<tr><th>intervention</th><th>point</th><th>called</th><th>changed</th><th>missed</th></tr>"
        return f"<table><caption>{escape(self._summary())}</caption>{head}{cells}</table>"

    def _summary(self) -> str:
        others = [f", {self.dropped} failed"] if self.dropped else []
        others += [f", {self.foreign} in other threads or tasks"] if self.foreign else []
        return f"{self.finished} forward pass(es) finished{''.join(others)}"


def _missed(row: Row) -> str:
    return f"  missed {row.missed} (its positions were not in the call)" if row.missed else ""
