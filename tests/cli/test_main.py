"""What a user sees when something goes wrong."""

from __future__ import annotations

import subprocess
import sys
from typing import NoReturn

import click
import pytest
from click.testing import CliRunner, Result

import kamui
from kamui.cli import Commands
from kamui.cli.terminal import plain, printable
from kamui.errors import ConfigError, UnknownPointError


def outcome(error: BaseException) -> Result:
    @click.command()
    def fail() -> NoReturn:
        raise error

    return CliRunner().invoke(Commands(commands={"fail": fail}), ["fail"])


@pytest.mark.parametrize("error", [ConfigError("no file 'a.yaml'"), UnknownPointError("no file 'a.yaml'")])
def test_an_error_of_ours_is_one_line_on_standard_error(error: Exception) -> None:
    result = outcome(error)
    assert (result.exit_code, result.stdout, result.stderr) == (2, "", "Error: no file 'a.yaml'\n")


def test_escapes_in_an_error_are_written_out() -> None:
    assert outcome(ConfigError("no \x1b[31mfile\nof that name")).stderr == "Error: no \\x1b[31mfile of that name\n"


def test_a_file_that_cannot_be_used_is_named() -> None:
    result = outcome(PermissionError(13, "Permission denied", "pictures/lens.png"))
    assert result.exit_code == 2
    assert result.stderr == "Error: file 'pictures/lens.png' cannot be used: Permission denied\n"


def test_an_interrupt_ends_with_the_status_that_shells_expect() -> None:
    result = outcome(KeyboardInterrupt())
    assert (result.exit_code, result.output) == (130, "")


def test_an_error_that_is_not_ours_keeps_its_traceback() -> None:
    result = outcome(ZeroDivisionError("division by zero"))
    assert isinstance(result.exception, ZeroDivisionError)


def test_foreign_text_is_shown_as_it_is_written() -> None:
    assert printable("naïve [bold]\x07\x1b[0m\u202e") == "naïve [bold]\\x07\\x1b[0m\\u202e"
    assert plain("[bold]x[/bold]").plain == "[bold]x[/bold]"


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["plugins"], ["demo", "--help"], ["points", "-h"]])
def test_what_needs_no_model_does_not_import_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from kamui.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_version_is_that_of_the_package() -> None:
    command = [sys.executable, "-m", "kamui", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"kamui, version {kamui.__version__}\n"
