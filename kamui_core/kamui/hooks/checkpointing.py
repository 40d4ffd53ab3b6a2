"""Activation checkpointing: which parts of a model autograd will compute again, and what may not be missing then.

`torch.utils.checkpoint` keeps the function that it repeats: of the reentrant kind in the context of its autograd
function, of the other in a frame of its own. When an intervention changes a value in such a part, that function is
wrapped; repeated after the scope has closed, without the intervention, it would give wrong gradients in silence.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointFunction, checkpoint

from kamui.errors import ScopeClosedError

if TYPE_CHECKING:
    from kamui.hooks.passes import ForwardPass, PassLog

_REENTRANT: Final = CheckpointFunction.forward.__code__
_FILE: Final = _REENTRANT.co_filename
_ENTRANCE: Final = checkpoint.__name__


class Edit(NamedTuple):
    """The first value that a scope changed in one checkpointed part."""

    label: str
    point: str


class _Guarded:
    """A repeated function that refuses to run without the scopes which acted in it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.edits: dict[PassLog, Edit] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for log, (label, point) in self.edits.items():
            if log.is_closed:
                raise ScopeClosedError(
                    f"intervention {label!r} changed point {point!r} in a checkpointed part of the model, and backward "
                    f"has to compute that part again, but the scope has closed; call backward inside it"
                )
        return self._function(*args, **kwargs)


class Region(NamedTuple):
    """One checkpointed part of a model that runs now: what keeps its function, and under which name."""

    keeper: Any
    attribute: str


def guard(forward_pass: ForwardPass, label: str, point: str) -> None:
    """Note in every checkpointed part that runs in this thread that a scope changed a value in it."""
    if not _may_be_repeated(forward_pass):
        return
    found = regions()
    # Without a graph from its beginning on, a pass has none of its own; those around it stay as they are.
    forward_pass.is_never_repeated = not found and not forward_pass.began_with_graph
    for keeper, attribute in found:
        function = getattr(keeper, attribute)
        if not isinstance(function, _Guarded):
            function = _Guarded(function)
            setattr(keeper, attribute, function)
        function.edits.setdefault(forward_pass.log, Edit(label, point))


def regions() -> list[Region]:
    """Return the checkpointed parts that run in this thread, innermost first."""
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == _FILE and (region := _region_of(frame)):
            found.append(region)
        frame = frame.f_back
    return found


def _may_be_repeated(forward_pass: ForwardPass) -> bool:
    """Tell cheaply where there is no need to look: one kind takes gradients, and hooks saved tensors; one does not."""
    if torch.is_grad_enabled():
        return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    return not forward_pass.is_never_repeated


def _region_of(frame: FrameType) -> Region | None:
    if frame.f_code is _REENTRANT:
        return Region(frame.f_locals["ctx"], "run_function")
    steps = frame.f_locals.get("gen") if frame.f_code.co_name == _ENTRANCE else None
    kept = None if steps is None or steps.gi_frame is None else steps.gi_frame.f_locals.get("new_frame")
    return None if kept is None else Region(kept, "recompute_fn")
