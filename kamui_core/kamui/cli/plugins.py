"""`kamui plugins`: what is installed, from metadata alone, or imported and checked."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Final

import click

from kamui.cli.terminal import console, plain
from kamui.discovery import Offer, discover
from kamui.errors import PluginConflictError, PluginDisabledError, PluginError, PluginWarning

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

INTERVENTIONS: Final = "kamui.interventions"
ARCHITECTURES: Final = "kamui.architectures"

FOUND: Final = "found"
OK: Final = "ok"
DISABLED: Final = "disabled"
IGNORED: Final = "ignored"
CONFLICT: Final = "conflict"
BROKEN: Final = "broken"

_STYLES: Final = {OK: "green", DISABLED: "dim", IGNORED: "yellow", CONFLICT: "red", BROKEN: "red"}
_WRONG: Final = (IGNORED, CONFLICT, BROKEN)


@dataclass(frozen=True)
class Entry:
    """One installed plugin and what is known of it.

    Attributes:
        kind: `"intervention"` or `"architecture"`.
        name: The name under which it is offered; empty where the package's metadata cannot be read.
        package: The distribution that offers it.
        version: The distribution's version.
        where: Its entry point, such as `"kamui_scale:Scale"`.
        status: `found` as far as metadata tell, `ok` once imported and checked; else what is wrong.
        problem: Why it cannot be used; empty where it can.
        options: The options of a checked intervention.
        callbacks: The hooks that a checked intervention implements.
    """

    kind: str
    name: str
    package: str
    version: str
    where: str
    status: str
    problem: str = ""
    options: tuple[str, ...] = ()
    callbacks: tuple[str, ...] = ()


@click.command("plugins")
@click.option("--check", is_flag=True, help="Import each and show its options; exit status 1 if one is broken.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def plugins_command(ctx: click.Context, check: bool, as_json: bool) -> None:
    """Show the interventions and architectures that are installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PluginWarning)  # what they say stands in the table
        entries = [*interventions(check=check), *architectures(check=check)]
    if as_json:
        click.echo(json.dumps([asdict(entry) for entry in entries], indent=2))
    else:
        _show(console(), entries, check=check)
    if check and any(entry.status in _WRONG for entry in entries):
        ctx.exit(1)


def interventions(*, check: bool) -> Iterator[Entry]:
    """Yield every installed intervention, sorted by name, and then what cannot be read.

    Args:
        check: Import each, to tell whether it works and which options it takes.
    """
    from kamui.interventions.catalogue import catalogue

    found = discover(INTERVENTIONS)
    for offer in found:
        refusal = catalogue.check(offer) if check else catalogue.refusal(offer)
        entry = _entry("intervention", offer, refusal)
        if offer in found.usurpers():
            entry = replace(entry, status=IGNORED)
        yield _with_contract(entry, offer) if check and refusal is None else entry
    yield from (_unreadable("intervention", problem) for problem in found.problems)


def architectures(*, check: bool) -> Iterator[Entry]:
    """Yield every installed architecture, sorted by name, and then what cannot be read."""
    found = discover(ARCHITECTURES)
    for offer in found:
        entry = _entry("architecture", offer)
        yield _imported(entry, offer) if check else entry
    yield from (_unreadable("architecture", problem) for problem in found.problems)


def _entry(kind: str, offer: Offer, refusal: PluginError | None = None) -> Entry:
    problem = "" if refusal is None else str(refusal)
    return Entry(kind, offer.name, offer.distribution, offer.version, offer.value, _status(refusal), problem)


def _status(refusal: PluginError | None) -> str:
    if refusal is None:
        return FOUND
    if isinstance(refusal, PluginDisabledError):
        return DISABLED
    return CONFLICT if isinstance(refusal, PluginConflictError) else BROKEN


def _unreadable(kind: str, problem: str) -> Entry:
    return Entry(kind, "", "", "", "", BROKEN, problem)


def _with_contract(entry: Entry, offer: Offer) -> Entry:
    """Add the options and callbacks of an intervention that has passed its check."""
    from kamui.interventions import contract_of, options_of

    cls = offer.load()
    options, callbacks = tuple(map(str, options_of(cls))), tuple(sorted(contract_of(cls).callbacks))
    return replace(entry, status=OK, options=options, callbacks=callbacks)


def _imported(entry: Entry, offer: Offer) -> Entry:
    try:
        recognise = offer.load()
    except PluginError as error:
        return replace(entry, status=BROKEN, problem=str(error))
    if callable(recognise):
        return replace(entry, status=OK)
    problem = f"architecture {offer.name!r} of {offer.package} is {recognise!r}, not a function of the model"
    return replace(entry, status=BROKEN, problem=problem)


def _show(out: Console, entries: Sequence[Entry], *, check: bool) -> None:
    for kind in ("intervention", "architecture"):
        out.print(_table(f"{kind}s", [each for each in entries if each.kind == kind and each.name]))
    for entry in entries if check else ():
        if entry.status == OK and entry.kind == "intervention":
            _show_contract(out, entry)
    for entry in entries:
        if entry.problem:
            out.print(plain(f"{entry.status}:", _STYLES[entry.status]), plain(entry.problem))


def _table(title: str, entries: Sequence[Entry]) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, title_style="bold")
    for column in ("name", "package", "version", "where", "status"):
        table.add_column(column, overflow="fold")
    for entry in entries:
        texts = map(plain, (entry.name, entry.package, entry.version, entry.where))
        table.add_row(*texts, plain(entry.status, _STYLES.get(entry.status, "")))
    return table


def _show_contract(out: Console, entry: Entry) -> None:
    from rich.padding import Padding

    out.print(plain(entry.name, "bold"), plain(f"listens with {', '.join(entry.callbacks)}", "dim"))
    for option in entry.options:
        out.print(Padding(plain(option), (0, 0, 0, 3), expand=False))
    out.print()
