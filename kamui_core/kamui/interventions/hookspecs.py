"""The hooks that an intervention may implement, and the two markers.

An implementation takes, by name, only the arguments that it needs: `def activation(self, value)` is as good
as `def activation(self, point, value, call)`. pluggy discovers, specifies and validates; the order of the
callbacks at a point, and the folding of the value through them, are the scope's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import pluggy

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor, nn

    from kamui.hooks.call import Call
    from kamui.hooks.manager import HookManager
    from kamui.hooks.points import HookPoint

PROJECT = "kamui"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Hookspecs(Protocol):
    """What an intervention may implement; every hook is optional, one is required."""

    @hookspec
    def points(self, model: nn.Module) -> str | Iterable[str]:
        """Say at which points the intervention listens; asked once, when it is used.

        Args:
            model: The model of the scope, without the wrappers around it.

        Returns:
            One point or pattern, or several. A place named twice is listened to once.
        """

    @hookspec
    def activation(self, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
        """See, and maybe replace, the value at one point in one call of its module.

        Args:
            point: The point, a `str` with `.module` and `.io`.
            value: The live value, as the callback before this one left it. It must not be written to.
            call: Which call of the module in which forward pass, and where its tokens stand.

        Returns:
            What the model goes on with, of the same shape, dtype and device, or `None` for unchanged.
        """

    @hookspec
    def forward_started(self, call: Call) -> None:
        """Prepare for a forward pass; called before the first point of it fires.

        Args:
            call: The call of the root, which gives the number of the pass.
        """

    @hookspec
    def forward_finished(self, output: object, call: Call) -> None:
        """Take note of a finished forward pass; a pass that ends in an exception is not finished.

        Args:
            output: What the model returned, with every edit in it.
            call: The call of the root.
        """

    @hookspec
    def opened(self, scope: HookManager) -> None:
        """Set up state when the intervention joins a scope, after its options are checked.

        Args:
            scope: The managed scope. The instance belongs to it until `closed`.
        """

    @hookspec
    def closed(self, scope: HookManager) -> None:
        """Let go of state when the scope ends, also by an exception; in reverse order of `use`.

        Args:
            scope: The managed scope, whose hooks are off the model already.
        """
