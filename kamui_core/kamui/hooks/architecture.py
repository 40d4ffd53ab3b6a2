"""Architectures: how a model spells the canonical names.

An architecture is found through the entry-point group `kamui.architectures`: each entry names a function that
takes a model and returns an `Architecture`, or None where it does not recognise it.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor, nn

from kamui.discovery import discover
from kamui.errors import PluginWarning
from kamui.hooks.points import FEED_FORWARD_IOS, HookPoint

ARCHITECTURES: Final = "kamui.architectures"


class Target(NamedTuple):
    """What a canonical point is in a real model: a real point, and which call of its module."""

    point: HookPoint
    call: int | None = None


@dataclasses.dataclass(frozen=True)
class Architecture:
    """How one model spells the canonical names. It keeps no reference to the model.

    Attributes:
        name: The architecture's name.
        points: The canonical points that the model has, in firing order, and what each is there.
        modules: Canonical module names and the paths of these modules, for all their other ios.
        attentions: Paths of the modules that compute attention.
        feed_forwards: Paths of feed-forward modules, and the real point that is the `mid` of each.
        readout: Takes the model and the residual stream (..., D) after its last block, and gives logits (..., V).
        calls: Canonical module names of which the module is called many times in a pass, and which call each is.
        missing: Canonical points and module names that the model does not have, and why.
    """

    name: str
    points: Mapping[HookPoint, Target]
    modules: Mapping[str, str]
    attentions: tuple[str, ...]
    feed_forwards: Mapping[str, HookPoint]
    readout: Callable[[nn.Module, Tensor], Tensor]
    calls: Mapping[str, int] = dataclasses.field(default_factory=dict)
    missing: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def locate(self, point: HookPoint) -> Target | None:
        """Return what a canonical point is in the model, or None when it is no canonical point of it."""
        bare = HookPoint.at(point.module, point.io) if point.selector else point
        target = self.points.get(bare)
        if target is None:
            path = self.modules.get(point.module)
            if path is None or point.io in FEED_FORWARD_IOS:
                return None
            target = Target(HookPoint.at(path, point.io), self.calls.get(point.module))
        return Target(HookPoint(target.point + point[len(bare) :]), target.call) if point.selector else target

    def why_missing(self, point: str) -> str | None:
        """Return why the model does not have a canonical point, or None when there is nothing to say of it."""
        return self.missing.get(point) or self.missing.get(point.rpartition(".")[0])


def architecture_of(model: nn.Module) -> Architecture | None:
    """Return the architecture that recognises `model`; those of other packages are asked before ours.

    One that fails is passed over with a `PluginWarning`.
    """
    for offer in sorted(discover(ARCHITECTURES).offers, key=lambda offer: (offer.is_bundled, offer.name)):
        try:
            recognise: Any = offer.load()
            architecture: Architecture | None = recognise(model)
        except Exception as error:
            warnings.warn(
                f"architecture {offer.name!r} of {offer.package} failed on {type(model).__name__!r} and was passed "
                f"over ({type(error).__name__}: {error}); update or uninstall {offer.distribution!r}",
                PluginWarning,
                stacklevel=2,
            )
            continue
        if architecture is not None:
            return architecture
    return None
