"""The command `kamui`.

Commands import torch only when they need it: `kamui --help` and `kamui plugins` answer at once.
"""

from __future__ import annotations

import warnings
from typing import Any

import click

import kamui
from kamui.cli.demo import demo_command
from kamui.cli.plugins import plugins_command
from kamui.cli.points import points_command
from kamui.cli.terminal import printable
from kamui.errors import KamuiError

_INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended


class Refusal(click.ClickException):
    """An error of ours, as one line on standard error."""

    exit_code = 2

    def __init__(self, message: str) -> None:
        super().__init__(printable(" ".join(message.split())))


class Commands(click.Group):
    """A group that tells what went wrong in one line, without a traceback where the error is ours."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command.

        Raises:
            Refusal: For every `KamuiError` and every file that cannot be used.
        """
        try:
            return super().invoke(ctx)
        except KamuiError as error:
            raise Refusal(str(error)) from error
        except OSError as error:
            if error.filename is None:  # a closed pipe, which click knows how to end on
                raise
            raise Refusal(f"file {str(error.filename)!r} cannot be used: {error.strerror}") from error
        except KeyboardInterrupt:
            ctx.exit(_INTERRUPTED)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(kamui.__version__, prog_name="kamui")
def main() -> None:
    """Look into a PyTorch model and change what it computes."""
    # torch says so where numpy is not installed; nothing here needs it.
    warnings.filterwarnings("ignore", message="Failed to initialize NumPy")


main.add_command(plugins_command)
main.add_command(points_command)
main.add_command(demo_command)
