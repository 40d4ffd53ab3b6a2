"""Whether a value fits an annotation; what cannot be resolved or understood fits everything."""

from __future__ import annotations

import inspect
import numbers
import os
import re
import sys
import typing
from collections import ChainMap, abc
from dataclasses import InitVar
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, Union

UNKNOWN: Final = object()
"""The hint of an annotation that cannot be resolved."""

_NUMBERS: dict[type, type] = {float: numbers.Real, int: numbers.Integral, complex: numbers.Complex}


def hint_of(cls: type, name: str) -> tuple[str, object]:
    """Return the annotation of a field as text, and the type it stands for or `UNKNOWN`."""
    owner = next(made for made in cls.__mro__ if name in inspect.get_annotations(made))
    annotation = inspect.get_annotations(owner)[name]
    hint = _resolved(annotation, owner)
    if isinstance(hint, InitVar):
        hint = hint.type
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"^(?:\w+\.)*InitVar\[(.*)\]$", r"\1", text), hint


def fits(value: object, hint: object) -> bool:
    """Return whether a value may be passed where `hint` is expected.

    An int is a float, a bool is no number; a string is a path, but no sequence of strings; a list is a tuple.
    """
    hint = getattr(hint, "__supertype__", getattr(hint, "__value__", hint))  # NewType, and the `type` statement
    if hint is None or hint is NoneType:
        return value is None
    if isinstance(hint, type) and hint in _NUMBERS:
        return isinstance(value, _NUMBERS[hint]) and not isinstance(value, bool)
    if hint is Path:
        return isinstance(value, str | os.PathLike)
    return _fits_generic(value, typing.get_origin(hint) or hint, typing.get_args(hint))


def adapted(value: object, hint: object) -> object:
    """Return a value that fits as the type that was asked for: a string as a `Path`, a list as a tuple."""
    for wanted in _alternatives(hint):
        origin = typing.get_origin(wanted) or wanted
        if isinstance(origin, type) and isinstance(value, origin):
            return value
    for wanted in _alternatives(hint):
        if wanted is Path and isinstance(value, str):
            return Path(value)
        if (typing.get_origin(wanted) or wanted) is tuple and isinstance(value, list) and fits(value, wanted):
            return tuple(value)
    return value


def _resolved(annotation: object, owner: type) -> object:
    def holder() -> None: ...

    holder.__annotations__ = {"it": annotation}
    module = vars(sys.modules[owner.__module__]) if owner.__module__ in sys.modules else {}
    try:
        return typing.get_type_hints(holder, {}, ChainMap(dict(vars(owner)), module, _usual_names()))["it"]
    # Any exception: an annotation is any expression of the author's, and only a check is lost.
    except Exception:
        return UNKNOWN


def _usual_names() -> dict[str, Any]:
    # Authors import these for type checkers alone. Where torch is not loaded, no value is a tensor.
    names = {name: getattr(abc, name) for name in ("Callable", "Iterable", "Mapping", "Sequence")}
    torch = sys.modules.get("torch")
    return names | {"Path": Path} | ({"torch": torch, "Tensor": torch.Tensor} if torch else {})


def _alternatives(hint: object) -> tuple[object, ...]:
    return typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)


def _fits_generic(value: object, origin: object, arguments: tuple[object, ...]) -> bool:
    if origin is Union or origin is UnionType:
        return any(fits(value, argument) for argument in arguments)
    if origin is Literal:
        return any(type(value) is type(argument) and value == argument for argument in arguments)
    if origin is tuple:
        return isinstance(value, tuple | list) and _fits_tuple(value, arguments)
    if not isinstance(origin, type):
        return True
    if isinstance(value, str | bytes) and issubclass(origin, abc.Iterable):
        return isinstance(value, origin) and issubclass(origin, str | bytes)
    try:
        return isinstance(value, origin) and _fits_items(value, arguments)
    except TypeError:  # a protocol that cannot be checked
        return True


def _fits_items(value: object, arguments: tuple[object, ...]) -> bool:
    if isinstance(value, abc.Mapping):
        return len(arguments) != 2 or all(
            fits(key, arguments[0]) and fits(item, arguments[1]) for key, item in value.items()
        )
    if isinstance(value, abc.Collection):  # an iterator would be used up by looking
        return len(arguments) != 1 or all(fits(each, arguments[0]) for each in value)
    return True


def _fits_tuple(value: list[object] | tuple[object, ...], arguments: tuple[object, ...]) -> bool:
    if not arguments:
        return True
    if arguments[-1] is Ellipsis:
        return all(fits(each, arguments[0]) for each in value)
    return len(value) == len(arguments) and all(map(fits, value, arguments))
