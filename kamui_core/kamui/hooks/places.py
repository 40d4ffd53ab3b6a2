"""Places: where a named point is in a real model.

A name is looked up first as a module path, exactly as `named_modules()` spells it, then as a canonical name that
the model's architecture translates. Wrappers such as `torch.compile` and DDP are no part of a name.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import cached_property
from typing import Final
from weakref import WeakKeyDictionary

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from kamui.errors import AmbiguousPointWarning, UnknownPointError, UnsupportedModelError, nearest
from kamui.hooks.architecture import Architecture, Target, architecture_of
from kamui.hooks.patterns import Tree, expand, is_pattern, tree_of
from kamui.hooks.points import ATTENTION_IOS, FEED_FORWARD_IOS, GRADIENT_PREFIX, MODULE_IOS, HookPoint

_CANONICAL_HEADS: Final = frozenset({"embed", "blocks", "final_ln", "unembed", "encoder", "decoder"})
_WRAPPER_SEGMENTS: Final = frozenset({"_orig_mod", "module"})


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a point is: a module, a side of it, one tensor of what passes there, and in which call."""

    module: nn.Module
    io: str
    selector: tuple[int | str, ...] = ()
    call: int | None = None
    path: str = dataclasses.field(default="", compare=False)


class ModelMap:
    """The names of one model: its module paths, and the canonical points of its architecture."""

    def __init__(self, model: nn.Module) -> None:
        self.architecture = architecture_of(model)
        self.fingerprint = _fingerprint(model)
        self.model_type = type(model).__name__
        self.modules = {path: is_container(module) for path, module in model.named_modules(remove_duplicate=False)}

    @cached_property
    def points(self) -> tuple[HookPoint, ...]:
        """Every addressable point by module path, in the order of the modules."""
        return tuple(
            HookPoint.join(path, io) for path, container in self.modules.items() if not container for io in self._ios(path)
        )

    @property
    def canonical_points(self) -> tuple[HookPoint, ...]:
        """The canonical points in firing order; none where nothing recognises the model."""
        return tuple(self.architecture.points) if self.architecture else ()

    def expand(self, pattern: str) -> list[str]:
        """Return the points that a pattern stands for: canonical ones first, then by module path."""
        modules, _, io = pattern.rpartition(".")
        if "*" in io:
            real = expand(pattern, self._point_tree)
        else:
            real = [f"{path}.{io}" for path in expand(modules, self._module_tree)]
        return list(dict.fromkeys([*expand(pattern, self._canonical_tree), *real]))

    def refuse(self, name: str) -> UnknownPointError | UnsupportedModelError:
        """Make the error for a name that is neither a module path nor a canonical name of this model."""
        head = name.split(".", 1)[0]
        if self.architecture is None and head in _CANONICAL_HEADS and head not in self.modules:
            there = ", ".join(repr(path) for path in list(self.modules)[1:9])
            more = ", ..." if len(self.modules) > 9 else ""
            return UnsupportedModelError(
                f"{name!r} is a canonical name, and no installed architecture recognises {self.model_type!r}; "
                f"use its module paths: {there}{more}"
            )
        known = [str(point) for point in dict.fromkeys([*self.canonical_points, *self.points])]
        close = nearest(name, known)
        hint = f"nearest: {', '.join(map(repr, close))}" if close else f"its points begin {', '.join(map(repr, known[:6]))}"
        return UnknownPointError(f"point {name!r} is not in this model; {hint}")

    @cached_property
    def _canonical_tree(self) -> Tree:
        return tree_of(self.canonical_points)

    @cached_property
    def _point_tree(self) -> Tree:
        return tree_of(self.points)

    @cached_property
    def _module_tree(self) -> Tree:
        canonical = self.architecture.modules if self.architecture else ()
        paths = (path for path, container in self.modules.items() if path and not container)
        return tree_of(dict.fromkeys([*canonical, *paths]))

    def _ios(self, path: str) -> tuple[str, ...]:
        if self.architecture and path in self.architecture.attentions:
            return (*MODULE_IOS, *ATTENTION_IOS)
        if self.architecture and path in self.architecture.feed_forwards:
            return (*MODULE_IOS, *FEED_FORWARD_IOS)
        return MODULE_IOS


_maps: WeakKeyDictionary[nn.Module, ModelMap] = WeakKeyDictionary()


def map_of(model: nn.Module) -> ModelMap:
    """Return the names of `model`, walked once for as long as its modules stay the same."""
    known = _maps.get(model)
    if known is None or known.fingerprint != _fingerprint(model):
        known = _maps[model] = ModelMap(model)
    return known


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside `torch.compile`, `DataParallel` and `DistributedDataParallel`."""
    while True:
        inner = model._modules.get("_orig_mod")
        if inner is None and isinstance(model, DataParallel | DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner


def is_container(module: nn.Module) -> bool:
    """Tell whether the module only holds others and is never called, as a ModuleList is."""
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def find(model: nn.Module, text: str) -> dict[HookPoint, Place]:
    """Return the points that a name or a pattern stands for in `model`, and where each is.

    Raises:
        PointError: The text is no hook point.
        UnknownPointError: There is nothing of that name, or the pattern matches nothing.
        UnsupportedModelError: It is a canonical name and nothing recognises the model.
    """
    if is_pattern(text):
        names = map_of(model).expand(text)
        if not names:
            raise UnknownPointError(f"pattern {text!r} matches no point of this model; {_example_points(model)}")
        return {HookPoint(name): place(model, HookPoint(name)) for name in names}
    point = HookPoint(text)
    return {point: place(model, point)}


def place(model: nn.Module, point: HookPoint) -> Place:
    """Return where one point is.

    Raises:
        UnknownPointError: The model has no such point.
        UnsupportedModelError: It is a canonical name and nothing recognises the model.
    """
    if point.io.startswith(GRADIENT_PREFIX):
        raise UnknownPointError(
            f"point {str(point)!r} is a gradient point, which this version cannot reach; "
            f"read the value itself at {str(HookPoint.join(point.module, point.io.removeprefix(GRADIENT_PREFIX)))!r}"
        )
    point = _without_wrappers(model, point)
    module = _module_at(model, point.module)
    if module is not None and is_container(module):
        raise _container_error(point, module)
    by_path = None
    if module is not None and point.io not in FEED_FORWARD_IOS:
        by_path = Place(module, point.io, point.selector, path=point.module)
        if point.module.split(".", 1)[0] not in _CANONICAL_HEADS:
            return by_path
    by_name = _by_architecture(model, point)
    if by_path is None and by_name is None:
        raise _unknown(model, point, module)
    if by_path is not None and by_name is not None and by_path != by_name:
        _warn_ambiguous(point, by_name)
    return by_path or by_name  # type: ignore[return-value]


def module_of(model: nn.Module, path: str) -> nn.Module:
    """Return the module at a module path or of a canonical module name.

    Raises:
        UnknownPointError: There is no such module.
        UnsupportedModelError: It is a canonical name and nothing recognises the model.
    """
    return place(model, HookPoint.join(path, "output")).module


def _by_architecture(model: nn.Module, point: HookPoint) -> Place | None:
    architecture = map_of(model).architecture
    if architecture is None:
        return None
    target = architecture.locate(point)
    if target is None and point.io in FEED_FORWARD_IOS and point.module in architecture.feed_forwards:
        target = Target(architecture.feed_forwards[point.module])
    if target is None:
        return None
    module = _module_at(model, target.point.module)
    if module is None:
        return None
    return Place(module, target.point.io, target.point.selector, target.call, target.point.module)


def _module_at(model: nn.Module, path: str) -> nn.Module | None:
    module: nn.Module | None = model
    for segment in path.split(".") if path else ():
        module = None if module is None else module._modules.get(segment)
    return module


def _without_wrappers(model: nn.Module, point: HookPoint) -> HookPoint:
    head, _, rest = point.partition(".")
    while rest and head in _WRAPPER_SEGMENTS and head not in model._modules:
        point = HookPoint(rest)
        head, _, rest = point.partition(".")
    return point


def _container_error(point: HookPoint, module: nn.Module) -> UnknownPointError:
    children = ", ".join(repr(str(HookPoint.join(f"{point.module}.{name}", point.io))) for name in list(module._modules)[:3])
    return UnknownPointError(
        f"point {str(point)!r} is never reached: {point.module!r} is a {type(module).__name__}, which only holds other "
        f"modules and is never called; use one of them: {children or 'it is empty'}"
    )


def _unknown(model: nn.Module, point: HookPoint, module: nn.Module | None) -> UnknownPointError | UnsupportedModelError:
    if module is None:
        return map_of(model).refuse(str(point))
    return UnknownPointError(
        f"point {str(point)!r} is not in this model: {point.module!r} is no feed-forward module that a known architecture "
        f"names; use the input of its last linear module"
    )


def _warn_ambiguous(point: HookPoint, canonical: Place) -> None:
    other = str(HookPoint.join(canonical.path, canonical.io))
    warnings.warn(
        f"{str(point)!r} is a module path of this model and also the canonical name of {other!r}; the module path is used",
        AmbiguousPointWarning,
        stacklevel=4,
    )


def _example_points(model: nn.Module) -> str:
    names = map_of(model)
    some = [str(point) for point in (*names.canonical_points, *names.points)][:4]
    return f"its points begin {', '.join(map(repr, some))}"


def _fingerprint(model: nn.Module) -> tuple[int, ...]:
    seen: list[int] = []
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            seen.append(id(module))
            waiting.extend(module._modules.values())
    return tuple(seen)
