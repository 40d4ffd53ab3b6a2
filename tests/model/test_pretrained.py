from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

import kamui.model.pretrained
from kamui.errors import ConfigError
from kamui.model import ModelConfig, Transformer, load_pretrained
from kamui.model.pretrained import load_checkpoint, save_checkpoint
from kamui.model.training import repeated_batch, token_losses

CHECKPOINT = Path(kamui.model.pretrained.__file__).parent / "checkpoints" / "nano.safetensors"


@pytest.fixture(scope="module")
def nano() -> Transformer:
    return load_pretrained()


@pytest.fixture(scope="module")
def batch() -> tuple[Tensor, Tensor]:
    config = ModelConfig.from_yaml("configs/nano.yaml")
    return repeated_batch(config, torch.Generator().manual_seed(12345), batch_size=32)


def layer_1_weights(model: Transformer, token_ids: Tensor) -> Tensor:
    """Compute the second layer's attention weights (B, H, S, S) by hand."""
    block = model.blocks[1]
    with torch.no_grad():
        x = model.blocks[0](model.embed(token_ids))  # (B, S, D)
        q, k, _ = block.attn.qkv(block.ln1(x)).split(128, dim=-1)  # (B, S, D)
        q, k = (part.reshape(*part.shape[:2], 4, 32).permute(0, 2, 1, 3) for part in (q, k))  # (B, H, S, Dh)
        scores = q @ k.mT / 32**0.5  # (B, H, S, S)
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)  # (S, S)
        return scores.masked_fill(later, -torch.inf).softmax(-1)  # (B, H, S, S)


def test_it_is_in_eval_mode_with_the_config_that_comes_along(nano: Transformer) -> None:
    assert not any(module.training for module in nano.modules())
    assert nano.config == ModelConfig.from_yaml("configs/nano.yaml")
    assert nano.unembed.weight is nano.embed.tokens.weight


def test_it_has_learnt_to_continue_what_repeats(nano: Transformer, batch: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        losses, repeated = token_losses(nano, *batch)  # (B, S - 1)
    assert losses[repeated].mean() < 0.05
    assert losses[~repeated].mean() == pytest.approx(5.55, abs=0.2)


def test_generation_goes_on_repeating(nano: Transformer) -> None:
    segment = [200, 3, 77, 150, 9, 31, 254, 18, 66, 120, 5, 98]
    generated = nano.generate(torch.tensor([segment + segment[:3]]), 30)
    assert generated[0].tolist() == (segment * 4)[:45]


def test_the_second_layer_attends_to_what_came_after_the_earlier_occurrence(
    nano: Transformer, batch: tuple[Tensor, Tensor]
) -> None:
    token_ids, sizes = batch
    weights = layer_1_weights(nano, token_ids)  # (B, H, S, S)
    scores = torch.stack(
        [
            weights[row, :, torch.arange(size, 2 * size), torch.arange(1, size + 1)].mean(-1)  # (H,)
            for row, size in enumerate(sizes.tolist())
        ]
    ).mean(0)  # (H,)
    assert scores.max() > 0.9


def test_the_file_is_small_and_holds_the_tied_weight_once() -> None:
    assert CHECKPOINT.stat().st_size <= 1_500_000
    with safe_open(CHECKPOINT, framework="pt") as file:
        shapes = [tuple(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118
        facts = json.loads(file.metadata()["kamui"])["training"]
    assert shapes.count((256, 128)) == 3  # the tied weight and the first map of each feed-forward
    assert facts["repeated_loss"] < 0.05


def test_a_checkpoint_reads_back_as_it_was_written(tmp_path: Path) -> None:
    model = Transformer(ModelConfig(1, 16, 2, 16, 40, 48, "sinusoidal", 0.1))
    save_checkpoint(model, tmp_path / "x.safetensors", {"steps": 0})
    save_checkpoint(model, tmp_path / "y.safetensors", {"steps": 0})
    assert (tmp_path / "x.safetensors").read_bytes() == (tmp_path / "y.safetensors").read_bytes()
    again = load_checkpoint(tmp_path / "x.safetensors")
    assert again.config == model.config
    torch.testing.assert_close(again.state_dict(), model.state_dict(), atol=0, rtol=0)


def test_an_unknown_name_lists_what_comes_along() -> None:
    with pytest.raises(ConfigError) as caught:
        load_pretrained("nanno")
    assert str(caught.value) == "no checkpoint 'nanno' comes along; did you mean 'nano'? (there is 'nano')"
