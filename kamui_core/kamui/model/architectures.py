"""The reference model's architecture: its module paths are the canonical names."""

from __future__ import annotations

from torch import Tensor, nn

from kamui.hooks.architecture import Architecture, Target
from kamui.hooks.canonical import canonical_points
from kamui.hooks.points import HookPoint
from kamui.model.transformer import Transformer


def reference(model: nn.Module) -> Architecture | None:
    """Recognise the reference `Transformer`."""
    if not isinstance(model, Transformer):
        return None
    n_layers = model.config.n_layers
    blocks = [f"blocks.{layer}" for layer in range(n_layers)]
    mids = {f"{block}.ffn": HookPoint(f"{block}.ffn.down.input") for block in blocks}
    points = canonical_points(n_layers)
    parts = [part for block in blocks for part in (block, f"{block}.attn", f"{block}.ffn")]
    return Architecture(
        name="reference",
        points={point: Target(mids[point.module] if point.io == "mid" else point) for point in points},
        modules={path: path for path in ("embed", *parts, "final_ln", "unembed")},
        attentions=tuple(f"{block}.attn" for block in blocks),
        feed_forwards=mids,
        readout=_readout,
    )


def _readout(model: nn.Module, residual: Tensor) -> Tensor:
    assert isinstance(model, Transformer)
    logits: Tensor = model.unembed(model.final_ln(residual))  # (..., V)
    return logits
