"""What is specified, and that importing it stays light."""

from __future__ import annotations

import inspect
import subprocess
import sys

import kamui.interventions
from kamui.interventions.contract import HOOKS
from kamui.interventions.hookspecs import Hookspecs


def test_every_hook_has_the_arguments_that_are_promised() -> None:
    assert {name: sorted(arguments) for name, arguments in HOOKS.items()} == {
        "activation": ["call", "point", "value"],
        "closed": ["scope"],
        "forward_finished": ["call", "output"],
        "forward_started": ["call"],
        "opened": ["scope"],
        "points": ["model"],
    }


def test_every_hook_documents_each_of_its_arguments() -> None:
    for name, arguments in HOOKS.items():
        documented = inspect.getdoc(getattr(Hookspecs, name)) or ""
        assert all(f"{argument}: " in documented for argument in arguments), name


def test_importing_the_contract_imports_no_torch() -> None:
    code = "import sys, kamui.interventions; print(sorted({'torch', 'click', 'rich'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_all_is_sorted_and_complete() -> None:
    names = kamui.interventions.__all__
    assert names == sorted(names)
    assert all(hasattr(kamui.interventions, name) for name in names)
