"""Watches: what waits for the gradient of one value in a graph."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from kamui.hooks.call import Call, Origin
from kamui.hooks.chain import fold
from kamui.hooks.values import tensors_in

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

    from kamui.hooks.passes import PassLog
    from kamui.hooks.ports import Port


class GradientCall(Call):
    """The call of a module whose gradient arrives; it may have ended long ago."""

    __slots__ = ("_origin",)

    in_backward = True

    def __init__(self, origin: Origin, original: Tensor) -> None:
        self._origin = origin
        self.original = original
        self.missed = None

    @property
    def origin(self) -> Origin:
        """Which call it was."""
        return self._origin


class Geometry(NamedTuple):
    """How a value lies in the tensor that it is a view of."""

    base_size: torch.Size
    base_stride: tuple[int, ...]
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, value: Tensor, base: Tensor) -> Geometry:
        """Read it from both."""
        offset = value.storage_offset() - base.storage_offset()
        return cls(base.size(), base.stride(), value.size(), value.stride(), int(offset))

    def whole(self, gradient: Tensor) -> Tensor:
        """Lay the base's gradient out as the base is."""
        laid_out = torch.empty_strided(self.base_size, self.base_stride, dtype=gradient.dtype, device=gradient.device)
        return laid_out.copy_(gradient)

    def part(self, whole: Tensor) -> Tensor:
        """Return the value's part of the base's gradient."""
        return whole.as_strided(self.size, self.stride, self.offset)

    def with_part(self, whole: Tensor, part: Tensor) -> Tensor:
        """Return the base's gradient with another one in the value's part."""
        return whole.as_strided_scatter(part, self.size, self.stride, self.offset)


class Watch:
    """Waits for the gradient of one value, and hands it to those who listen.

    Args:
        heard: Who listens, and to which call of a module, outer scopes first.
    """

    __slots__ = ("__weakref__", "_geometry", "_handles", "_heard", "_probe", "_seen_in", "_version", "_written")

    def __init__(self, heard: Sequence[tuple[Port, Origin]]) -> None:
        self._heard = tuple(heard)
        self._handles: list[RemovableHandle] = []
        self._seen_in = -1
        self._written = False
        self._probe: Tensor | None = None
        self._version = 0
        self._geometry: Geometry | None = None
        for _, origin in heard:
            origin.forward_pass.log.watches.add(self)

    def on(self, value: Tensor) -> None:
        """Wait for the gradient of `value`, and where that is a view, also for that of what lies under it."""
        self._handles.append(value.register_hook(self._arrived))  # type: ignore[no-untyped-call]
        base = value._base
        if base is None or base.grad_fn is None or base.dtype != value.dtype:
            return
        # The probe shares the counter of writes, but not the graph: a hook must not hold what holds it.
        self._probe, self._version = value.detach(), value._version
        self._geometry = Geometry.of(value, base)
        self._handles.append(base.register_hook(self._arrived_below))  # type: ignore[no-untyped-call]

    def settle(self, alias: Tensor, output: object) -> None:
        """Note, at the end of the module that was given `alias`, whether it has written to it.

        What is written to it later counts too where the module has handed it on.
        """
        self._written = self._is_written()
        if not any(one is alias or (one._is_view() and one._base is alias._base) for one in tensors_in(output)):
            self._probe = None

    def release(self, log: PassLog) -> None:
        """Leave those of one scope out; with the last one the hooks go."""
        self._heard = tuple(line for line in self._heard if line[1].forward_pass.log is not log)
        if not self._heard:
            for handle in self._handles:
                handle.remove()

    def _arrived(self, gradient: Tensor) -> Tensor | None:
        if self._written:
            return None
        self._seen_in = torch._C._current_graph_task_id()
        changed = self._deliver(gradient)
        return None if changed is gradient else changed

    def _arrived_below(self, gradient: Tensor) -> Tensor | None:
        seen = self._seen_in == torch._C._current_graph_task_id()
        if self._geometry is None or not (self._written or (self._is_written() and not seen)):
            return None
        whole = self._geometry.whole(gradient)
        part = self._geometry.part(whole)
        changed = self._deliver(part)
        return None if changed is part else self._geometry.with_part(whole, changed)

    def _is_written(self) -> bool:
        return self._probe is not None and self._probe._version != self._version

    def _deliver(self, gradient: Tensor) -> Tensor:
        value = gradient
        for port, origin in self._heard:
            value = fold(port.listeners, value, GradientCall(origin, gradient))
        return value
