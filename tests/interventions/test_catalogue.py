"""The catalogue: one message for each way in which a plugin cannot be had, and none that stops another."""

from __future__ import annotations

import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kamui.errors import (
    InterventionContractError,
    PluginConflictError,
    PluginDisabledError,
    PluginError,
    PluginImportError,
    PluginNotFoundError,
    PluginWarning,
)
from kamui.interventions import Catalogue, Intervention, hookimpl
from kamui.interventions.catalogue import catalogue

if TYPE_CHECKING:
    from collections.abc import Callable

    Install = Callable[..., Path]

GROUP = "kamui_tests.interventions"
SOURCE = """
import kamui.interventions as contract

class {name}(contract.Intervention):
    @contract.hookimpl
    def points(self):
        return "output"
"""


@pytest.fixture
def plugins() -> Catalogue:
    return Catalogue(GROUP)


def offer(install: Install, distribution: str, name: str, source: str | None = None) -> Path:
    module = f"fake_{distribution.replace('-', '_')}"
    return install(distribution, {name: f"{module}:Plugin"}, modules={module: source or SOURCE.format(name="Plugin")})


def refusal(plugins: Catalogue, name: str, kind: type[PluginError]) -> str:
    with pytest.raises(kind) as caught:
        plugins.load(name)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plugin_is_loaded_by_name_and_no_other_is_imported(install: Install, plugins: Catalogue) -> None:
    offer(install, "a-good", "good")
    offer(install, "b-bad", "bad", "import missing_dependency_xyz")
    offer(install, "c-good", "better")
    assert [one.name for one in plugins.offers()] == ["bad", "better", "good"]
    assert plugins.load("good").__module__ == "fake_a_good"
    assert "fake_c_good" not in sys.modules
    assert plugins.load("better").__name__ == "Plugin"


def test_a_plugin_that_fails_on_import_says_why(install: Install, plugins: Catalogue) -> None:
    offer(install, "s-steer", "steer", "import missing_dependency_xyz")
    assert refusal(plugins, "steer", PluginImportError) == (
        "plugin 'steer' of 's-steer' 1.0 cannot be imported from 'fake_s_steer:Plugin': "
        "it needs the module 'missing_dependency_xyz', which is not installed; install it"
    )


def test_an_unknown_name_lists_what_there_is(install: Install, plugins: Catalogue) -> None:
    offer(install, "a-good", "steer")
    offer(install, "b-bad", "bad", "1 / 0")
    refusal(plugins, "bad", PluginImportError)
    assert refusal(plugins, "stear", PluginNotFoundError) == (
        "intervention 'stear' is not installed; did you mean 'steer'? (installed: 'bad', 'steer'; broken: "
        "plugin 'bad' of 'b-bad' 1.0 cannot be imported from 'fake_b_bad:Plugin': "
        "ZeroDivisionError: division by zero; update or uninstall 'b-bad')"
    )


def test_an_unknown_name_without_any_plugin(plugins: Catalogue) -> None:
    assert refusal(plugins, "steer", PluginNotFoundError) == (
        "intervention 'steer' is not installed; install the package that offers it, or pass the class itself "
        "(installed: none)"
    )


def test_two_packages_with_one_name_are_a_conflict_that_leaves_others_alone(
    install: Install, plugins: Catalogue
) -> None:
    offer(install, "first", "steer")
    offer(install, "second", "steer")
    offer(install, "third", "other")
    assert refusal(plugins, "steer", PluginConflictError) == (
        "intervention 'steer' is offered by 'first' 1.0 ('fake_first:Plugin') and "
        "'second' 1.0 ('fake_second:Plugin'); uninstall all but one, or pass the class itself"
    )
    assert plugins.load("other").__module__ == "fake_third"


def test_a_reserved_name_is_never_won_by_another_package(install: Install, plugins: Catalogue) -> None:
    offer(install, "kamui-core", "cache")
    offer(install, "foreign", "cache", "raise RuntimeError('must not be imported')")
    told = (
        "intervention 'cache' of 'foreign' 1.0 is ignored, the name is reserved for 'kamui-core'; "
        "uninstall 'foreign', or ask its author for another name"
    )
    with pytest.warns(PluginWarning) as caught:
        assert plugins.load("cache").__module__ == "fake_kamui_core"
    assert [str(one.message) for one in caught] == [told]
    states = {one.distribution: plugins.check(one) for one in plugins.offers()}
    assert states["kamui-core"] is None
    assert str(states["foreign"]) == told


@pytest.mark.parametrize("disabled", ["steer", "other, steer", "*"])
def test_a_name_can_be_switched_off_and_on_again(
    install: Install, plugins: Catalogue, monkeypatch: pytest.MonkeyPatch, disabled: str
) -> None:
    offer(install, "s-steer", "steer")
    plugins.load("steer")
    monkeypatch.setenv("KAMUI_DISABLE_PLUGINS", disabled)
    assert refusal(plugins, "steer", PluginDisabledError) == (
        f"intervention 'steer' of 's-steer' 1.0 is switched off by KAMUI_DISABLE_PLUGINS={disabled!r}; "
        "change the variable"
    )
    monkeypatch.delenv("KAMUI_DISABLE_PLUGINS")
    assert plugins.load("steer").__name__ == "Plugin"


def test_everything_switched_off_leaves_what_comes_along(
    install: Install, plugins: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    offer(install, "kamui-core", "cache")
    monkeypatch.setenv("KAMUI_DISABLE_PLUGINS", "*")
    assert plugins.load("cache").__name__ == "Plugin"
    monkeypatch.setenv("KAMUI_DISABLE_PLUGINS", "*,cache")
    refusal(plugins, "cache", PluginDisabledError)


def test_what_is_no_intervention_is_refused(install: Install, plugins: Catalogue) -> None:
    offer(install, "s-steer", "steer", "class Plugin: pass")
    assert refusal(plugins, "steer", InterventionContractError) == (
        "class 'Plugin' of 's-steer' 1.0 is not a class that derives from kamui.Intervention; "
        "write 'class Name(kamui.Intervention)'"
    )


def test_what_breaks_the_contract_is_refused(install: Install, plugins: Catalogue) -> None:
    offer(install, "s-steer", "steer", SOURCE.format(name="Plugin").replace("points", "pionts"))
    assert refusal(plugins, "steer", InterventionContractError).startswith(
        "method 'pionts' of intervention class 'Plugin' of 's-steer' 1.0 is marked @kamui.hookimpl, "
        "but no hook is called 'pionts'; did you mean 'points'?"
    )


def test_what_needs_another_kamui_is_refused(install: Install, plugins: Catalogue) -> None:
    install("kamui-core", {}, version="0.3.0")
    offer(install, "s-steer", "steer", SOURCE.format(name="Plugin") + "    requires_kamui = '>=99'\n")
    offer(install, "b-other", "other")
    assert refusal(plugins, "steer", InterventionContractError) == (
        "intervention class 'Plugin' of 's-steer' 1.0 requires kamui >=99, but kamui 0.3.0 is installed; "
        "install versions that fit each other"
    )
    assert plugins.load("other").__name__ == "Plugin"


def test_a_failure_is_tried_again(install: Install, plugins: Catalogue) -> None:
    info = offer(install, "s-steer", "steer", "import fake_missing_dependency")
    refusal(plugins, "steer", PluginImportError)
    (info.parent / "fake_missing_dependency.py").write_text("")
    (info.parent / "fake_s_steer.py").write_text(SOURCE.format(name="Plugin") + "# of another length\n")
    assert plugins.load("steer").__name__ == "Plugin"


def test_half_written_metadata_are_told_once_and_read_again(install: Install, plugins: Catalogue) -> None:
    info = offer(install, "late-plug", "zap")
    whole = (info / "entry_points.txt").read_text()
    (info / "entry_points.txt").write_text(f"[{GROUP}\nnoise")
    with pytest.warns(PluginWarning, match="metadata cannot be read"):
        assert plugins.offers() == ()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert "; broken: package at " in refusal(plugins, "zap", PluginNotFoundError)
    (info / "entry_points.txt").write_text(whole)
    assert plugins.load("zap").__name__ == "Plugin"


def test_a_package_installed_after_the_first_look_is_found(install: Install, plugins: Catalogue) -> None:
    assert plugins.offers() == ()
    offer(install, "late", "zap")
    assert plugins.load("zap").__name__ == "Plugin"


def test_a_check_tells_what_is_wrong_without_raising(install: Install, plugins: Catalogue) -> None:
    offer(install, "a-good", "good")
    offer(install, "b-bad", "bad", "1 / 0")
    offer(install, "first", "twice")
    offer(install, "second", "twice")
    states = {one.distribution: type(plugins.check(one)) for one in plugins.offers()}
    assert states == {
        "a-good": type(None),
        "b-bad": PluginImportError,
        "first": PluginConflictError,
        "second": PluginConflictError,
    }


def test_the_offer_of_a_class_is_known_also_before_it_was_loaded_by_name(install: Install, plugins: Catalogue) -> None:
    offer(install, "s-steer", "steer")

    class Local(Intervention):
        @hookimpl
        def points(self) -> str:
            return "output"

    assert plugins.offer_of(Local) is None
    found = plugins.offer_of(Catalogue(GROUP).load("steer"))
    assert found is not None
    assert (found.name, found.distribution) == ("steer", "s-steer")


def test_many_threads_get_the_same_class(install: Install, plugins: Catalogue) -> None:
    offer(install, "s-steer", "steer", "import time; time.sleep(0.05)\n" + SOURCE.format(name="Plugin"))
    with ThreadPoolExecutor(8) as pool:
        classes = set(pool.map(plugins.load, ["steer"] * 16))
    assert len(classes) == 1


def test_the_catalogue_of_the_process_reads_the_published_group(install: Install) -> None:
    install("s-steer", {"fake_steer": "fake_s_steer:Plugin"}, group="kamui.interventions")
    assert "fake_steer" in {one.name for one in catalogue.offers()}
