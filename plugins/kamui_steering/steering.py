"""The intervention `steering`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor, nn

from kamui import HookManager, HookPoint, Intervention, hookimpl
from kamui.errors import KamuiError, OptionError, ReplacementError, ScopeClosedError, UnsupportedModelError
from kamui.hooks import Call, HookRegistry, Positions, token_mask
from kamui_steering.fitting import Inputs, difference_of_means
from kamui_steering.vector_files import read_vectors, write_vectors


class Steering(Intervention):
    """Add `alpha * vector` to the activation at one or several points.

    The activation becomes `value + (alpha * vector).to(value)`: the product is formed in the vector's own dtype
    and then cast to the dtype and device of the activation, which keep what they were. The vector always lies
    along the last axis, also where another axis happens to be as long.

    Usage::

        with HookManager(model) as hooks:
            steering = hooks.use("steering", alpha=4.0, at="blocks.6.output")
            steering.fit(positive_ids, negative_ids).save("love.safetensors")
            model(token_ids)  # steered
            steering.alpha = -4.0
            model(token_ids)  # steered the other way

    Attributes:
        alpha: The factor; it may be changed between forward passes.
        vector: The vector (D,), or one for each point by its name, or a safetensors file that holds either: a
            tensor called `"vector"`, only one tensor, or tensors named by their points. Not needed before `fit`.
        at: The point or points, patterns included. Where it is left out: the points that the vectors are named
            by, else the output of the middle block, `blocks.{n_layers // 2}.output`.
        positions: The token positions to steer; everything where it is left out. -1 is the last token of the
            *prompt* in every step of a generation; `"generated"` steers every new token, `"last"` both.

    Source: Turner et al. 2023, "Activation Addition: Steering Language Models Without Optimization"; Rimsky et
    al. 2023, "Steering Llama 2 via Contrastive Activation Addition" for the difference of means.
    """

    alpha: float = 1.0
    vector: Tensor | Mapping[str, Tensor] | str | Path | None = None
    at: str | Sequence[str] | None = None
    positions: Positions = None
    _scope: HookManager | None = field(init=False, repr=False, default=None)
    _points: tuple[HookPoint, ...] = field(init=False, repr=False, default=())

    @hookimpl
    def opened(self, scope: HookManager) -> None:
        """Keep the scope, for `fit`."""
        self._scope = scope

    @hookimpl
    def points(self, model: nn.Module) -> Sequence[HookPoint]:
        """Return the points to steer, and refuse vectors that do not fit them."""
        given = self.vector
        file = str(given) if isinstance(given, str | Path) else None
        try:
            found = (point for name in self._names(model) for point in HookRegistry.resolve(model, name))
            self._points = tuple(dict.fromkeys(found))
        except KamuiError as error:
            if file is not None and self.at is None:
                error.add_note(f"the points are those that the vectors in {file!r} are named by; give at= to choose")
            raise
        if not self._points:
            raise OptionError(f"intervention {self.label!r} has nothing to steer with at={self.at!r}; name a point")
        if given is not None:
            for point in self._points:
                self._vector_at(point, file)
        return self._points

    @hookimpl
    def activation(self, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
        """Add the vector at the positions asked for."""
        mask = token_mask(self.positions, point, value, call)
        shift = self._shift(point, value)
        if mask is None:
            return value + shift
        return torch.where(mask, value + shift, value) if mask.any() else None

    @hookimpl
    def closed(self) -> None:
        """Let go of the scope."""
        self._scope = None

    def fit(self, positive: Inputs, negative: Inputs, *, over: Literal["last", "mean"] = "last") -> Self:
        """Set the vector to the mean activation of some inputs minus that of others.

        The model runs on both, in the mode that it is in, without gradients and as if no scope were open: this
        and other interventions do not act, and nothing is recorded. With several points, each gets its own vector.

        Args:
            positive: Inputs that show what to steer towards: token ids (N, S); a sequence of them, of any lengths,
                each (S,) or (n, S); or keyword arguments of the model as a mapping, or a sequence of mappings.
                Padding is left out of account where `attention_mask` tells of it.
            negative: Inputs that show what to steer away from, likewise; their number may differ.
            over: Which tokens of an input count: the last one, or the mean of them all. A value without a
                sequence, (N, D) or (D,), counts as it is.

        Returns:
            The intervention itself.

        Raises:
            ScopeClosedError: It is not in use in an open scope.
            OptionError: There are no inputs, or they are of another type.
            NotCapturedError: A point was not reached.
            PositionError: The tokens of a value cannot be told.
        """
        if self._scope is None:
            raise ScopeClosedError(
                f"intervention {self.label!r} can be fitted only while it is in use; call fit inside "
                f"'with HookManager(model) as hooks:', on what hooks.use({self.label!r}) returns"
            )
        vectors = difference_of_means(self._scope.model, self._points, positive, negative, over)
        self.vector = vectors if len(vectors) > 1 else next(iter(vectors.values()))
        return self

    def save(self, path: str | Path) -> None:
        """Write the vector to a safetensors file, from which the option `vector` reads it again.

        One vector is called `"vector"` in it, several are named by their points.

        Raises:
            OptionError: There is no vector yet.
        """
        vector = self._loaded()
        if vector is None:
            raise OptionError(f"intervention {self.label!r} has no vector to save; {_REMEDY}")
        write_vectors(Path(path), vector)

    def _names(self, model: nn.Module) -> Sequence[str]:
        if self.at is not None:
            return (self.at,) if isinstance(self.at, str) else self.at
        vector = self._loaded()
        return tuple(vector) if isinstance(vector, Mapping) else (self._middle(model),)

    def _middle(self, model: nn.Module) -> str:
        assert self._scope is not None
        if self._scope.architecture is None:
            raise UnsupportedModelError(
                f"intervention {self.label!r} steers at the middle block, and no installed architecture recognises "
                f"{type(model).__name__!r}; say where with at='<module path>.output'"
            )
        blocks = HookRegistry.resolve(model, "blocks.*.output")
        return blocks[len(blocks) // 2]

    def _loaded(self) -> Tensor | Mapping[str, Tensor] | None:
        if isinstance(self.vector, str | Path):
            self.vector = read_vectors(Path(self.vector), self.label, by_point=self.at is None)
        return self.vector

    def _vector_at(self, point: HookPoint, file: str | None = None) -> Tensor:
        vector = self._loaded()
        if vector is None:
            raise OptionError(f"intervention {self.label!r} has no vector; {_REMEDY}")
        if isinstance(vector, Mapping):
            if point not in vector:
                raise OptionError(
                    f"intervention {self.label!r} has no vector for point {str(point)!r}"
                    f"{f' in {file!r}' if file else ''}; there are vectors for "
                    f"{', '.join(map(repr, vector)) or 'nothing'}; name them by the points that at= asks for"
                )
            vector = vector[point]
        if not isinstance(vector, Tensor) or vector.dim() != 1:
            given = f"shape {tuple(vector.shape)}" if isinstance(vector, Tensor) else f"type {type(vector).__name__}"
            raise OptionError(
                f"intervention {self.label!r} takes a vector (D,) at point {str(point)!r}, not one of {given}"
            )
        return vector

    def _shift(self, point: HookPoint, value: Tensor) -> Tensor:
        vector = self._vector_at(point)
        width = value.shape[-1] if value.dim() else 1
        if len(vector) != width:
            raise ReplacementError(
                f"intervention {self.label!r} has a vector of width {len(vector)} for point {str(point)!r}, whose "
                f"value has width {width} (shape {tuple(value.shape)}); give a vector of shape ({width},)"
            )
        if not (value.is_floating_point() or value.is_complex()):
            raise ReplacementError(
                f"intervention {self.label!r} cannot steer point {str(point)!r}: its value is of {value.dtype}, "
                f"where a vector would be rounded; steer at a point of floating type"
            )
        return (self.alpha * vector).to(value)


_REMEDY = "pass vector=, or call fit(positive, negative) before the forward pass"
