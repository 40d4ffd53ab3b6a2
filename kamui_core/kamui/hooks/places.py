"""Places: where a named point is in a real model.

A name is looked up first as a module path, exactly as `named_modules()` spells it, then as a canonical name that the
model's architecture translates. Wrappers such as `torch.compile` and DDP are no part of a name.
"""

from __future__ import annotations

import sys
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
        self._model, self._prefix = without_adapters(model)
        self._given = model

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
        names = self.names.expand(text.removeprefix(self._prefix))
        if not names:
            raise UnknownPointError(f"pattern {text!r} matches no point of this model; {self.names.some()}")
        return {HookPoint(name): self.place(HookPoint(name)) for name in names}

    def place(self, point: HookPoint) -> Place:
        """Return where one point is.

        Raises:
            UnknownPointError: The model has no such point.
            UnsupportedModelError: It is a canonical name and nothing recognises the model.
        """
        if point.is_gradient:
            place = self.place(point.forward)
            return place._replace(io=GRADIENT_PREFIX + place.io)
        point = self._without_wrappers(point)
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

    def still_has(self, point: HookPoint, place: Place) -> bool:
        """Tell whether the module at a point that was found before is still the same one."""
        point = self._without_wrappers(point.forward if point.is_gradient else point)
        target = None if self._module_at(point.module) is place.module else self._target(point)
        return self._module_at(point.module if target is None else target.point.module) is place.module

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
        module = _walk(self._model, path) if path else self._given
        return module if module is not None or self._given is self._model else _walk(self._given, path)

    def _without_wrappers(self, point: HookPoint) -> HookPoint:
        if self._prefix and point.module.startswith(self._prefix):
            point = HookPoint(point.removeprefix(self._prefix))
        head, _, rest = point.partition(".")
        while rest and head in _WRAPPER_SEGMENTS and head not in self._model._modules:
            point = HookPoint(rest)
            head, _, rest = point.partition(".")
        return point


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile`, `DataParallel`, `DistributedDataParallel` and FSDP's first form."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, DataParallel | DistributedDataParallel):
            inner = model.module
        if inner is None and isinstance(model, _sharding_wrappers()):
            inner = model._modules["_fsdp_wrapped_module"]
        if inner is None:
            return model
        model = inner


def without_adapters(model: nn.Module) -> tuple[nn.Module, str]:
    """Return the model that gives the names, and what its module paths have in front of them in `model`.

    A `PeftModel` is the root itself, since its call is the forward pass, but the names are those of its base model.
    """
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model, ""
    base: nn.Module = model.get_base_model()
    return base, "base_model." if base is model._modules["base_model"] else "base_model.model."


def _sharding_wrappers() -> tuple[type[nn.Module], ...]:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return () if fsdp is None else (fsdp.FullyShardedDataParallel,)


def _walk(root: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = root
    for segment in path.split("."):
        module = None if module is None else module._modules.get(segment)
    return module


def _container_error(point: HookPoint, module: nn.Module) -> UnknownPointError:
    children = ", ".join(
        repr(str(HookPoint.at(f"{point.module}.{name}", point.io))) for name in list(module._modules)[:3]
    )
    return UnknownPointError(
        f"point {point!r} is never reached: {point.module!r} is a {type(module).__name__}, which only holds other "
        f"modules and is never called; use one of them: {children or 'it is empty'}"
    )


def _computes_no_attention(module: nn.Module) -> bool:
    return set(module._modules) <= {"parametrizations"} and type(module).forward.__module__.startswith(
        "torch.nn.modules."
    )


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
