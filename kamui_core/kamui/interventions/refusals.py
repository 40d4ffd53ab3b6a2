"""Why a class is refused as an intervention, and what its author can do about it.

pluggy would refuse some of this too, in words that do not name the remedy; most of it, it would not see.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from inspect import (
    Parameter,
    getattr_static,
    isasyncgenfunction,
    iscoroutinefunction,
    isgeneratorfunction,
    signature,
)
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from kamui.discovery import CORE
from kamui.errors import InterventionContractError, did_you_mean
from kamui.interventions.hookspecs import PROJECT
from kamui.interventions.intervention import Intervention, flaw_of

Hooks = Mapping[str, frozenset[str]]
_STARS: Mapping[object, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}


@dataclass(frozen=True)
class Implementation:
    """One marked method of a class: the hook it is for, its name, itself and what it is marked with."""

    hook: str
    method: str
    function: Callable[..., Any]
    options: Mapping[str, Any]

    @property
    def arguments(self) -> frozenset[str]:
        """The arguments that the method names, those with a default included."""
        return frozenset(
            name
            for name, parameter in signature(self.function).parameters.items()
            if parameter.kind in (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
        )


def check_class(cls: type[Intervention], who: str, hooks: Hooks) -> None:
    """Check everything about a class but its callbacks.

    Raises:
        InterventionContractError: The class cannot be used; the message starts with `who`.
    """
    flaw = (
        flaw_of(cls)
        or _version_flaw(cls.requires_kamui)
        or next((found for each in fields(cls) if (found := _option_flaw(each.name, each.default, hooks))), None)
        or next((found for hook in hooks if (found := _decorator_flaw(cls, hook))), None)
    )
    if flaw:
        raise InterventionContractError(f"{who} {flaw}")


def check_implementations(implementations: Sequence[Implementation], who: str, hooks: Hooks) -> None:
    """Check the callbacks of a class.

    Raises:
        InterventionContractError: There is none, or one does not fit; the message starts with `who`.
    """
    if not implementations:
        raise InterventionContractError(
            f"{who} implements no hook; mark at least one method with @kamui.hookimpl: {_listed(hooks)}"
        )
    for each in implementations:
        if flaw := _method_flaw(each, hooks):
            raise InterventionContractError(f"method {each.method!r} of {who} {flaw}")
    hook, count = Counter(each.hook for each in implementations).most_common(1)[0]
    if count > 1:
        methods = _listed(each.method for each in implementations if each.hook == hook)
        raise InterventionContractError(f"{who} implements the hook {hook!r} {count} times; keep one of {methods}")


def _version_flaw(required: str | None) -> str | None:
    if required is None:
        return None
    try:
        specifiers = SpecifierSet(required)
    except InvalidSpecifier:
        return f"has requires_kamui = {required!r}, which is no version specifier; write one such as '>=0.1,<1'"
    try:
        installed = version(CORE)
    except PackageNotFoundError:
        return f"requires kamui {required}, and the version of kamui is unknown; install {CORE!r} with pip"
    if specifiers.contains(installed, prereleases=True):
        return None
    return f"requires kamui {required}, but kamui {installed} is installed; install versions that fit each other"


def _option_flaw(name: str, default: object, hooks: Hooks) -> str | None:
    if name in hooks or name == "label":
        return f"has an option {name!r}, a name that interventions keep for themselves; rename the option"
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(default, torch.Tensor):
        return (
            f"has a tensor as default of option {name!r}, which all instances would share; "
            f"write '{name}: Tensor | None = None' and make it in 'opened', or leave the default out"
        )
    return None


def _decorator_flaw(cls: type[Intervention], hook: str) -> str | None:
    named = getattr_static(cls, hook, None)
    function = getattr(named, "__func__", named)
    if named is None or hasattr(function, f"{PROJECT}_impl"):
        return None
    return f"has {hook!r}, the name of a hook, without @kamui.hookimpl; add the decorator, or rename it"


def _method_flaw(each: Implementation, hooks: Hooks) -> str | None:
    if each.options.get("wrapper") or each.options.get("hookwrapper"):
        return (
            "is a wrapper, which KAMUI does not call; "
            "let 'activation' return the new value, with tryfirst or trylast for its place in the order"
        )
    if each.hook not in hooks:
        if each.options.get("optionalhook"):
            return None
        close = did_you_mean(each.hook, hooks)
        return f"is marked @kamui.hookimpl, but no hook is called {each.hook!r}{close} (hooks: {_listed(hooks)})"
    return _signature_flaw(each, hooks) or _kind_flaw(each)


def _signature_flaw(each: Implementation, hooks: Hooks) -> str | None:
    gives = f"takes {{}}; the hook {each.hook!r} gives, by name, {_listed(hooks[each.hook])}"
    for name, parameter in signature(each.function).parameters.items():
        if stars := _STARS.get(parameter.kind):
            return gives.format(f"'{stars}{name}'")
        if parameter.kind is Parameter.POSITIONAL_ONLY:
            return gives.format(f"{name!r} by position only")
        if name not in hooks[each.hook] and parameter.default is Parameter.empty:
            return gives.format(f"{name!r}")
    return None


def _kind_flaw(each: Implementation) -> str | None:
    if iscoroutinefunction(each.function) or isasyncgenfunction(each.function):
        return "is async, and hooks are called inside the forward pass; write a plain 'def'"
    if isgeneratorfunction(each.function) and each.hook != "points":
        return "is a generator, whose body would never run; return instead of 'yield'"
    return None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
