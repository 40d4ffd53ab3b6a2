"""`HookRegistry`: which points there are."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from kamui.errors import UnsupportedModelError
from kamui.hooks.canonical import canonical_points
from kamui.hooks.description import PointDescription, describe
from kamui.hooks.naming import map_of
from kamui.hooks.places import Locator, unwrap, without_adapters
from kamui.hooks.points import HookPoint


class HasLayers(Protocol):
    """Anything that says how many blocks a transformer has, such as a `ModelConfig`."""

    @property
    def n_layers(self) -> int:
        """The number of blocks."""
        ...


class HookRegistry:
    """Which points there are, on a config or on a model. It holds nothing and puts nothing on the model."""

    @staticmethod
    def all_points(source: HasLayers | nn.Module) -> list[HookPoint]:
        """Return the canonical points in firing order.

        Args:
            source: A model, or anything with `n_layers`, such as a `ModelConfig`.

        Raises:
            UnsupportedModelError: Nothing recognises the model; or `source` is neither.
        """
        if isinstance(source, nn.Module):
            model, _ = without_adapters(unwrap(source))
            names = map_of(model)
            if names.architecture is None:
                raise UnsupportedModelError(
                    f"no installed architecture recognises {type(model).__name__!r}, so it has no canonical points; "
                    f"HookRegistry.describe(model) lists its points by module path"
                )
            return list(names.canonical_points)
        n_layers = getattr(source, "n_layers", None)
        if type(n_layers) is not int:
            raise UnsupportedModelError(f"all_points takes a model or a config with n_layers, not {source!r}")
        return list(canonical_points(n_layers))

    @staticmethod
    def validate(model: nn.Module, point: str) -> HookPoint:
        """Return the point if the model has it.

        Raises:
            PointError: The text is no hook point.
            UnknownPointError: The model has no such point; the message has the nearest names.
        """
        point = HookPoint(point)
        Locator(unwrap(model)).find(point)
        return point

    @staticmethod
    def resolve(model: nn.Module, pattern: str) -> list[HookPoint]:
        """Return the points that a name or pattern stands for, each place once.

        Raises:
            PointError: The text is no hook point.
            UnknownPointError: Nothing matches.
        """
        places = {place: point for point, place in reversed(Locator(unwrap(model)).find(pattern).items())}
        return list(reversed(places.values()))

    @staticmethod
    def describe(model: nn.Module, *example: Any, **keywords: Any) -> list[PointDescription]:
        """Return every addressable point with its shape and dtype, without real computation.

        Args:
            model: The model; it is neither run nor touched.
            example: Positional arguments that the model would be called with.
            keywords: Keyword arguments, likewise.
        """
        return describe(unwrap(model), example, keywords)
