"""Reading the residual stream as the model's own head reads it, whatever that is made of."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from kamui.errors import UnsupportedModelError
from kamui.hooks import suspended


class Readout:
    """What a model does after its last block.

    The rule is the model itself: it runs on one token, and its last block hands on the residual stream that is
    asked about. So projections, transforms, soft caps, scales and whatever the next family does are all in it.
    Where the final norm and the unembedding alone give the same logits, which is tried once for each model, only
    these run.

    Args:
        block: The path of the last block.
        call: Which call of it is the last one, where it is called many times.
        final_norm: The path of the norm after the last block, if there is one.
        unembed: The path of the unembedding, if there is one.
    """

    def __init__(self, block: str, call: int | None, final_norm: str | None, unembed: str | None) -> None:
        self._block = block
        self._last_call = call or 0
        self._final_norm = final_norm
        self._unembed = unembed
        self._is_plain: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()

    def __call__(self, model: nn.Module, residual: Tensor) -> Tensor:
        """Return the logits (..., V) for a residual stream (..., D) after the last block.

        Raises:
            UnsupportedModelError: The model gives no logits.
        """
        if self._unembed is None:
            raise UnsupportedModelError(
                f"{type(model).__name__!r} gives no logits that could be read from a residual stream; "
                f"load it with its language-model head"
            )
        with suspended():
            if model not in self._is_plain:
                self._is_plain[model] = self._plain_agrees(model, residual)
            if self._is_plain[model]:
                return self._plain(model, residual)
            return self._through_model(model, residual)

    def _plain_agrees(self, model: nn.Module, residual: Tensor) -> bool:
        with torch.no_grad():
            probe = residual.detach().reshape(-1, 1, residual.shape[-1])[:4]  # (N, 1, D)
            logits = self._through_model(model, probe)  # (N, 1, V)
            try:
                short = self._plain(model, probe)
            except RuntimeError:  # something of another width lies between
                return False
        return short.shape == logits.shape and short.dtype == logits.dtype and torch.equal(short, logits)

    def _plain(self, model: nn.Module, residual: Tensor) -> Tensor:
        assert self._unembed is not None
        if self._final_norm is not None:
            residual = model.get_submodule(self._final_norm)(residual)
        logits: Tensor = model.get_submodule(self._unembed)(residual)  # (..., V)
        return logits

    def _through_model(self, model: nn.Module, residual: Tensor) -> Tensor:
        rows = residual.reshape(-1, 1, residual.shape[-1])  # (N, 1, D): each position is a sequence of its own
        try:
            logits = self._run(model, rows, batch=1)
        except RuntimeError:  # some give their output the shape of their input
            logits = self._run(model, rows, batch=len(rows))
        if not isinstance(logits, Tensor) or logits.numel() != len(rows) * logits.shape[-1]:
            raise UnsupportedModelError(
                f"{type(model).__name__!r} gives no logits for each position of a residual stream; "
                f"load it with its language-model head"
            )
        return logits.reshape(*residual.shape[:-1], -1)  # (..., V)

    def _run(self, model: nn.Module, rows: Tensor, batch: int) -> object:
        swap = _Swap(rows, self._last_call)
        handle = model.get_submodule(self._block).register_forward_hook(swap)
        try:
            with swap.active():
                output = model(**_one_token(model, rows, batch), return_dict=True)
        finally:
            handle.remove()
        if not swap.has_acted:  # torch.compile leaves out hooks that came later
            raise UnsupportedModelError(
                f"the last block {self._block!r} of {type(model).__name__!r} was not called where its value could be "
                f"exchanged; if the model is compiled, read it out inside 'with HookManager(model) as hooks:'"
            )
        return getattr(output, "logits", None)


class _Swap:
    """A forward hook that puts another residual stream in the place of a block's, in one context only."""

    def __init__(self, rows: Tensor, call: int) -> None:
        self._rows = rows
        self._call = call
        self._count = 0
        self.has_acted = False
        self._active: ContextVar[bool] = ContextVar("kamui_transformers_swap", default=False)

    @contextmanager
    def active(self) -> Iterator[None]:
        token = self._active.set(True)
        try:
            yield
        finally:
            self._active.reset(token)

    def __call__(self, module: nn.Module, args: object, output: Any) -> Any:
        if not self._active.get():
            return None
        self._count += 1
        if self._count - 1 != self._call:
            return None
        self.has_acted = True
        return self._rows if isinstance(output, Tensor) else (self._rows, *output[1:])


def _one_token(model: Any, rows: Tensor, batch: int) -> dict[str, Any]:
    if model.main_input_name == "pixel_values":
        size, channels = model.config.image_size, model.config.num_channels
        height, width = (size, size) if isinstance(size, int) else size
        return {"pixel_values": rows.new_zeros(batch, channels, height, width)}
    ids = torch.zeros(batch, 1, dtype=torch.long, device=rows.device)  # (N, 1)
    if model.config.is_encoder_decoder:
        from transformers.modeling_outputs import MoEModelOutput  # imported already: the model is one of its

        encoded = MoEModelOutput(last_hidden_state=rows.new_zeros(batch, 1, rows.shape[-1]))  # (N, 1, D)
        return {"encoder_outputs": encoded, "decoder_input_ids": ids}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
