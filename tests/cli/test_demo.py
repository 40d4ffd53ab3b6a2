"""The demo: what it measures is compared with plain torch, what it says depends on what was measured."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console
from torch import Tensor

from kamui.cli.demo.heads import Heads
from kamui.cli.demo.knockout import loss_without
from kamui.cli.demo.proof import digest_of
from kamui.cli.demo.sequences import repeated_sequences
from kamui.cli.demo.steering import random_prompts
from kamui.cli.demo.story import tell
from kamui.cli.demo.study import Study, conduct
from kamui.cli.demo.tracing import absent_tokens
from kamui.hooks import inspect
from kamui.model import ModelConfig, Transformer, load_pretrained

if TYPE_CHECKING:
    from click.testing import Result

    Run = Callable[..., Result]


@pytest.fixture(scope="module")
def model() -> Transformer:
    return load_pretrained("nano")


@pytest.fixture(scope="module")
def study(model: Transformer) -> Study:
    return conduct(model, 0)


def told(study: Study) -> str:
    text = io.StringIO()
    tell(Console(file=text, width=100, highlight=False, markup=False), study)
    return text.getvalue()


@torch.no_grad()
def test_the_loss_is_that_of_plain_torch(model: Transformer, study: Study) -> None:
    ids, n = study.sequences
    logits = model(ids)
    first = F.cross_entropy(logits[:, : n - 1].flatten(0, 1), ids[:, 1:n].flatten())
    second = F.cross_entropy(logits[:, n:-1].flatten(0, 1), ids[:, n + 1 :].flatten())
    assert study.knockouts.nothing == pytest.approx((first.item(), second.item()), rel=1e-5)


@torch.no_grad()
def test_knocking_a_head_out_equals_editing_what_is_projected(model: Transformer, study: Study) -> None:
    head, (ids, n) = study.heads.best, study.sequences
    width = model.config.d_head
    part = slice(head.number * width, (head.number + 1) * width)

    def edit(module: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        joined = args[0].clone()
        joined[..., part] = joined[..., part].mean((0, 1))
        return (joined,)

    handle = model.get_submodule(f"{head.module}.out").register_forward_pre_hook(edit)
    try:
        logits = model(ids)
    finally:
        handle.remove()
    second = F.cross_entropy(logits[:, n:-1].flatten(0, 1), ids[:, n + 1 :].flatten())
    assert study.knockouts.best.second == pytest.approx(second.item(), rel=1e-4)


@torch.no_grad()
def test_the_lens_ends_with_what_the_model_says(model: Transformer, study: Study) -> None:
    ids, n = study.sequences
    chances = model(ids)[:, n:-1].softmax(-1)
    right = chances.gather(-1, ids[:, n + 1 :, None]).squeeze(-1)
    torch.testing.assert_close(study.readings[-1].probabilities, right)


def test_the_checkpoint_shows_what_the_demo_is_about(study: Study) -> None:
    found = study.knockouts
    assert study.heads.best in study.heads.induction
    assert found.best.second > 2 * found.control.second
    assert found.cut.second > 10 * found.cut_beside.second
    assert study.steered.at(1.0).other > 0.5 > study.steered.control.other
    assert "-> no:" not in told(study)


def test_nothing_is_left_on_the_model(model: Transformer, study: Study) -> None:
    assert study.left_no_trace
    assert inspect(model) == []
    assert study.after.digest == digest_of(load_pretrained("nano"))


def test_a_model_that_learned_nothing_is_told_plainly() -> None:
    torch.manual_seed(0)
    config = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=16, vocab_size=64, context_length=64)
    text = told(conduct(Transformer(config).eval(), 0))
    assert "-> no: the model does not tell the repetition from the rest" in text
    assert "-> no: no head looks mostly at what followed" in text
    assert "-> no: steering does not turn the model" in text
    assert "-> nothing is left behind" in text


def test_a_model_that_was_changed_is_told_plainly(study: Study) -> None:
    changed = dataclasses.replace(study, after=study.after._replace(logits=study.after.logits + 1))
    assert not changed.left_no_trace
    assert "-> no: the model is not what it was" in told(changed)
    assert "NOT the same" in told(changed)


def test_the_digest_tells_one_bit(model: Transformer) -> None:
    other = load_pretrained("nano")
    with torch.no_grad():
        other.final_ln.bias[0] = other.final_ln.bias[0].nextafter(torch.tensor(9.0))
    assert digest_of(other) != digest_of(model)


def test_one_seed_gives_one_study(model: Transformer, study: Study) -> None:
    assert told(conduct(model, 0)) == told(study)
    assert told(conduct(model, 1)) != told(study)


def test_without_heads_to_knock_out_nothing_changes(model: Transformer, study: Study) -> None:
    with torch.no_grad():
        assert loss_without(model, Heads(()).ranked, study.sequences) == study.knockouts.nothing


def test_sequences_repeat_distinct_tokens() -> None:
    ids, n = repeated_sequences(40, 8, 12, torch.Generator().manual_seed(0))
    assert torch.equal(ids[:, :n], ids[:, n:])
    assert all(row.unique().numel() == n for row in ids[:, :n])


def test_prompts_hold_both_tokens_once_and_neither_at_the_end() -> None:
    prompts = random_prompts(40, 3, 7, torch.Generator().manual_seed(0))
    for row, after in zip(prompts.segments.tolist(), prompts.after(7).tolist(), strict=True):
        assert (row.count(3), row.count(7), len(set(row))) == (1, 1, len(row))
        assert row[row.index(7) + 1] == after
        assert row.index(3) < len(row) - 1


def test_a_corrupted_token_occurs_nowhere_else() -> None:
    ids = torch.tensor([[0, 1, 2], [3, 1, 0]])
    assert absent_tokens(ids, 4, torch.Generator().manual_seed(0)).tolist() == [3, 2]


def test_the_command_prints_the_study_and_fits_a_terminal() -> None:
    command = [sys.executable, "-m", "kamui", "demo", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "7  Is the model what it was?" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 100


def test_pictures_are_written(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'viz' is not installed")
    result = run("demo", "--out", str(tmp_path / "new" / "pictures"))
    assert result.exit_code == 0, result.output
    pictures = sorted((tmp_path / "new" / "pictures").iterdir())
    assert [picture.name for picture in pictures] == ["attention.png", "lens.png", "trace.png"]
    assert all(picture.read_bytes().startswith(b"\x89PNG") for picture in pictures)
    assert "attention.png" in result.output


def test_pictures_without_matplotlib_are_refused_at_once(tmp_path: Path) -> None:
    program = "import sys; sys.modules['matplotlib'] = None; from kamui.cli import main; main()"
    command = [sys.executable, "-c", program, "demo", "--out", str(tmp_path / "pictures")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "Error: option '--out' needs matplotlib, which is not installed; "
        "install it with: pip install 'kamui-core[viz]'\n"
    )
    assert not (tmp_path / "pictures").exists()


def test_a_folder_that_cannot_be_made_is_one_line(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra 'viz' is not installed")
    (tmp_path / "file").write_text("")
    result = run("demo", "--out", str(tmp_path / "file" / "pictures"))
    assert result.exit_code == 2
    assert result.stderr.startswith("Error: file ")
    assert result.stderr.count("\n") == 1
