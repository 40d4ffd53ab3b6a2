"""Scaled dot-product attention, step by step, as the fused kernel's contract states it.

Source: the reference implementation in the documentation of `torch.nn.functional.scaled_dot_product_attention`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

_SIGNATURE: Final = inspect.Signature(
    [
        *(inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in ("query", "key", "value")),
        *(
            inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
            for name, default in (
                ("attn_mask", None),
                ("dropout_p", 0.0),
                ("is_causal", False),
                ("scale", None),
                ("enable_gqa", False),
            )
        ),
    ]
)


@dataclasses.dataclass(frozen=True)
class AttentionInputs:
    """The arguments of one call of the fused kernel.

    Attributes:
        query: (B, H, Sq, Dh).
        key: (B, Hkv, Sk, Dh).
        value: (B, Hkv, Sk, Dh).
        attn_mask: Bool or float, broadcastable to (B, H, Sq, Sk).
        dropout_p: Probability with which a weight is dropped.
        is_causal: Mask what lies after each query, aligned at the top left.
        scale: Factor on the scores; 1/sqrt(Dh) when None.
        enable_gqa: Each key/value head serves H / Hkv query heads.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    @classmethod
    def bind(cls, args: tuple[Any, ...], kwargs: dict[str, Any]) -> AttentionInputs:
        """Read the arguments as the kernel's signature does."""
        return cls(**_SIGNATURE.bind(*args, **kwargs).arguments)

    def fused(self) -> Tensor:
        """Call the fused kernel: (B, H, Sq, Dh)."""
        return F.scaled_dot_product_attention(
            self.query,
            self.key,
            self.value,
            attn_mask=self.attn_mask,
            dropout_p=self.dropout_p,
            is_causal=self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )

    def scores(self) -> Tensor:
        """Return the scaled scores before the mask, (B, H, Sq, Sk)."""
        scale = 1 / math.sqrt(self.query.shape[-1]) if self.scale is None else self.scale
        key = self._for_each_query_head(self.key)
        return (self.query * scale) @ key.transpose(-2, -1)  # (B, H, Sq, Sk)

    def weights(self, scores: Tensor) -> Tensor:
        """Return the weights that the scores lead to, (B, H, Sq, Sk); rows without any allowed key are 0."""
        masked = self._masked(scores)
        somewhere = masked.detach().amax(-1, keepdim=True) > -torch.inf  # (B, H, Sq, 1)
        finite = masked.clamp(min=torch.finfo(masked.dtype).min)
        weights = torch.softmax(finite, dim=-1, dtype=torch.float32 if masked.dtype.itemsize < 4 else None)
        return (weights * somewhere).to(scores.dtype)  # (B, H, Sq, Sk)

    def mix(self, weights: Tensor) -> Tensor:
        """Return the values weighted, (B, H, Sq, Dh), with dropout on the weights."""
        return F.dropout(weights, self.dropout_p) @ self._for_each_query_head(self.value)

    def _masked(self, scores: Tensor) -> Tensor:
        if self.is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores + _additive(allowed, scores.dtype)
        mask = _plain(self.attn_mask, scores.device)
        if mask is None:
            return scores
        return scores + (_additive(mask, scores.dtype) if mask.dtype is torch.bool else mask)

    def _for_each_query_head(self, heads: Tensor) -> Tensor:
        if not self.enable_gqa:
            return heads
        return heads.repeat_interleave(self.query.shape[-3] // heads.shape[-3], dim=-3)


def _plain(mask: Tensor | None, device: torch.device) -> Tensor | None:
    # Whoever made a causal bias has imported its module, which takes torch a second.
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is not None and isinstance(mask, bias.CausalBias):
        materialized: Tensor = mask._materialize(device)
        return materialized
    return mask


def _additive(allowed: Tensor, dtype: torch.dtype) -> Tensor:
    nothing = torch.zeros(allowed.shape, dtype=dtype, device=allowed.device)
    return nothing.masked_fill(~allowed, -torch.inf)
