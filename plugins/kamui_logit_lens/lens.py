"""The intervention `logit_lens`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor, nn

from kamui import HookManager, HookPoint, Intervention, hookimpl
from kamui.errors import CallIndexError, NotCapturedError, OptionError, PositionError, UnsupportedModelError
from kamui.hooks import Architecture, Call, Captures, HookRegistry, Positions, suspended, take_positions
from kamui_logit_lens.table import top_table
from kamui_logit_lens.tokens import Top, probability_of, rank_of, top_of

if TYPE_CHECKING:
    from rich.table import Table

Forward = int | Literal["all"]


class LogitLens(Intervention):
    """Read the residual stream after each layer as the model's own head would read it.

    Every layer's residual stream goes through what the model does after its last block: the final norm, the
    unembedding and whatever follows. That is computed when it is asked for, one layer at a time, with the weights
    that the model then has; after the scope has closed, too. The lens sees what the model goes on with, edits of
    other interventions included, and changes nothing. L in the shapes is the number of layers read, S the number
    of positions kept.

    Usage::

        with HookManager(model) as hooks:
            lens = hooks.use("logit_lens")
            model(token_ids)
        lens.top(k=3).token_ids  # (L, B, S, 3)
        lens.rank(answer)[:, 0, -1]  # how far up the answer is after each layer, (L,)

    Attributes:
        at: Where the residual stream is read; patterns stand for many points.
        positions: The token positions to keep; all of them where it is left out.
        keep: `"all"` keeps every forward pass, `"last"` only the latest.
        decode: Turns a token id into text for the table, as a tokenizer's `decode` does.

    Source: nostalgebraist 2020, "interpreting GPT: the logit lens".
    """

    at: str | Sequence[str] = "blocks.*.output"
    positions: Positions = None
    keep: Literal["all", "last"] = "all"
    decode: Callable[[int], str] | None = None
    _residuals: Captures = field(init=False, repr=False, default_factory=Captures)
    layers: tuple[HookPoint, ...] = field(init=False, repr=False, default=())
    _model: nn.Module | None = field(init=False, repr=False, default=None)
    _architecture: Architecture | None = field(init=False, repr=False, default=None)

    @hookimpl
    def opened(self, scope: HookManager) -> None:
        """Begin without captures, on a model whose head is known."""
        self._residuals = Captures(self.keep)
        self._architecture = scope.architecture
        if self._architecture is None:
            raise UnsupportedModelError(
                f"intervention {self.label!r} reads layers through the model's own head, and no installed architecture "
                f"recognises {type(scope.model).__name__!r}; install or register one (entry point group "
                f"'kamui.architectures')"
            )

    @hookimpl
    def points(self, model: nn.Module) -> Sequence[HookPoint]:
        """Return the points that are the layers."""
        self._model = model
        names = (self.at,) if isinstance(self.at, str) else self.at
        found = (point for name in names for point in HookRegistry.resolve(model, name))
        self.layers = tuple(dict.fromkeys(found))
        if not self.layers:
            raise OptionError(f"intervention {self.label!r} has nothing to read with at={self.at!r}; name a point")
        return self.layers

    @hookimpl(trylast=True)
    def activation(self, point: HookPoint, value: Tensor, call: Call) -> None:
        """Keep a copy of the residual stream."""
        chosen = take_positions(self.positions, point, value, call)
        if chosen is not None:
            with torch.inference_mode(mode=False):
                self._residuals.add(point, chosen.detach().clone(), call)

    def logits(self, layer: int | str | None = None, *, forward: Forward = -1) -> Tensor:
        """Return the logits of one layer, (B, S, V), or of all of them, (L, B, S, V).

        All of them together are L times as large as the model's own; `top`, `probability` and `rank` never hold
        more than one layer's.

        Args:
            layer: The layer, by its index in `layers` or by its point; all of them where it is left out.
            forward: The forward pass: -1 is the last that finished, `"all"` joins them along the sequence.

        Raises:
            NotCapturedError: No such layer was read, or no forward pass has finished.
        """
        if layer is None:
            return torch.stack(list(self._each(forward)))
        return self._read_out(self._point_of(layer), forward)

    def top(self, k: int = 5, *, forward: Forward = -1) -> Top:
        """Return the `k` likeliest tokens of each layer and position with their probabilities, (L, B, S, k).

        Raises:
            OptionError: There are not that many tokens.
            NotCapturedError: No forward pass has finished.
        """
        best = [top_of(logits, k) for logits in self._each(forward)]
        return Top(torch.stack([each.token_ids for each in best]), torch.stack([each.probabilities for each in best]))

    def probability(self, token_ids: int | Tensor, *, forward: Forward = -1) -> Tensor:
        """Return how likely each layer takes the given next tokens to be, (L, B, S).

        Args:
            token_ids: One token, or one for each position, (S,) or (B, S).
            forward: The forward pass, as in `logits`.

        Raises:
            OptionError: A token is not in the vocabulary.
            PositionError: There is not one for each position.
            NotCapturedError: No forward pass has finished.
        """
        return torch.stack([probability_of(token_ids, logits) for logits in self._each(forward)])

    def rank(self, token_ids: int | Tensor, *, forward: Forward = -1) -> Tensor:
        """Return how many tokens each layer takes to be likelier than the given ones, (L, B, S); 0 is the top.

        Args:
            token_ids: One token, or one for each position, (S,) or (B, S).
            forward: The forward pass, as in `logits`.

        Raises:
            OptionError: A token is not in the vocabulary.
            PositionError: There is not one for each position.
            NotCapturedError: No forward pass has finished.
        """
        return torch.stack([rank_of(token_ids, logits) for logits in self._each(forward)])

    def table(self, row: int = 0, *, k: int = 1, last: int = 8, forward: Forward = -1) -> Table:
        """Return a table of the likeliest tokens, with a line for each layer (the last on top) and a column a position.

        Columns are numbered as the positions that were kept, from 0.

        Args:
            row: Which row of the batch.
            k: How many tokens in a cell.
            last: How many positions, counted from the end.
            forward: The forward pass, as in `logits`.

        Raises:
            PositionError: There is no such row.
            NotCapturedError: No forward pass has finished.
        """
        top = self.top(k, forward=forward)
        rows = top.token_ids.shape[1]
        if not -rows <= row < rows:
            raise PositionError(f"there is no row {row!r} in this forward pass; it has {rows}, numbered from 0")
        return top_table(self.layers, top.token_ids[:, row], top.probabilities[:, row], last, self.decode)

    def __rich__(self) -> Table:
        return self.table()

    def _each(self, forward: Forward) -> Iterator[Tensor]:
        self._finished()
        return (self._read_out(point, forward) for point in self.layers)

    def _read_out(self, point: HookPoint, forward: Forward) -> Tensor:
        residual = self._residual(point, forward)  # (B, S, D)
        assert self._model is not None
        assert self._architecture is not None
        with suspended(), torch.no_grad():
            return self._architecture.readout(self._model, residual)  # (B, S, V)

    def _residual(self, point: HookPoint, forward: Forward) -> Tensor:
        finished = self._finished()
        if forward == "all":
            joined = self._residuals.joined(point, None)
            values = [] if joined is None else [joined]
        else:
            index = forward + finished if forward < 0 else forward
            if not 0 <= index < finished:
                raise CallIndexError(
                    f"there is no forward pass {forward!r}: {finished} finished in this scope, numbered from 0"
                )
            values = self._residuals.calls(point, index)
        if len(values) != 1:
            raise _not_one(point, values, forward)
        return values[0]

    def _finished(self) -> int:
        forwards = self._residuals.forwards
        if not forwards:
            raise NotCapturedError(
                f"intervention {self.label!r} has not seen a forward pass that finished; call the model inside the "
                f"scope, after the lens is in use"
            )
        return forwards[-1] + 1

    def _point_of(self, layer: int | str) -> HookPoint:
        if isinstance(layer, int) and -len(self.layers) <= layer < len(self.layers):
            return self.layers[layer]
        if layer in self.layers:
            return HookPoint(str(layer))
        there = ", ".join(repr(str(point)) for point in self.layers) or "none"
        raise NotCapturedError(
            f"there is no layer {layer!r} in intervention {self.label!r}; it reads {len(self.layers)}: {there}"
        )


def _not_one(point: HookPoint, values: Sequence[Tensor], forward: Forward) -> NotCapturedError:
    where = "any forward pass" if forward == "all" else f"forward pass {forward}"
    if values:
        return CallIndexError(
            f"layer {str(point)!r} was called {len(values)} times in {where}, and the lens reads layers that are "
            f"called once; leave it out of at="
        )
    return NotCapturedError(
        f"layer {str(point)!r} was not seen in {where}: its module was not called, or the positions asked for are "
        f"not in it"
    )
