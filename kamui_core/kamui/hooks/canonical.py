"""Canonical points: how places are called on every transformer."""

from __future__ import annotations

from typing import Final

from kamui.hooks.points import HookPoint

BLOCK_POINTS: Final = ("attn.pre_softmax", "attn.weights", "attn.output", "ffn.mid", "ffn.output")


def canonical_points(n_layers: int) -> tuple[HookPoint, ...]:
    """Return the canonical points of a decoder-only transformer in firing order.

    `embed.output` (B, S, D); for each block N `blocks.N.attn.pre_softmax` and `blocks.N.attn.weights` (B, H, S, S),
    `blocks.N.attn.output` (B, S, D), `blocks.N.ffn.mid` (B, S, F), `blocks.N.ffn.output` (B, S, D); and last
    `unembed.input` (B, S, D).
    """
    inner = (f"blocks.{layer}.{point}" for layer in range(n_layers) for point in BLOCK_POINTS)
    return tuple(HookPoint(name) for name in ("embed.output", *inner, "unembed.input"))
