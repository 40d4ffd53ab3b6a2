"""Patching sweeps, beside a loop over plain torch hooks, and how their results are shown."""

from __future__ import annotations

import re
import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from kamui.errors import MissingExtraError, SweepError, UnknownPointError
from kamui.hooks import HookManager, HookPoint
from kamui.model import ModelConfig, Transformer
from kamui.testing import leaves_no_trace
from kamui_patching import ActivationPatcher, SweepResult, logit_difference

METRIC = logit_difference(right=3, wrong=9)


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    sizes = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=32, vocab_size=16, context_length=32)
    return Transformer(sizes).eval()


@pytest.fixture
def clean() -> Tensor:
    return torch.tensor([[1, 2, 3, 4, 5]])


@pytest.fixture
def corrupted() -> Tensor:
    return torch.tensor([[1, 7, 3, 4, 6]])


def score(model: nn.Module, clean: Tensor, corrupted: Tensor, patched: Tensor) -> float:
    with torch.no_grad():
        best, worst = (float(METRIC(model(ids))) for ids in (clean, corrupted))
    return (float(METRIC(patched)) - worst) / (best - worst)


@torch.no_grad()
def by_hand_over_positions(model: Transformer, clean: Tensor, corrupted: Tensor) -> Tensor:
    scores = torch.empty(2, clean.shape[1])
    for layer, block in enumerate(model.blocks):
        stored: list[Tensor] = []
        handle = block.register_forward_hook(lambda module, args, output, stored=stored: stored.append(output.clone()))
        model(clean)
        handle.remove()
        for position in range(clean.shape[1]):

            def put(
                module: nn.Module, args: Any, output: Tensor, stored: list[Tensor] = stored, position: int = position
            ) -> Tensor:
                output = output.clone()
                output[:, position] = stored[0][:, position]
                return output

            handle = block.register_forward_hook(put)
            patched = model(corrupted)
            handle.remove()
            scores[layer, position] = score(model, clean, corrupted, patched)
    return scores


@torch.no_grad()
def by_hand_over_heads(model: Transformer, clean: Tensor, corrupted: Tensor) -> Tensor:
    scores = torch.empty(2, 2)
    for layer, block in enumerate(model.blocks):
        stored: list[Tensor] = []
        handle = block.attn.out.register_forward_pre_hook(lambda module, args, stored=stored: stored.append(args[0]))
        model(clean)
        handle.remove()
        for head in range(2):

            def put(
                module: nn.Module, args: tuple[Tensor], stored: list[Tensor] = stored, head: int = head
            ) -> tuple[Tensor]:
                joined = args[0].clone()
                joined[..., head * 8 : head * 8 + 8] = stored[0][..., head * 8 : head * 8 + 8]
                return (joined,)

            handle = block.attn.out.register_forward_pre_hook(put)
            patched = model(corrupted)
            handle.remove()
            scores[layer, head] = score(model, clean, corrupted, patched)
    return scores


@pytest.mark.parametrize("batch_size", [1, 3, 32])
def test_positions_agree_with_a_loop_over_plain_hooks(
    model: Transformer, clean: Tensor, corrupted: Tensor, batch_size: int
) -> None:
    result = ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC, batch_size=batch_size)
    expected = by_hand_over_positions(model, clean, corrupted)
    torch.testing.assert_close(result.scores, expected, rtol=0, atol=1e-5)
    assert result.points == ("blocks.0.output", "blocks.1.output")
    assert result.columns == (0, 1, 2, 3, 4)


@pytest.mark.parametrize("batch_size", [1, 32])
def test_heads_agree_with_a_loop_over_plain_hooks(
    model: Transformer, clean: Tensor, corrupted: Tensor, batch_size: int
) -> None:
    result = ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC, over="heads", batch_size=batch_size)
    torch.testing.assert_close(result.scores, by_hand_over_heads(model, clean, corrupted), rtol=0, atol=1e-5)
    assert result.points == ("blocks.0.attn.z", "blocks.1.attn.z")


def test_batched_patches_agree_with_one_by_one(model: Transformer, clean: Tensor, corrupted: Tensor) -> None:
    one_by_one, batched = (
        ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC, batch_size=size) for size in (1, 32)
    )
    torch.testing.assert_close(batched.scores, one_by_one.scores, rtol=0, atol=1e-5)


def test_the_last_position_of_the_last_layer_recovers_everything(
    model: Transformer, clean: Tensor, corrupted: Tensor
) -> None:
    result = ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC)
    assert result.scores[1, 4] == pytest.approx(1.0, abs=1e-4)
    assert result.scores[1, :4].tolist() == pytest.approx([0.0] * 4, abs=1e-4)
    with torch.no_grad():
        assert result.clean == pytest.approx(float(METRIC(model(clean))))
        assert result.corrupted == pytest.approx(float(METRIC(model(corrupted))))


def test_several_rows_are_patched_together(model: Transformer) -> None:
    clean = torch.tensor([[1, 2, 3], [4, 5, 6]])
    corrupted = torch.tensor([[1, 7, 9], [4, 8, 6]])
    for batch_size in (1, 4):
        result = ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC, batch_size=batch_size)
        expected = by_hand_over_positions(model, clean, corrupted)
        torch.testing.assert_close(result.scores, expected, rtol=0, atol=1e-5)


def test_it_leaves_no_trace_and_the_mode_as_it_is(model: Transformer, clean: Tensor, corrupted: Tensor) -> None:
    model.blocks[0].train()
    with leaves_no_trace(model):
        result = ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC, at="blocks.*.attn.output")
    assert model.blocks[0].training
    assert not result.scores.requires_grad


def test_an_open_scope_neither_acts_nor_captures(model: Transformer, clean: Tensor, corrupted: Tensor) -> None:
    expected = ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC)
    for isolated in (True, False):
        with HookManager(model, isolated=isolated) as hooks:
            hooks.use(lambda value: value * 0, at="blocks.0.output")
            result = ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC)
            assert (hooks.report().finished, hooks.report().foreign) == (0, 0)
            hooks.run(clean)
        assert torch.equal(result.scores, expected.scores)


def test_an_interrupt_ends_the_sweep_without_a_result(model: Transformer, clean: Tensor, corrupted: Tensor) -> None:
    calls = []

    def interrupted(logits: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return logits[:, -1, 3].mean()

    with leaves_no_trace(model), pytest.raises(KeyboardInterrupt):
        ActivationPatcher(model).sweep(clean, corrupted, metric=interrupted)
    assert len(calls) == 5


def test_nothing_is_written_where_there_is_no_terminal(
    model: Transformer, clean: Tensor, corrupted: Tensor, capfd: pytest.CaptureFixture[str]
) -> None:
    ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("progress", [True, False])
def test_a_terminal_shows_a_bar_if_it_is_wanted(
    model: Transformer,
    clean: Tensor,
    corrupted: Tensor,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *,
    progress: bool,
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC, progress=progress)
    written = capfd.readouterr()
    assert ("patching" in written.err) is progress
    assert written.out == ""


def test_models_that_give_more_than_logits_are_understood(model: Transformer, clean: Tensor, corrupted: Tensor) -> None:
    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: Tensor) -> Output:
            return Output(self.inner(ids))

    expected = ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC)
    result = ActivationPatcher(Wrapped()).sweep(clean, corrupted, metric=METRIC, at="inner.blocks.*.output")
    assert torch.equal(result.scores, expected.scores)


@pytest.mark.parametrize(
    ("other", "options", "message"),
    [
        ([[1, 7, 3, 4]], {}, r"differ in shape, \(1, 5\) and \(1, 4\)"),
        ([[1, 2, 3, 4, 5]], {}, "does not tell the inputs apart"),
        ([[1, 7, 3, 4, 6]], {"metric": lambda logits: logits[0, -1]}, r"a tensor of shape \(16,\)"),
        ([[1, 7, 3, 4, 6]], {"metric": lambda logits: float("nan")}, "the metric gave nan"),
        ([[1, 7, 3, 4, 6]], {"over": "layers"}, "'positions' or 'heads', not 'layers'"),
        ([[1, 7, 3, 4, 6]], {"over": "heads", "at": "blocks.*.output"}, r"'blocks\.0\.output' has no heads"),
        ([[1, 7, 3, 4, 6]], {"at": "embed.positions.output"}, r"'embed\.positions\.output' has no positions"),
    ],
)
def test_what_cannot_be_compared_is_refused(
    model: Transformer, clean: Tensor, other: list[list[int]], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(SweepError, match=message):
        ActivationPatcher(model).sweep(clean, torch.tensor(other), **{"metric": METRIC, **options})


def test_a_pattern_that_matches_nothing_is_refused(model: Transformer, clean: Tensor, corrupted: Tensor) -> None:
    with pytest.raises(UnknownPointError, match=r"layers\.\*\.output"):
        ActivationPatcher(model).sweep(clean, corrupted, metric=METRIC, at="layers.*.output")


def test_the_logit_difference_is_the_mean_over_rows_at_the_last_position() -> None:
    logits = torch.randn(2, 3, 5)
    expected = ((logits[0, 2, 1] - logits[0, 2, 4]) + (logits[1, 2, 1] - logits[1, 2, 4])) / 2
    torch.testing.assert_close(logit_difference(1, 4)(logits), expected)
    per_row = logit_difference(torch.tensor([1, 0]), torch.tensor([4, 2]))(logits)
    torch.testing.assert_close(per_row, ((logits[0, 2, 1] - logits[0, 2, 4]) + (logits[1, 2, 0] - logits[1, 2, 2])) / 2)


@pytest.fixture
def result() -> SweepResult:
    scores = torch.zeros(2, 20)
    scores[1, 7], scores[0, 19], scores[0, 3] = 0.9, 0.5, -0.25
    points = (HookPoint("blocks.0.output"), HookPoint("blocks.1.output"))
    return SweepResult(scores, points, tuple(range(20)), "positions", clean=2.0, corrupted=-1.0)


def test_the_best_patches_come_first(result: SweepResult) -> None:
    first, second = result.best(2)
    assert first == ("blocks.1.output", 7, pytest.approx(0.9))
    assert second == ("blocks.0.output", 19, pytest.approx(0.5))
    assert len(result.best(1000)) == 40
    assert repr(result) == "SweepResult(2 points x 20 positions, best 0.900 at 'blocks.1.output', position 7)"


def test_as_text_it_is_a_table_of_the_best_columns(result: SweepResult) -> None:
    text = str(result)
    assert "recovery by point and position" in text
    assert "8 of 20 positions, those with the highest scores" in " ".join(text.split())
    assert "metric: clean 2, corrupted -1" in text
    header, row = (next(line for line in text.splitlines() if name in line) for name in ("| point", "blocks.1"))
    columns, cells = (re.findall(r"-?[\d.]+(?= )", line.partition("output")[2] or line) for line in (header, row))
    assert dict(zip(columns, cells, strict=True))["7"] == "0.90"
    assert text.isascii()
    console = Console(width=160, record=True, file=StringIO())
    console.print(result)
    assert "blocks.1.output" in console.export_text()


def test_the_heat_map_names_what_it_shows(result: SweepResult, tmp_path: Path) -> None:
    figure = result.plot(tmp_path / "scores.png", labels=[f"t{n}" for n in range(20)])
    axes = figure.axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()] == list(result.points)
    assert [label.get_text() for label in axes.get_xticklabels()] == [f"t{n}" for n in range(20)]
    assert axes.get_xlabel() == "position"
    drawn = axes.images[0].get_array()
    assert drawn is not None
    assert torch.equal(torch.as_tensor(drawn.data), result.scores)
    assert (tmp_path / "scores.png").read_bytes().startswith(b"\x89PNG")


def test_labels_are_one_for_each_column(result: SweepResult) -> None:
    with pytest.raises(SweepError, match="2 labels were given for 20 positions"):
        result.plot(labels=["a", "b"])


def test_without_matplotlib_the_remedy_is_named(result: SweepResult, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'kamui-core\[viz\]'"):
        result.plot()
