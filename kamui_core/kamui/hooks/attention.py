"""Attention internals: `q k v pre_softmax weights z`, read inside the running module.

While a tapped attention module runs, a `TorchFunctionMode` sees what it computes, be it one call of the fused kernel
or a product, a softmax and another product. What is only observed leaves the module's own result as it is, to the
bit; what is replaced is put in its place, and flows on through the module's own code. No model code is touched and
no implementation switched.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode, _push_mode

from kamui.hooks.eager import EagerAttention
from kamui.hooks.fused import attend
from kamui.hooks.gradients import Line
from kamui.hooks.internals import Internals
from kamui.hooks.kernel import AttentionInputs
from kamui.hooks.multihead import batch_of_call, open_body
from kamui.hooks.scores import SOFTMAXES
from kamui.hooks.tape import Tape, name_of

_CLOSED_KERNELS: Final = ("flash", "flex_attention", "varlen_attn", "efficient_attention", "cudnn_attention")
_OPEN_IMPLEMENTATIONS: Final = (None, "eager", "sdpa")


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
        self._internals = Internals(lines)
        self._tape = Tape()
        self._eager = EagerAttention(self._internals, self._tape)
        self._kernel = ""
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
        self._tape.clear()
        if self in _running.modes:
            _running.modes.remove(self)
        if self not in _get_current_function_mode_stack():  # type: ignore[no-untyped-call]
            return
        above = []
        while (mode := _pop_mode()) is not self:  # type: ignore[no-untyped-call]
            above.append(mode)
        for mode in reversed(above):
            _push_mode(mode)  # type: ignore[no-untyped-call]

    def check(self, module: nn.Module) -> None:
        """Check, at the good end of the call, that a module which attends let itself be looked into.

        Raises:
            AttentionError: Its kernel never forms the weights.
        """
        implementation = getattr(getattr(module, "config", None), "_attn_implementation", None)
        kernel = self._kernel or (implementation if implementation not in _OPEN_IMPLEMENTATIONS else "")
        if kernel and not self._internals.is_claimed:
            raise self._internals.refusal(
                f"has no value: attention is computed by {kernel!r}, which never forms the weights; choose another "
                f"with model.set_attn_implementation('sdpa') or model.set_attn_implementation('eager')"
            )

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Answer the calls that attention is made of; everything else passes, and is noted."""
        kwargs = kwargs or {}
        if self._ended or _running.modes[-1:] != [self]:
            return func(*args, **kwargs)
        if any(kernel in name_of(func) for kernel in _CLOSED_KERNELS):
            self._kernel = name_of(func)
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if func is F.scaled_dot_product_attention:
            return attend(self._internals, self._tape, AttentionInputs.bind(args, kwargs))
        if func is F.multi_head_attention_forward:
            self._eager.is_multihead = True
            self._eager.batch = batch_of_call(args, kwargs)
            with self:
                return open_body()(*args, **kwargs)
        if func in SOFTMAXES:
            return self._eager.softmax(func, args, kwargs)
        return self._eager.compute(func, args, kwargs)
