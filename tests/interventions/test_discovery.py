"""Discovery reads metadata alone, and survives what installers leave behind."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kamui.discovery import Offer, discover
from kamui.errors import PluginImportError

if TYPE_CHECKING:
    from collections.abc import Callable

GROUP = "kamui_tests.interventions"


def test_offers_are_sorted_and_nothing_is_imported(install: Callable[..., Path]) -> None:
    install("kamui-steer", {"steer": "fake_steer:Steer"}, modules={"fake_steer": "raise RuntimeError"})
    install("kamui-ablate", {"ablate": "fake_ablate:Ablate"}, version="2.0")
    assert list(discover(GROUP)) == [
        Offer("ablate", "fake_ablate:Ablate", "kamui-ablate", "2.0"),
        Offer("steer", "fake_steer:Steer", "kamui-steer", "1.0"),
    ]
    assert "fake_steer" not in sys.modules


def test_another_group_is_not_seen(install: Callable[..., Path]) -> None:
    install("kamui-steer", {"steer": "fake_steer:Steer"}, group=f"{GROUP}.more")
    assert discover(GROUP).offers == ()
    assert discover(GROUP).problems == ()


def test_one_installation_seen_through_two_paths_counts_once(
    install: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = install("kamui-steer", {"steer": "fake_steer:Steer"})
    (tmp_path / "lib64").symlink_to(info.parent)
    monkeypatch.syspath_prepend(str(tmp_path / "lib64"))
    assert len(discover(GROUP).claims("steer")) == 1


def test_of_two_versions_the_first_on_the_path_counts(install: Callable[..., Path]) -> None:
    install("kamui_steer", {"steer": "fake_steer:Old"}, version="1.0")
    install("Kamui-Steer", {"steer": "fake_steer:New"}, version="2.0")
    assert [offer.version for offer in discover(GROUP)] == ["2.0"]


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("entry_points.txt", f"[{GROUP}\nnoise".encode()),
        ("entry_points.txt", b"\xff\xfe\x00"),
        ("METADATA", b""),
        ("METADATA", b"Metadata-Version: 2.1\nName: kamui-half\n"),
    ],
)
def test_half_written_metadata_stop_no_other(install: Callable[..., Path], file: str, content: bytes) -> None:
    install("kamui-good", {"good": "fake_good:Good"})
    info = install("kamui-half", {"half": "fake_half:Half"})
    (info / file).write_bytes(content)
    found = discover(GROUP)
    assert [offer.name for offer in found] == ["good"]
    (problem,) = found.problems
    assert problem.startswith(f"package at {str(info)!r} is ignored, its metadata cannot be read (")
    assert problem.endswith("); reinstall it")


def test_two_hundred_packages_are_read_and_none_is_imported(
    install: Callable[..., Path],
) -> None:
    site = install("kamui-0", {"plugin0": "fake:Fake"}).parent
    for index in range(1, 200):
        info = site / f"kamui_{index}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: kamui-{index}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{GROUP}]\nplugin{index} = fake:Fake\n")
    assert len(discover(GROUP).offers) == 200
    assert "fake" not in sys.modules


@pytest.mark.parametrize(
    ("value", "source", "cause"),
    [
        (
            "fake_steer:Steer",
            "import missing_dependency_xyz",
            "it needs the module 'missing_dependency_xyz', which is not installed; install it",
        ),
        ("fake_steer:Steer", "1 / 0", "ZeroDivisionError: division by zero; update or uninstall 'kamui-steer'"),
        ("fake_steer:Steer", "raise SystemExit(3)", "SystemExit: 3; update or uninstall 'kamui-steer'"),
        (
            "fake_steer:Steer",
            "",
            "AttributeError: module 'fake_steer' has no attribute 'Steer'; update or uninstall 'kamui-steer'",
        ),
        ("fake_gone:Steer", "", "there is no module 'fake_gone'; reinstall 'kamui-steer'"),
    ],
)
def test_a_failing_import_names_package_and_cause(
    install: Callable[..., Path], value: str, source: str, cause: str
) -> None:
    install("kamui-steer", {"steer": value}, modules={"fake_steer": source})
    (offer,) = discover(GROUP).offers
    with pytest.raises(PluginImportError) as caught:
        offer.load()
    assert str(caught.value) == f"plugin 'steer' of 'kamui-steer' 1.0 cannot be imported from {value!r}: {cause}"
    assert caught.value.__cause__ is not None


def test_a_value_that_is_no_place_is_refused(install: Callable[..., Path]) -> None:
    install("kamui-steer", {"steer": "not a place!"})
    (offer,) = discover(GROUP).offers
    with pytest.raises(
        PluginImportError, match="it is not written as 'module:name'; update or uninstall 'kamui-steer'"
    ):
        offer.load()
