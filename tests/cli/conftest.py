"""The command line as a user has it, and fake installed distributions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from click.testing import CliRunner, Result

from kamui.cli import main


class Run(Protocol):
    """Runs the command `kamui` with arguments."""

    def __call__(self, *arguments: str) -> Result: ...


class Install(Protocol):
    """Writes one distribution whose only module is called like it, and returns its `dist-info` folder."""

    def __call__(
        self, distribution: str, entries: dict[str, str], source: str = "", *, group: str = "kamui.interventions"
    ) -> Path: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setenv("COLUMNS", "100")
    return lambda *arguments: CliRunner().invoke(main, arguments)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def write(
        distribution: str, entries: dict[str, str], source: str = "", *, group: str = "kamui.interventions"
    ) -> Path:
        site = tmp_path / distribution
        info = site / f"{distribution}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        (site / f"{distribution}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        return info

    yield write
    for name in [name for name in sys.modules if name.startswith("fake_")]:
        del sys.modules[name]
