from __future__ import annotations

import io
import json
import threading

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from kamui.hooks import HookManager, Report


@pytest.fixture
def report() -> Report:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())

    def sometimes(value: Tensor) -> Tensor | None:
        return value * 2 if value.sum() > 0 else None

    with HookManager(net) as hooks:
        hooks.attach("1")
        hooks.use(sometimes, at="input")
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            net(torch.ones(1, 3))
        net(torch.ones(1, 2))
        net(-torch.ones(1, 2))
        return hooks.report()


def test_a_report_counts_what_was_called_and_what_was_changed(report: Report) -> None:
    assert report.as_dict() == {
        "rows": (
            {"intervention": "cache", "point": "1.output", "calls": 2, "changed": 0, "missed": 0, "note": ""},
            {"intervention": "sometimes", "point": "input", "calls": 3, "changed": 2, "missed": 0, "note": ""},
        ),
        "finished": 2,
        "dropped": 1,
        "foreign": 0,
    }
    assert json.loads(json.dumps(report.as_dict()))["finished"] == 2


def test_a_report_reads_well_in_text_in_a_terminal_and_in_a_notebook(report: Report) -> None:
    head = "2 forward pass(es) finished, 1 failed"
    assert str(report).splitlines() == [
        head,
        "cache  1.output  called 2  changed 0",
        "sometimes  input  called 3  changed 2",
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(report)
    assert "sometimes" in console.export_text()
    assert f"<caption>{head}</caption>" in report._repr_html_()
    assert "<td>sometimes</td><td>input</td><td>3</td><td>2</td><td>0</td>" in report._repr_html_()


@pytest.mark.filterwarnings("ignore:the model ran")
def test_names_are_escaped_in_html_and_runs_elsewhere_are_counted() -> None:
    net = nn.Sequential(nn.Linear(2, 2))
    with HookManager(net) as hooks:
        hooks.use(lambda value: None, at="0.output")
        thread = threading.Thread(target=net, args=(torch.ones(1, 2),))
        thread.start()
        thread.join()
        assert "&lt;lambda&gt;" in hooks.report()._repr_html_()
        assert "1 in other threads or tasks" in str(hooks.report())
