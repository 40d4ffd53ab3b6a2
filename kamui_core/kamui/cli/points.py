"""`kamui points`: which hook points a model has, with shapes and dtypes."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from kamui import bundled_configs
from kamui.cli.terminal import console, plain

if TYPE_CHECKING:
    from rich.table import Table

    from kamui.hooks import PointDescription
    from kamui.model import ModelConfig


@click.command("points")
@click.argument("config")
@click.option("--all", "every", is_flag=True, help="Every addressable point, not the canonical ones alone.")
@click.option("--batch", type=click.IntRange(min=1), default=1, show_default=True, help="Rows, B.")
@click.option("--length", type=click.IntRange(min=1), help="Positions, S.  [default: 16, or the context's length]")
def points_command(config: str, every: bool, batch: int, length: int | None) -> None:
    """Show the hook points of the model in CONFIG.

    CONFIG is a YAML file, or the name of a config that comes along, such as "small" or "configs/small.yaml".
    """
    from kamui.model import ModelConfig

    path = find_config(config)
    sizes = ModelConfig.from_yaml(path)
    length = min(16, sizes.context_length) if length is None else length
    if length > sizes.context_length:
        raise click.BadParameter(
            f"{length} is more than the context of {sizes.context_length} positions", param_hint="'--length'"
        )
    described = describe(sizes, batch, length)
    out = console()
    out.print(plain(f"{path}: {_facts(sizes)}"))
    out.print(_table(described if every else _canonical(sizes, described), batch, length))
    if not every:
        out.print(plain(f"{len(described)} points are addressable, --all shows them", style="dim"))


def find_config(name: str) -> Path:
    """Return the config at a path, or the one that comes along under that path or bare name.

    Raises:
        ConfigError: There is none; the message lists what comes along.
    """
    bare = f"configs/{name}.yaml"
    if not Path(name).exists() and bare in bundled_configs.names():
        return bundled_configs.find(bare)
    return bundled_configs.find(name)


def describe(config: ModelConfig, batch: int, length: int) -> list[PointDescription]:
    """Return every addressable point of the reference model of that size, without making its weights."""
    import torch

    from kamui.hooks import HookRegistry
    from kamui.model import Transformer

    with torch.device("meta"):
        model = Transformer(config)
        token_ids = torch.zeros(batch, length, dtype=torch.long)  # (B, S)
    return HookRegistry.describe(model, token_ids)


def _canonical(config: ModelConfig, described: list[PointDescription]) -> list[PointDescription]:
    from kamui.hooks import HookRegistry

    by_point = {each.point: each for each in described}
    return [by_point[point] for point in HookRegistry.all_points(config)]


def _facts(config: ModelConfig) -> str:
    return (
        f"{config.n_layers} layers, D {config.d_model}, H {config.n_heads}, F {config.d_ff}, "
        f"V {config.vocab_size}, context {config.context_length}"
    )


def _table(described: list[PointDescription], batch: int, length: int) -> Table:
    from rich import box
    from rich.table import Table

    table = Table("point", "shape", "dtype", box=box.SIMPLE_HEAD, title_justify="left", pad_edge=False)
    table.title = f"{len(described)} points, for token ids of shape ({batch}, {length})"
    for each in described:
        shape = plain(each.reason, "yellow") if each.shape is None else plain(str(each.shape))
        table.add_row(plain(each.point), shape, str(each.dtype or "").removeprefix("torch."))
    return table
