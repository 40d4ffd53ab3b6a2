"""Names: how the modules and canonical points of one model are called, walked once per model."""

from __future__ import annotations

from functools import cached_property
from typing import Final
from weakref import WeakKeyDictionary

from torch import nn

from kamui.errors import UnknownPointError, UnsupportedModelError, nearest
from kamui.hooks.architecture import architecture_of
from kamui.hooks.patterns import Tree, expand, tree_of
from kamui.hooks.points import ATTENTION_IOS, FEED_FORWARD_IOS, MODULE_IOS, HookPoint

CANONICAL_HEADS: Final = frozenset({"embed", "blocks", "final_ln", "unembed", "encoder", "decoder"})


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
            HookPoint.at(path, io)
            for path, container in self.modules.items()
            if not container
            for io in self._ios(path)
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
        if self.architecture is None and head in CANONICAL_HEADS and head not in self.modules:
            there = ", ".join(repr(path) for path in list(self.modules)[1:9])
            more = ", ..." if len(self.modules) > 9 else ""
            return UnsupportedModelError(
                f"{name!r} is a canonical name, and no installed architecture recognises {self.model_type!r}; "
                f"use its module paths: {there}{more}"
            )
        reason = self.architecture.why_missing(name) if self.architecture else None
        if reason:
            return UnknownPointError(f"point {name!r} is not in this model: {reason}")
        close = ", ".join(map(repr, nearest(name, self._known())))
        return UnknownPointError(
            f"point {name!r} is not in this model; {f'nearest: {close}' if close else self.some()}"
        )

    def some(self) -> str:
        """Say what the first points are, for messages."""
        return f"its points begin {', '.join(map(repr, self._known()[:4]))}"

    def _known(self) -> list[HookPoint]:
        return list(dict.fromkeys([*self.canonical_points, *self.points]))

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


def is_container(module: nn.Module) -> bool:
    """Tell whether the module only holds others and is never called, as a ModuleList is."""
    return type(module).forward is nn.Module.forward and "forward" not in module.__dict__


def _fingerprint(model: nn.Module) -> tuple[int, ...]:
    seen: list[int] = []
    waiting: list[nn.Module | None] = [model]
    while waiting:
        module = waiting.pop()
        if module is not None:
            seen.append(id(module))
            waiting.extend(module._modules.values())
    return tuple(seen)
