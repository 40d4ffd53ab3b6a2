"""Whether a model is still what it was."""

from __future__ import annotations

import ctypes
import hashlib
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Compared:
    """A model before a study and after it.

    Attributes:
        before: The model before any of it.
        after: The model after all of it.
    """

    before: Snapshot
    after: Snapshot

    @property
    def same_logits(self) -> bool:
        """Whether the model gives the same logits as before, bit for bit."""
        return torch.equal(self.before.logits, self.after.logits)

    @property
    def same_state(self) -> bool:
        """Whether the state dict is the same, byte for byte."""
        return self.before.digest == self.after.digest

    @property
    def same_hooks(self) -> bool:
        """Whether the hooks on the model are those that were there before."""
        return self.before.hooks == self.after.hooks

    @property
    def left_no_trace(self) -> bool:
        """Whether the model is what it was."""
        return self.same_logits and self.same_state and self.same_hooks


def snapshot(model: nn.Module, token_ids: Tensor) -> Snapshot:
    """Take down a model's logits for token ids (B, S), its state and its hooks."""
    return Snapshot(model(token_ids), digest_of(model), tuple(inspect(model)))


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of every name, dtype, shape and byte of the state dict."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        data = tensor.detach().cpu().contiguous()
        digest.update(ctypes.string_at(data.data_ptr(), data.nbytes))
    return digest.hexdigest()
