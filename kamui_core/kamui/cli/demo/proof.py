"""Whether a model is still what it was."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor, nn

from kamui.hooks import InstalledHook, inspect


class Snapshot(NamedTuple):
    """What can be told of a model from outside.

    Attributes:
        logits: What it gives for one input, (B, S, V).
        digest: The SHA-256 of its state dict.
        hooks: The hooks that are on it.
    """

    logits: Tensor
    digest: str
    hooks: tuple[InstalledHook, ...]


def snapshot(model: nn.Module, token_ids: Tensor) -> Snapshot:
    """Take down a model's logits for token ids (B, S), its state and its hooks."""
    return Snapshot(model(token_ids), digest_of(model), tuple(inspect(model)))


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of every name, dtype, shape and byte of the state dict."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(bytes(tensor.detach().cpu().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()
