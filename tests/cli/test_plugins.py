"""`kamui plugins` shows what is installed, also where it is broken, and imports nothing unless it is told to check."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from kamui.cli.plugins import ARCHITECTURES as SHOWN_ARCHITECTURES
from kamui.cli.plugins import INTERVENTIONS as SHOWN_INTERVENTIONS
from kamui.hooks.architecture import ARCHITECTURES
from kamui.interventions.catalogue import GROUP

if TYPE_CHECKING:
    from collections.abc import Callable

    from click.testing import Result

    Run = Callable[..., Result]
    Install = Callable[..., Path]

GOOD = """
import kamui.interventions as contract

class Plugin(contract.Intervention):
    at: str
    factor: float = 1.0

    @contract.hookimpl
    def points(self):
        return self.at
"""


def entries(run: Run, *arguments: str) -> dict[str, dict[str, Any]]:
    found = json.loads(run("plugins", "--json", *arguments).stdout)
    return {entry["package"] + entry["name"]: entry for entry in found}


def test_what_comes_along_is_listed(run: Run) -> None:
    result = run("plugins")
    assert result.exit_code == 0
    for expected in ("cache", "patching", "steering", "logit_lens", "kamui_cache:Cache", "reference", "kamui-core"):
        assert expected in result.output


def test_the_groups_are_those_that_are_used() -> None:
    assert (SHOWN_INTERVENTIONS, SHOWN_ARCHITECTURES) == (GROUP, ARCHITECTURES)


def test_without_check_nothing_is_imported_and_nothing_fails(run: Run, install: Install) -> None:
    install("fake_bad", {"bad": "fake_bad:Plugin"}, "1 / 0")
    result = run("plugins")
    assert result.exit_code == 0
    assert "fake_bad" in result.output
    assert "fake_bad" not in sys.modules
    assert entries(run)["fake_badbad"]["status"] == "found"


def test_check_shows_options_and_callbacks(run: Run, install: Install) -> None:
    install("fake_good", {"good": "fake_good:Plugin"}, GOOD)
    result = run("plugins", "--check")
    assert result.exit_code == 0, result.output
    assert "good listens with points" in result.output
    assert "   factor: float = 1.0" in result.output
    entry = entries(run, "--check")["fake_goodgood"]
    assert (entry["status"], entry["problem"]) == ("ok", "")
    assert (entry["options"], entry["callbacks"]) == (["at: str", "factor: float = 1.0"], ["points"])


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import missing_xyz", "it needs the module 'missing_xyz', which is not installed; install it"),
        ("Plugin = 3", "int 3 of 'fake_bad' 1.0 is not a class that derives from kamui.Intervention"),
        (GOOD.replace("def points", "def pionts"), "'pionts'"),
    ],
)
def test_check_says_what_is_broken_and_still_shows_the_rest(
    run: Run, install: Install, source: str, reason: str
) -> None:
    install("fake_bad", {"bad": "fake_bad:Plugin"}, source)
    install("fake_good", {"good": "fake_good:Plugin"}, GOOD)
    assert run("plugins", "--check").exit_code == 1
    found = entries(run, "--check")
    assert found["fake_badbad"]["status"] == "broken"
    assert reason in found["fake_badbad"]["problem"]
    assert found["fake_goodgood"]["status"] == "ok"


def test_a_name_that_two_packages_claim_is_a_conflict(run: Run, install: Install) -> None:
    install("fake_one", {"same": "fake_one:Plugin"}, GOOD)
    install("fake_two", {"same": "fake_two:Plugin"}, GOOD)
    found = entries(run)
    assert found["fake_onesame"]["status"] == found["fake_twosame"]["status"] == "conflict"
    assert "uninstall all but one" in run("plugins").output
    assert run("plugins", "--check").exit_code == 1


def test_a_reserved_name_is_ignored_and_the_one_that_comes_along_works(run: Run, install: Install) -> None:
    install("fake_cache", {"cache": "fake_cache:Plugin"}, GOOD)
    found = entries(run, "--check")
    assert found["fake_cachecache"]["status"] == "ignored"
    assert "reserved for 'kamui-core'" in found["fake_cachecache"]["problem"]
    assert found["kamui-corecache"]["status"] == "ok"
    assert "fake_cache" not in sys.modules


def test_what_is_switched_off_is_not_broken(run: Run, install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("fake_bad", {"bad": "fake_bad:Plugin"}, "1 / 0")
    monkeypatch.setenv("KAMUI_DISABLE_PLUGINS", "bad")
    assert entries(run, "--check")["fake_badbad"]["status"] == "disabled"
    assert run("plugins", "--check").exit_code == 0


def test_metadata_that_cannot_be_read_are_told(run: Run, install: Install) -> None:
    info = install("fake_half", {"half": "fake_half:Plugin"})
    (info / "entry_points.txt").write_text("[kamui.interventions\nnoise")
    assert str(info) in entries(run)[""]["problem"]
    assert run("plugins").exit_code == 0
    assert run("plugins", "--check").exit_code == 1


@pytest.mark.parametrize(
    ("source", "status"), [("def find(model): return None", "ok"), ("find = 3", "broken"), ("1 / 0", "broken")]
)
def test_architectures_are_listed_and_checked(run: Run, install: Install, source: str, status: str) -> None:
    install("fake_arch", {"mine": "fake_arch:find"}, source, group="kamui.architectures")
    assert entries(run)["fake_archmine"]["status"] == "found"
    assert entries(run, "--check")["fake_archmine"]["status"] == status
    assert "mine" in run("plugins").output


def test_names_cannot_drive_the_terminal(run: Run, install: Install) -> None:
    source = "raise RuntimeError('[red]no[/red] \\x1b]0;title\\x07')"
    install("fake_bad", {"x[bold]y\x1b[31m": "fake_bad:Plugin"}, source)
    output = run("plugins", "--check").output
    assert "x[bold]y\\x1b[31m" in output
    assert "[red]no[/red]" in output
    assert "\x1b" not in output
    assert "\x07" not in output
