"""Captures: activations that an intervention keeps, by forward pass, point and call."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from kamui.errors import NotCapturedError

if TYPE_CHECKING:
    from kamui.hooks.call import Call
    from kamui.hooks.passes import ForwardPass


class Kept(NamedTuple):
    """One captured value; a live one with the number of writes to it when it was captured."""

    value: Tensor
    version: int | None

    def read(self, point: str) -> Tensor:
        """Return the value.

        Raises:
            NotCapturedError: It is live, and was written to since.
        """
        if self.version is not None and self.value._version != self.version:
            raise NotCapturedError(
                f"the value at point {point!r} is no longer what was captured: it was written to in place after "
                f"that, as nn.ReLU(inplace=True) does; capture it with copy=True"
            )
        return self.value


class Captures:
    """Captured values of one intervention.

    Values wait with their forward pass until it has ended well; those of a failed pass are never seen. An
    intervention that has its captures in an attribute `captures` can be read with the scope's `get`.

    Args:
        keep: `"all"` keeps every forward pass, `"last"` only the latest that ended.
    """

    def __init__(self, keep: Literal["all", "last"] = "all") -> None:
        self.keep = keep
        self._passes: dict[int, dict[str, list[Kept]]] = {}

    @property
    def forwards(self) -> tuple[int, ...]:
        """The numbers of the forward passes that are kept, oldest first."""
        return tuple(self._passes)

    def add(self, point: str, value: Tensor, call: Call, *, live: bool = False) -> None:
        """Keep `value` as the next one of `point` in the pass of `call`; recomputed values are not kept.

        Args:
            point: The point.
            value: The value. What the model may still write to is copied first, or is `live`.
            call: The call that it belongs to.
            live: The value is the model's own tensor; reading it fails once it has been written to.

        Raises:
            NotCapturedError: It is live and was made under `torch.inference_mode`, where writes leave no trace; or
                it is one sample's inside `torch.func.vmap`.
        """
        if call.recomputing:
            return
        if _is_batched(value):
            raise NotCapturedError(
                f"the value at point {point!r} cannot be kept: inside torch.func.vmap it is one sample's, and ends "
                f"with the transform; capture it in a call of the model outside vmap"
            )
        if live and value.is_inference():
            raise NotCapturedError(
                f"the live value at point {point!r} cannot be guarded: under torch.inference_mode writes to it "
                f"leave no trace; capture it with copy=True, or run the model under torch.no_grad"
            )
        kept = Kept(value, value._version if live else None)
        call.forward_pass.captured.setdefault(self, {}).setdefault(point, []).append(kept)

    def commit(self, forward_pass: ForwardPass, index: int) -> None:
        """Take over what `forward_pass` captured, as forward pass number `index`."""
        if self.keep == "last":
            self._passes.clear()
        self._passes[index] = forward_pass.captured.pop(self, {})

    def calls(self, point: str, forward: int) -> list[Tensor]:
        """Return the values of `point` in one forward pass, one for each call of its module.

        Raises:
            NotCapturedError: That forward pass is no longer kept, or a live value was written to since.
        """
        if forward not in self._passes:
            kept = ", ".join(str(index) for index in self._passes) or "none"
            raise NotCapturedError(
                f"forward pass {forward} of {point!r} is not kept (kept: {kept}); "
                f"capture with keep='all' to have every pass"
            )
        return [kept.read(point) for kept in self._passes[forward].get(point, [])]

    def joined(self, point: str, call: int | None) -> Tensor | None:
        """Return the values of `point` over all kept passes, joined along the sequence, or None without any.

        Raises:
            NotCapturedError: The values cannot be joined.
        """
        chosen = [
            kept.read(point)
            for values in self._every(point)
            for index, kept in enumerate(values)
            if call is None or index == call % len(values)
        ]
        if not chosen:
            return None
        try:
            return torch.cat(chosen, dim=-2 if chosen[0].dim() > 1 else 0)
        except RuntimeError as error:
            shapes = ", ".join(str(tuple(value.shape)) for value in chosen[:8])
            raise NotCapturedError(
                f"the captures of {point!r} cannot be joined along the sequence: their shapes are {shapes}; "
                f"read them one by one with forward=0, 1, ..."
            ) from error

    def bytes(self) -> int:
        """Return how many bytes the kept values take."""
        return sum(
            kept.value.numel() * kept.value.element_size()
            for captured in self._passes.values()
            for values in captured.values()
            for kept in values
        )

    def clear(self) -> None:
        """Forget everything."""
        self._passes.clear()

    def _every(self, point: str) -> list[list[Kept]]:
        return [captured[point] for captured in list(self._passes.values()) if point in captured]


def _is_batched(value: Tensor) -> bool:
    """Tell whether a vmap is under way on the value, also inside other transforms."""
    while torch._C._functorch.is_functorch_wrapped_tensor(value):
        if torch._C._functorch.is_batchedtensor(value):
            return True
        value = torch._C._functorch.get_unwrapped(value)
    return False
