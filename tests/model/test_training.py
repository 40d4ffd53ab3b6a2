from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from torch import Tensor

from kamui.model import ModelConfig, Transformer
from kamui.model.pretrained import load_checkpoint
from kamui.model.training import main, repeated_batch, token_losses, train

CONFIG = ModelConfig(1, 16, 2, 16, 40, 48)


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return repeated_batch(CONFIG, torch.Generator().manual_seed(0), batch_size=200)


def test_every_row_repeats_a_segment_of_distinct_tokens(batch: tuple[Tensor, Tensor]) -> None:
    token_ids, sizes = batch
    assert token_ids.shape == (200, 48)
    assert (sizes.min(), sizes.max()) == (8, 32)
    for row, size in zip(token_ids.tolist(), sizes.tolist(), strict=True):
        assert len(set(row[:size])) == size
        assert row == (row[:size] * 6)[:48]
    assert set(token_ids.flatten().tolist()) == set(range(40))


def test_the_same_seed_gives_the_same_batch(batch: tuple[Tensor, Tensor]) -> None:
    token_ids, sizes = batch
    again = repeated_batch(CONFIG, torch.Generator().manual_seed(0), batch_size=200)
    assert torch.equal(token_ids, again[0])
    assert torch.equal(sizes, again[1])
    other, _ = repeated_batch(CONFIG, torch.Generator().manual_seed(1), batch_size=200)
    assert not torch.equal(token_ids, other)


def test_the_repeated_part_is_what_an_ideal_copier_knows(batch: tuple[Tensor, Tensor]) -> None:
    token_ids, sizes = batch
    _, repeated = token_losses(Transformer(CONFIG), token_ids, sizes)
    for row, mask in zip(token_ids.tolist(), repeated.tolist(), strict=True):
        known = [row[place - 1] in row[: place - 1] for place in range(1, 48)]
        assert mask == known


def test_the_losses_are_those_of_the_next_tokens(batch: tuple[Tensor, Tensor]) -> None:
    token_ids, sizes = batch
    model = Transformer(CONFIG)
    losses, _ = token_losses(model, token_ids, sizes)
    expected = F.cross_entropy(model(token_ids)[:, :-1].flatten(0, 1), token_ids[:, 1:].flatten())
    torch.testing.assert_close(losses.mean(), expected)


def trained(config: ModelConfig, steps: int) -> tuple[Transformer, list[tuple[float, float]]]:
    torch.manual_seed(0)
    model = Transformer(config)
    return model, list(train(model, steps, torch.Generator().manual_seed(0)))


def test_training_lowers_the_loss_of_the_repeated_part() -> None:
    _, losses = trained(ModelConfig(2, 64, 2, 64, 40, 40), 100)
    repeated = torch.tensor(losses)[:, 1]  # (steps,)
    assert repeated[0].item() == pytest.approx(math.log(40), abs=0.1)
    assert repeated[-5:].mean() < repeated[:5].mean() - 0.1


def test_the_same_seed_gives_the_same_weights() -> None:
    (one, losses), (other, other_losses) = trained(CONFIG, 5), trained(CONFIG, 5)
    assert losses == other_losses
    torch.testing.assert_close(one.state_dict(), other.state_dict(), atol=0, rtol=0)


def test_the_script_writes_a_checkpoint_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    threads = torch.get_num_threads()
    try:
        result = CliRunner().invoke(main, ["--steps", "1", "--out", "tiny.safetensors"], catch_exceptions=False)
    finally:
        torch.set_num_threads(threads)
    assert result.output.startswith("step     1   loss: first part 5.5")
    assert "wrote tiny.safetensors (1.2" in result.output
    model = load_checkpoint("tiny.safetensors")
    assert model.config == ModelConfig.from_yaml("configs/nano.yaml")
    assert not model.training
