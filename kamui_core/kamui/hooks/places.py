"""Places: where a named point is in a real model.

A name is looked up first as a module path, exactly as `named_modules()` spells it, then as a canonical name that the
model's architecture translates. Wrappers such as `torch.compile` and DDP are no part of a name.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Final, NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from kamui.errors import AmbiguousPointWarning, UnknownPointError
from kamui.hooks.architecture import Target
from kamui.hooks.naming import CANONICAL_HEADS, ModelMap, is_container, map_of
from kamui.hooks.patterns import is_pattern
from kamui.hooks.points import ATTENTION_IOS, FEED_FORWARD_IOS, GRADIENT_PREFIX, HookPoint

_WRAPPER_SEGMENTS: Final = frozenset({"_orig_mod", "module"})


class Place(NamedTuple):
    """Where a point is: a module, a side of it, one tensor of what passes there, and in which call."""

    module: nn.Module
    io: str
    selector: tuple[int | str, ...] = ()
    call: int | None = None


class Locator:
    """Finds points in one model.

    Args:
        model: The model, without wrappers.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    @cached_property
    def names(self) -> ModelMap:
        """The names of the model; walked when a pattern, a canonical name or an error needs them."""
        return map_of(self._model)

    def find(self, text: str) -> dict[HookPoint, Place]:
        """Return the points that a name or a pattern stands for, and where each is.

        Raises:
            PointError: The text is no hook point.
            UnknownPointError: There is nothing of that name, or the pattern matches nothing.
            UnsupportedModelError: It is a canonical name and nothing recognises the model.
        """
        if not isinstance(text, str) or not is_pattern(text):
            point = HookPoint(text)
            return {point: self.place(point)}
        names = self.names.expand(text)
        if not names:
            raise UnknownPointError(f"pattern {text!r} matches no point of this model; {self.names.some()}")
        return {HookPoint(name): self.place(HookPoint(name)) for name in names}

    def place(self, point: HookPoint) -> Place:
        """Return where one point is.

        Raises:
            UnknownPointError: The model has no such point.
            UnsupportedModelError: It is a canonical name and nothing recognises the model.
        """
        point = self._without_wrappers(_forward(point))
        module = self._module_at(point.module)
        if module is not None and is_container(module):
            raise _container_error(point, module)
        if module is not None and point.io in ATTENTION_IOS and _computes_no_attention(module):
            raise _no_attention(point, module)
        if module is not None and point.io not in FEED_FORWARD_IOS:
            self._warn_if_ambiguous(point, module)
            return Place(module, point.io, point.selector)
        target = self._target(point)
        if target is None:
            raise _no_feed_forward(point) if module is not None else self.names.refuse(point)
        return self._place_of(target)

    def module(self, path: str) -> nn.Module:
        """Return the module at a module path or of a canonical module name.

        Raises:
            UnknownPointError: There is no such module.
            UnsupportedModelError: It is a canonical name and nothing recognises the model.
        """
        architecture = self.names.architecture if self._module_at(path) is None else None
        if architecture is None:
            return self.place(HookPoint.at(path, "output")).module
        if path in architecture.missing:
            raise self.names.refuse(path)
        return self.place(HookPoint.at(architecture.modules.get(path, path), "output")).module

    def _target(self, point: HookPoint) -> Target | None:
        architecture = self.names.architecture
        if architecture is None:
            return None
        target = architecture.locate(point)
        if target is None and point.io in FEED_FORWARD_IOS and point.module in architecture.feed_forwards:
            return Target(architecture.feed_forwards[point.module])
        return target

    def _place_of(self, target: Target) -> Place:
        point, call = target
        module = self._module_at(point.module)
        if module is None:
            raise self.names.refuse(point)
        return Place(module, point.io, point.selector, call)

    def _warn_if_ambiguous(self, point: HookPoint, module: nn.Module) -> None:
        if point.module.partition(".")[0] not in CANONICAL_HEADS:
            return
        target = self._target(point)
        if target is not None and target.point != point and self._place_of(target).module is not module:
            warnings.warn(
                f"{point!r} is a module path of this model and also the canonical name of {target.point!r}; "
                f"the module path is used",
                AmbiguousPointWarning,
                stacklevel=6,
            )

    def _module_at(self, path: str) -> nn.Module | None:
        module: nn.Module | None = self._model
        for segment in path.split(".") if path else ():
            module = None if module is None else module._modules.get(segment)
        return module

    def _without_wrappers(self, point: HookPoint) -> HookPoint:
        head, _, rest = point.partition(".")
        while rest and head in _WRAPPER_SEGMENTS and head not in self._model._modules:
            point = HookPoint(rest)
            head, _, rest = point.partition(".")
        return point


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, DataParallel | DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def _forward(point: HookPoint) -> HookPoint:
    if point.io.startswith(GRADIENT_PREFIX):
        raise UnknownPointError(
            f"point {point!r} is a gradient point, which this version cannot reach; "
            f"read the value itself at {HookPoint.at(point.module, point.io.removeprefix(GRADIENT_PREFIX))!r}"
        )
    return point


def _container_error(point: HookPoint, module: nn.Module) -> UnknownPointError:
    children = ", ".join(
        repr(str(HookPoint.at(f"{point.module}.{name}", point.io))) for name in list(module._modules)[:3]
    )
    return UnknownPointError(
        f"point {point!r} is never reached: {point.module!r} is a {type(module).__name__}, which only holds other "
        f"modules and is never called; use one of them: {children or 'it is empty'}"
    )


def _computes_no_attention(module: nn.Module) -> bool:
    return not module._modules and type(module).forward.__module__.startswith("torch.nn.modules.")


def _no_attention(point: HookPoint, module: nn.Module) -> UnknownPointError:
    return UnknownPointError(
        f"point {point!r} is not in this model: {point.module or 'the model'!r} is a {type(module).__name__}, which "
        f"computes no attention, and parameters are no points; what they do is seen at "
        f"{HookPoint.at(point.module, 'output')!r}"
    )


def _no_feed_forward(point: HookPoint) -> UnknownPointError:
    return UnknownPointError(
        f"point {point!r} is not in this model: {point.module!r} is no feed-forward module of a known architecture; "
        f"use the input of its last linear module"
    )
