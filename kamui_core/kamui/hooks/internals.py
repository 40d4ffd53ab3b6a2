"""The quantities inside one running call of an attention module, and who listens to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from kamui.errors import AttentionError
from kamui.hooks.call import Call
from kamui.hooks.chain import fold

if TYPE_CHECKING:
    from kamui.hooks.layout import Layout
    from kamui.hooks.passes import Entry
    from kamui.hooks.ports import Port

Line = tuple["Port", "Entry"]


class Internals:
    """Hands each quantity to those who listen to it.

    Args:
        lines: The ports inside attention, outer scopes first, and the call that each belongs to.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        self._lines = lines
        self.is_claimed = False

    def hears(self, *ios: str) -> bool:
        """Tell whether anybody listens to one of these quantities."""
        return any(port.io in ios for port, _ in self._lines)

    def emit(self, io: str, tensor: Tensor, layout: Layout) -> Tensor:
        """Show a quantity to its listeners, and return what they leave: `tensor` itself where they leave it."""
        if not self.hears(io):
            return tensor
        original = value = layout.show(tensor)
        for port, entry in self._lines:
            if port.io == io:
                value = fold(port.listeners, value, Call(entry, original))
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
