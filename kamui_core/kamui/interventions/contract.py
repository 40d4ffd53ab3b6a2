"""What a class implements, checked once by pluggy and kept for as long as the class lives.

An empty instance of the class is registered in the one plugin manager of the process, which checks names and
arguments, is read, and is unregistered in any case: a broken class never poisons the next one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import getattr_static, signature
from types import FunctionType
from typing import Any
from weakref import WeakKeyDictionary

import pluggy
from pluggy import HookimplOpts

from kamui.discovery import Offer
from kamui.errors import InterventionContractError
from kamui.interventions.hookspecs import PROJECT, Hookspecs
from kamui.interventions.intervention import Intervention
from kamui.interventions.refusals import Implementation, check_class, check_implementations


@dataclass(frozen=True)
class Callback:
    """One hook that a class implements.

    Attributes:
        name: The hook.
        method: The method that implements it; another name than the hook's with `hookimpl(specname=...)`.
        arguments: The arguments of the hook that the method takes, to be given by name.
        priority: -1 with `tryfirst`, 1 with `trylast`, else 0; callbacks run in ascending order.
    """

    name: str
    method: str
    arguments: frozenset[str]
    priority: int

    def bind(self, instance: Intervention) -> Callable[..., Any]:
        """Return the method of an instance."""
        bound: Callable[..., Any] = getattr(instance, self.method)
        return bound


@dataclass(frozen=True)
class Contract:
    """What one intervention class implements.

    Attributes:
        callbacks: The implemented hooks by name. They hold names only, and so keep no class alive.
    """

    callbacks: Mapping[str, Callback]

    def callback(self, name: str) -> Callback | None:
        """Return the callback for a hook, or `None` where the class does not implement it."""
        return self.callbacks.get(name)


class _PluginManager(pluggy.PluginManager):
    """A plugin manager that looks at functions alone: pluggy before 1.7 evaluates properties."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> HookimplOpts | None:
        kind = getattr_static(plugin, name, None)
        return super().parse_hookimpl_opts(plugin, name) if isinstance(kind, _FUNCTIONS) else None


_FUNCTIONS = (FunctionType, classmethod, staticmethod)
_lock = threading.RLock()
_contracts: WeakKeyDictionary[type[Intervention], Contract] = WeakKeyDictionary()
_manager = _PluginManager(PROJECT)
_manager.add_hookspecs(Hookspecs)

HOOKS: Mapping[str, frozenset[str]] = {
    name: frozenset(signature(spec).parameters) - {"self"}
    for name, spec in sorted(vars(Hookspecs).items())
    if hasattr(spec, f"{PROJECT}_spec")
}
"""The arguments of each hook."""


def contract_of(cls: type[Intervention], offer: Offer | None = None) -> Contract:
    """Return the contract of a class; checked at the first call, the same object afterwards.

    Args:
        cls: A class that derives from `Intervention`.
        offer: The entry point that the class was loaded from, for messages.

    Raises:
        InterventionContractError: The class is no intervention, or does not fit the hooks or the versions.
    """
    package = f" of {offer.package}" if offer else ""
    if not (isinstance(cls, type) and issubclass(cls, Intervention)):
        raise InterventionContractError(f"{_described(cls)}{package} {_EXPECTED}")
    with _lock:
        contract = _contracts.get(cls)
        if contract is None:
            contract = _contracts[cls] = _examined(cls, f"intervention class {cls.__name__!r}{package}")
    return contract


_EXPECTED = "is not a class that derives from kamui.Intervention; write 'class Name(kamui.Intervention)'"


def _described(thing: object) -> str:
    if isinstance(thing, type):
        return f"class {thing.__name__!r}"
    if isinstance(thing, Intervention):
        return f"an instance of {type(thing).__name__!r}"
    return f"{type(thing).__name__} {getattr(thing, '__name__', thing)!r}"


def _examined(cls: type[Intervention], who: str) -> Contract:
    check_class(cls, who, HOOKS)
    try:
        empty = cls.__new__(cls)
    except TypeError as error:
        raise InterventionContractError(f"{who} cannot be instantiated: {error}") from error
    implementations = [
        Implementation(options.get("specname") or method, method, getattr(empty, method), options)
        for method in dir(empty)
        if (options := _manager.parse_hookimpl_opts(empty, method)) is not None
    ]
    check_implementations(implementations, who, HOOKS)
    _validate(empty, who)
    return Contract({each.hook: _callback(each) for each in implementations})


def _callback(each: Implementation) -> Callback:
    priority = bool(each.options.get("trylast")) - bool(each.options.get("tryfirst"))
    arguments = each.arguments & HOOKS.get(each.hook, each.arguments)
    return Callback(each.hook, each.method, arguments, priority)


def _validate(empty: Intervention, who: str) -> None:
    """Let pluggy check names and arguments; it is the authority on what a hook implementation is."""
    name = f"{PROJECT}-{id(empty)}"  # given, because pluggy would look for `__name__` on the instance
    try:
        _manager.register(empty, name)
        _manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise InterventionContractError(f"{who} does not fit the hooks: {' '.join(str(error).split())}") from error
    finally:
        if _manager.has_plugin(name):
            _manager.unregister(name=name)
