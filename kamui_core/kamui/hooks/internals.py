"""The quantities inside one running call of an attention module, and who listens to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kamui.errors import AttentionError
from kamui.hooks.call import Call
from kamui.hooks.chain import fold
from kamui.hooks.checkpointing import regions
from kamui.hooks.gradients import Line, has_graph, watch_inside
from kamui.hooks.points import GRADIENT_PREFIX

if TYPE_CHECKING:
    from kamui.hooks.layout import Layout


class Internals:
    """Hands each quantity to those who listen to it.

    Args:
        lines: The ports inside attention, outer scopes first, and the call that each belongs to.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self.is_claimed = False

    def hears(self, *ios: str) -> bool:
        """Tell whether anybody listens to one of these quantities, or to the gradient of one."""
        return any(port.io.removeprefix(GRADIENT_PREFIX) in ios for port, _ in self._lines)

    def needs_path(self, io: str, tensor: Tensor) -> bool:
        """Tell whether somebody waits for the gradient of a quantity, which must then be on the way to the output."""
        awaited = any(port.io == GRADIENT_PREFIX + io for port, _ in self._lines)
        return awaited and (has_graph(tensor) or bool(regions()))

    def emit(self, io: str, tensor: Tensor, layout: Layout) -> Tensor:
        """Show a quantity to its listeners, and return what they leave: `tensor` itself where they leave it."""
        if not self.hears(io):
            return tensor
        original = value = layout.show(tensor)
        for port, entry in self._lines:
            if port.io == io:
                value = fold(port.listeners, value, Call(entry, original))
        awaiting = [line for line in self._lines if line[0].io == GRADIENT_PREFIX + io]
        if awaiting:
            # The same tensor may be query, key and value.
            watched = watch_inside(value, awaiting, alias=io in ("q", "k", "v"))
            if watched is not original or value is not tensor:
                return layout.put_back(watched, tensor)
        return tensor if value is original else layout.put_back(value, tensor)

    def claim(self) -> None:
        """Note that the module computes attention.

        Raises:
            AttentionError: It did so already in this call.
        """
        if self.is_claimed and self._lines:
            raise self.refusal(
                "is not one value: its module computes attention more than once in a call; "
                "name the module inside it that computes one"
            )
        self.is_claimed = True

    def refusal(self, why: str) -> AttentionError:
        """Return the error that says why a point has no value."""
        return AttentionError(f"point {str(self._lines[0][0].listeners[0].point)!r} {why}")
