"""What every command needs to print: a console of a readable width, and text that cannot drive the terminal."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

WIDTH = 100


def console() -> Console:
    """Return a console on standard output that is no wider than a page and prints whatever the encoding."""
    from rich.console import Console

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    made = Console(highlight=False, emoji=False, markup=False)
    sized = made.is_terminal or "COLUMNS" in os.environ
    made.width = min(made.width, WIDTH) if sized else WIDTH
    return made


def printable(text: str) -> str:
    """Return text with everything that is not shown as itself, such as terminal escapes, written out."""
    return "".join(each if each.isprintable() else _escaped(each) for each in text)


def plain(text: str, style: str = "") -> Text:
    """Return foreign text for a table: no markup is read from it and no control character is in it."""
    from rich.text import Text

    return Text(printable(text), style=style, overflow="fold")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
