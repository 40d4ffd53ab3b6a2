"""The keys and values that a `Transformer` has computed already, kept from call to call."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every layer, growing along the sequence.

    Pass the same one to successive calls, each with the tokens that are new::

        cache = KVCache()
        model(prompt, cache=cache)
        model(next_token, cache=cache)
    """

    def __init__(self) -> None:
        self._layers: list[tuple[Tensor, Tensor]] = []

    def get_seq_length(self, layer: int = 0) -> int:
        """Return how many positions a layer holds; 0 before its first update."""
        return self._layers[layer][0].size(-2) if layer < len(self._layers) else 0

    def update(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append new keys and values of a layer and return all of them.

        Args:
            layer: Which layer; a layer's first update comes after those of the layers before it.
            k: New keys (B, H, S, Dh).
            v: New values (B, H, S, Dh).

        Returns:
            All keys and all values so far, each (B, H, Sk, Dh).
        """
        if layer == len(self._layers):
            self._layers.append((k, v))
        else:
            old_k, old_v = self._layers[layer]  # (B, H, Sk - S, Dh)
            self._layers[layer] = (
                torch.cat([old_k, k], dim=-2),  # (B, H, Sk, Dh)
                torch.cat([old_v, v], dim=-2),  # (B, H, Sk, Dh)
            )
        return self._layers[layer]
