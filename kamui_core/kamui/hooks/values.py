"""The tensor in a value: where it lies in what a module takes or gives, and how a changed one is put back.

A module's value may be a tensor, a tuple, list, dict, named tuple, dataclass, `PackedSequence` or a mapping such
as transformers' `ModelOutput`. Without a selector the main tensor is meant: the first one, depth first. What is
put back keeps the container's type; the other leaves stay the same objects.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any, Final

from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from kamui.errors import ValueStructureError

Key = int | str
Path = tuple[Key, ...]
Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_DEEPEST: Final = 8


def main_path(value: object) -> Path | None:
    """Return the keys that lead to the first tensor of `value`, or None when it holds none."""
    if isinstance(value, Tensor):
        return ()
    return next(_tensor_paths(value, ()), None)


def take(value: object, path: Path) -> object:
    """Return what lies at `path`.

    Raises:
        ValueStructureError: There is nothing at that path.
    """
    for key in path:
        value = _child(value, key)
    return value


def put(value: Any, path: Path, new: object) -> Any:
    """Return `value` with `new` at `path`, in containers of the same types."""
    if not path:
        return new
    key, rest = path[0], path[1:]
    return _with_child(value, key, put(_child(value, key), rest, new))


def argument_path(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], selector: Path) -> Path | None:
    """Return the path of one tensor in `(args, kwargs)`.

    Without a selector it is the first tensor among the positional arguments, else the first among the keywords
    in the order of `forward`'s signature. A selector that is a name picks that argument, whichever way it came.
    """
    if not selector:
        inner = main_path(args)
        if inner is not None:
            return (0, *inner)
        return next(((1, name, *path) for name, path in _keyword_tensors(module, kwargs)), None)
    head, rest = selector[0], selector[1:]
    if isinstance(head, str) and head in kwargs:
        base: Path = (1, head)
    elif isinstance(head, int) and -len(args) <= head < len(args):
        base = (0, head)
    else:
        names = _parameter_names(type(module).forward)
        base = (0, names.index(head)) if head in names and names.index(str(head)) < len(args) else (1, head)
    inner = main_path(take((args, kwargs), (*base, *rest)))
    return None if inner is None else (*base, *rest, *inner)


def arguments_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a call's arguments by the names that `forward` gives them."""
    return dict(zip(_parameter_names(type(module).forward), args, strict=False)) | kwargs


def tensors_in(value: object) -> Iterator[Tensor]:
    """Yield every tensor in a value, depth first."""
    for path in _tensor_paths(value, ()):
        yield take(value, path)  # type: ignore[misc]


def kind(value: object) -> str:
    """Name a value's type and, for a tensor, its shape, for messages."""
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


def _keyword_tensors(module: nn.Module, kwargs: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    order = _parameter_names(type(module).forward)
    known = [name for name in order if name in kwargs]
    for name in [*known, *(name for name in kwargs if name not in order)]:
        path = main_path(kwargs[name])
        if path is not None:
            yield name, path


@lru_cache(maxsize=1024)
def _parameter_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(forward).parameters)[1:]
    except (TypeError, ValueError):
        return ()


def _tensor_paths(value: object, path: Path) -> Iterator[Path]:
    if isinstance(value, Tensor):
        yield path
    elif len(path) < _DEEPEST:
        for key, child in _children(value):
            yield from _tensor_paths(child, (*path, key))


def _children(value: object) -> Iterator[tuple[Key, object]]:
    if isinstance(value, PackedSequence):
        yield "data", value.data
    elif isinstance(value, Mapping):
        yield from ((key, child) for key, child in value.items() if isinstance(key, int | str))
    elif isinstance(value, tuple | list):
        yield from enumerate(value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))


def _child(value: object, key: Key) -> object:
    children = dict(_children(value))
    if isinstance(value, tuple) and isinstance(key, str) and hasattr(value, "_fields"):
        children |= {name: getattr(value, name) for name in value._fields}
    elif isinstance(value, Mapping | list | tuple) and isinstance(key, int) and key not in children:
        key = _nth_key(list(children), key)
    if key not in children:
        there = ", ".join(repr(name) for name in children) or "nothing"
        raise ValueStructureError(f"there is no {key!r} in {kind(value)}; it holds {there}")
    return children[key]


def _nth_key(keys: list[Key], index: int) -> Key:
    return keys[index] if -len(keys) <= index < len(keys) else index


def _with_child(value: Any, key: Key, new: object) -> Any:
    if isinstance(value, PackedSequence):
        return value._replace(data=new)  # type: ignore[arg-type]
    if isinstance(value, Mapping):
        changed = copy.copy(value)
        changed[key if key in value else _nth_key(list(value), int(key))] = new  # type: ignore[index]
        return changed
    if isinstance(value, tuple | list):
        return _with_item(value, key, new)
    changed = copy.copy(value)
    object.__setattr__(changed, str(key), new)
    return changed


def _with_item(value: tuple[Any, ...] | list[Any], key: Key, new: object) -> Any:
    if hasattr(value, "_fields"):
        name = value._fields[key] if isinstance(key, int) else key
        return value._replace(**{name: new})  # type: ignore[union-attr]
    items = list(value)
    items[int(key)] = new
    if isinstance(value, list):
        changed = copy.copy(value)
        changed[:] = items
        return changed
    return type(value)(items) if type(value) is not tuple else tuple(items)
