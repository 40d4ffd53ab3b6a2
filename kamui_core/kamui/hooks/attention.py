"""Attention internals: `q k v pre_softmax weights z`, read inside the running module.

While a tapped attention module runs, a `TorchFunctionMode` sees its call of the fused kernel. What is only
observed is computed beside the kernel, whose result stays what it was to the bit; what is replaced is put in its
place, and the explicit form is computed from there on. No model code is touched and no implementation switched.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from kamui.errors import AttentionError
from kamui.hooks.call import Call
from kamui.hooks.chain import fold
from kamui.hooks.checkpointing import regions
from kamui.hooks.gradients import Line, has_graph, watch_inside
from kamui.hooks.kernel import AttentionInputs
from kamui.hooks.points import GRADIENT_PREFIX

if TYPE_CHECKING:
    pass


class _Running(threading.local):
    def __init__(self) -> None:
        self.modes: list[AttentionMode] = []


_running = _Running()


class AttentionMode(TorchFunctionMode):
    """Listens to the attention of one running call of one module.

    The innermost running mode owns what is computed; those around it let it pass.

    Args:
        lines: The ports inside attention, outer scopes first, and the call that each belongs to.
    """

    def __init__(self, lines: Sequence[Line]) -> None:
        super().__init__()
        self._lines = lines
        self._seen = False
        self._ended = False

    @classmethod
    def push(cls, lines: Sequence[Line]) -> AttentionMode:
        """Begin to listen in this thread, and take off what another thread has ended here."""
        for ended in [mode for mode in _running.modes if mode._ended]:
            ended.remove()
        mode = cls(lines)
        _running.modes.append(mode)
        _push_mode(mode)  # type: ignore[no-untyped-call]
        return mode

    def remove(self) -> None:
        """Stop listening, wherever in this thread's stack of modes this one is; in another's, let everything pass."""
        self._ended = True
        if self in _running.modes:
            _running.modes.remove(self)
        if self not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return
        above = []
        while (mode := _pop_mode()) is not self:  # type: ignore[no-untyped-call]
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)  # type: ignore[no-untyped-call]

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer the fused kernel's call; everything else passes."""
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and not self._ended and _running.modes[-1:] == [self]:
            return self._attend(AttentionInputs.bind(args, kwargs))
        return func(*args, **kwargs)

    def _attend(self, inputs: AttentionInputs) -> Tensor:
        if self._seen and self._lines:
            point = str(self._lines[0][0].listeners[0].point)
            raise AttentionError(
                f"point {point!r} is not one value: its module computes attention more than once in a call; "
                f"name the module inside it that computes one"
            )
        self._seen = True
        inputs = dataclasses.replace(
            inputs,
            query=self._emit("q", inputs.query),
            key=self._emit("k", inputs.key),
            value=self._emit("v", inputs.value),
        )
        return self._emit("z", self._mixed(inputs))

    def _mixed(self, inputs: AttentionInputs) -> Tensor:
        if not self._is_heard("pre_softmax") and not self._is_heard("weights"):
            return inputs.fused()
        scores = inputs.scores()
        beside = not self._is_gradient_wanted(scores)
        changed_scores = self._emit("pre_softmax", scores)
        if beside and changed_scores is scores and not self._is_heard("weights"):
            return inputs.fused()
        weights = inputs.weights(changed_scores)
        changed_weights = self._emit("weights", weights)
        if beside and changed_scores is scores and changed_weights is weights:
            return inputs.fused()
        return inputs.mix(changed_weights)

    def _is_heard(self, io: str) -> bool:
        return any(port.io in (io, GRADIENT_PREFIX + io) for port, _ in self._lines)

    def _is_gradient_wanted(self, scores: Tensor) -> bool:
        """Tell whether scores or weights need a path to the output, which they do not have beside the kernel."""
        wanted = ("grad_pre_softmax", "grad_weights")
        return any(port.io in wanted for port, _ in self._lines) and (has_graph(scores) or bool(regions()))

    def _emit(self, io: str, value: Tensor) -> Tensor:
        original = value
        for port, entry in self._lines:
            if port.io == io:
                value = fold(port.listeners, value, Call(entry, original))
        lines = [line for line in self._lines if line[0].io == GRADIENT_PREFIX + io]
        # The same tensor may be query, key and value.
        return watch_inside(value, lines, alias=io in ("q", "k", "v")) if lines else value
