"""Train the `nano` checkpoint: `python -m kamui.model.training --out nano.safetensors`.

The model learns to continue sequences in which a random segment repeats, which takes a head that attends to
what came after the token's earlier occurrence. On one machine and one thread the result is always the same.

Source: Olsson et al. 2022, "In-context Learning and Induction Heads".
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import click
import torch
import torch.nn.functional as F
from torch import Tensor

from kamui.model.config import ModelConfig
from kamui.model.pretrained import save_checkpoint
from kamui.model.transformer import Transformer

SHORTEST, LONGEST = 8, 32
BATCH_SIZE = 32
LEARNING_RATE = 1e-3
FIRST_WEIGHT = 0.1
STEPS = 1000
SEED = 0


def repeated_batch(
    config: ModelConfig, generator: torch.Generator, batch_size: int = BATCH_SIZE
) -> tuple[Tensor, Tensor]:
    """Draw sequences that each repeat a random segment of 8 to 32 distinct tokens to the end of the context.

    Args:
        config: Tells the vocabulary, of 32 tokens at least, and the context length, S.
        generator: Where randomness comes from; the same seed gives the same batch.
        batch_size: Number of sequences, B.

    Returns:
        Token ids (B, S) and the length of each row's segment (B,).
    """
    sizes = torch.randint(SHORTEST, LONGEST + 1, (batch_size,), generator=generator)  # (B,)
    tokens = torch.rand(batch_size, config.vocab_size, generator=generator).argsort(-1)  # (B, V)
    places = torch.arange(config.context_length) % sizes[:, None]  # (B, S)
    return tokens.gather(1, places), sizes  # (B, S), (B,)


def token_losses(model: Transformer, token_ids: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the loss of every token after the first, and which of them can be known.

    Args:
        model: The model.
        token_ids: Token ids (B, S) as `repeated_batch` draws them.
        sizes: The length of each row's segment (B,).

    Returns:
        The losses (B, S - 1), and a mask (B, S - 1) of the repeated part: everything after the first token of
        the second occurrence. The segment itself is random, and nothing tells beforehand where it ends.
    """
    logits = model(token_ids[:, :-1])  # (B, S - 1, V)
    losses = F.cross_entropy(logits.transpose(1, 2), token_ids[:, 1:], reduction="none")  # (B, S - 1)
    repeated = torch.arange(1, token_ids.size(1)) > sizes[:, None]  # (B, S - 1)
    return losses, repeated


def train(model: Transformer, steps: int, generator: torch.Generator) -> Iterator[tuple[float, float]]:
    """Train a model in place, yielding the mean loss of the first and of the repeated part of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    model.train()
    for _ in range(steps):
        losses, repeated = token_losses(model, *repeated_batch(model.config, generator))  # (B, S - 1) each
        first_loss, repeated_loss = losses[~repeated].mean(), losses[repeated].mean()  # (), ()
        optimizer.zero_grad()
        # What nobody can know is noise to learn from, and counts just enough to keep the model from betting on it.
        torch.autograd.backward(repeated_loss + FIRST_WEIGHT * first_loss)
        optimizer.step()
        yield first_loss.item(), repeated_loss.item()


@click.command()
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), default=Path("nano.safetensors"))
@click.option("--steps", type=click.IntRange(min=1), default=STEPS, show_default=True)
def main(out: Path, steps: int) -> None:
    """Train the model of configs/nano.yaml and write it to a safetensors file."""
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    model = Transformer(ModelConfig.from_yaml("configs/nano.yaml"))
    generator = torch.Generator().manual_seed(SEED)
    first = repeated = float("nan")
    for step, (first, repeated) in enumerate(train(model, steps, generator), start=1):
        if step % 50 == 0 or step == steps:
            click.echo(f"step {step:5d}   loss: first part {first:.4f}, repeated part {repeated:.4f}")
    facts = {"steps": steps, "seed": SEED, "batch_size": BATCH_SIZE, "learning_rate": LEARNING_RATE}
    facts |= {"first_loss": first, "repeated_loss": repeated}
    save_checkpoint(model.eval(), out, facts)
    click.echo(f"wrote {out} ({out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    main()
