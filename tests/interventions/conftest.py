"""Fake installed distributions: a `dist-info` folder and a real module, written onto `sys.path`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

GROUP = "kamui_tests.interventions"


class Install(Protocol):
    """Writes one distribution, and returns its `dist-info` folder."""

    def __call__(
        self,
        distribution: str,
        entries: dict[str, str],
        *,
        modules: dict[str, str] | None = None,
        version: str = "1.0",
        group: str = GROUP,
    ) -> Path: ...


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    before = set(sys.modules)

    def write(
        distribution: str,
        entries: dict[str, str],
        *,
        modules: dict[str, str] | None = None,
        version: str = "1.0",
        group: str = GROUP,
    ) -> Path:
        site = tmp_path / f"{distribution}-{version}"
        info = site / f"{distribution.replace('-', '_')}-{version}.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = [f"{name} = {value}" for name, value in entries.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[{group}]", *lines, ""]))
        for module, source in (modules or {}).items():
            (site / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(site))
        return info

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("fake_"):
            del sys.modules[name]
