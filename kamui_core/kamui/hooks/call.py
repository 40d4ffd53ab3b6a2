"""Calls: what a callback may know about the call of a module that it is part of."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from torch import Tensor, nn

    from kamui.hooks.passes import Entry, ForwardPass
    from kamui.hooks.sequence import SequenceFacts


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """One call of one module in one forward pass."""

    forward_pass: ForwardPass
    index: int
    module: nn.Module
    facts: SequenceFacts | None


class Call:
    """What a callback may know about the call that it is part of.

    Attributes:
        forward: Which forward pass of the scope this is, from 0.
        index: Which call of this module in the pass this is, from 0.
        module: The module.
        original: The value as the module gave it, before any intervention; at a gradient point the gradient as it came.
        recomputing: True while autograd runs the module again, as activation checkpointing does.
    """

    __slots__ = ("_entry", "missed", "original")

    in_backward: ClassVar[bool] = False

    def __init__(self, entry: Entry, original: Tensor | None = None) -> None:
        self._entry = entry
        self.original = original
        self.missed: bool | None = None

    def note_positions(self, *, found: bool) -> None:
        """Note whether positions that an intervention asks for are in this call; the report counts where none was."""
        self.missed = self.missed is not False and not found

    @property
    def origin(self) -> Origin | Entry:
        """The call, as the core knows it."""
        return self._entry

    @property
    def module(self) -> nn.Module:
        """The module."""
        return self.origin.module

    @property
    def index(self) -> int:
        """Which call of this module in the pass this is, from 0."""
        return self.origin.index

    @property
    def forward_pass(self) -> ForwardPass:
        """The forward pass, as the core knows it."""
        return self.origin.forward_pass

    @property
    def forward(self) -> int:
        """Which forward pass of the scope this is, from 0."""
        return self.forward_pass.index

    @property
    def recomputing(self) -> bool:
        """True while autograd runs the module again, as activation checkpointing does."""
        return self.forward_pass.recomputing

    @property
    def positions(self) -> Tensor | None:
        """The position of each token of this call among the real tokens of its row, (B, S); -1 for padding.

        None where the pass has no sequence that could be counted.
        """
        facts = self.origin.facts
        return None if facts is None else facts.positions()

    @property
    def key_positions(self) -> Tensor | None:
        """The same for the keys, cached ones included, (B, Sk)."""
        facts = self.origin.facts
        return None if facts is None else facts.key_positions()

    @property
    def prompt_lengths(self) -> Tensor | None:
        """How many real tokens each row's prompt has, (B,), or None where that cannot be known."""
        facts = self.origin.facts
        return None if facts is None else facts.prompt_lengths()
