"""A tape of what a running module computes: which call made each tensor, and out of which.

A value inside the computation can be replaced after the fact: what depends on it is computed again, with the
module's own calls, up to the tensor that is asked for.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Final, NamedTuple

from torch import Tensor

from kamui.errors import AttentionError

_NESTED: Final = (list, tuple)


@dataclasses.dataclass(frozen=True, eq=False, slots=True)
class Step:
    """One call that made a tensor.

    Attributes:
        name: What was called: `"matmul"`, `"add_"`, `"mT"`, ...
        func: The function itself.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        inputs: The tensors among its arguments, in order.
        result: The tensor that it made, or wrote to.
    """

    name: str
    func: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    inputs: tuple[Value, ...]
    result: Tensor

    @property
    def writes(self) -> bool:
        """Whether it wrote to its first argument."""
        return is_in_place(self.name)


class Value(NamedTuple):
    """A tensor as it was at one moment: the step that made it, or wrote to it last, is part of what it is."""

    tensor: Tensor
    step: Step | None

    @property
    def key(self) -> int:
        """What tells it from other values of the same tape."""
        return id(self.tensor) if self.step is None else id(self.step)


class Tape:
    """The steps of one running call of a module."""

    def __init__(self) -> None:
        self._steps: list[Step] = []
        self._latest: dict[int, Step] = {}
        self._kept: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Let go of every tensor."""
        self._steps.clear()
        self._latest.clear()
        self._kept.clear()

    def value(self, tensor: Tensor) -> Value:
        """Return a tensor as it is now."""
        return Value(tensor, self._latest.get(id(tensor)))

    def keep(self, tensor: Tensor) -> None:
        """Keep a copy of a tensor that is about to be overwritten."""
        self._kept[self.value(tensor).key] = tensor.clone()

    def record(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], result: object
    ) -> Step | None:
        """Note a call, and return its step; None where it made no tensor, or only handed one through."""
        name = name_of(func)
        if is_in_place(name):
            result = args[0]
        elif any(result is one for one in args):
            return None
        if not isinstance(result, Tensor):
            return None
        inputs = tuple(self.value(tensor) for tensor in tensors_in(args, kwargs))
        step = Step(name, func, args, kwargs, inputs, result)
        self._steps.append(step)
        self._latest[id(result)] = step
        return step

    def replay(self, target: Value, changes: Mapping[int, Tensor]) -> Tensor:
        """Return what `target` would be, had the values with these keys been others.

        Raises:
            AttentionError: Something that is needed for it was overwritten since.
        """
        if not changes:
            return self._content(target)
        needed = _ancestors(target)
        changed = dict(changes)
        for step in self._steps:
            affected = id(step) in needed and any(value.key in changed for value in step.inputs)
            if affected and id(step) not in changed:
                changed[id(step)] = self._again(step, changed)
        return changed[target.key] if target.key in changed else self._content(target)

    def _again(self, step: Step, changed: Mapping[int, Tensor]) -> Tensor:
        new = {
            id(value.tensor): changed[value.key] if value.key in changed else self._content(value)
            for value in step.inputs
        }
        if step.writes:
            new[id(step.args[0])] = new[id(step.args[0])].clone()
        args = with_tensors(step.args, new)
        result = step.func(*args, **with_tensors(step.kwargs, new))
        return args[0] if step.writes else result  # type: ignore[no-any-return]

    def _content(self, value: Value) -> Tensor:
        if self._latest.get(id(value.tensor)) is value.step:
            return value.tensor
        if value.key not in self._kept:
            raise AttentionError(
                f"a replaced value inside attention cannot be carried on: a tensor of shape "
                f"{tuple(value.tensor.shape)} that it was used with was overwritten since; replace 'weights' or 'z'"
            )
        return self._kept[value.key]


def name_of(func: Callable[..., Any]) -> str:
    """Return the name of a function, method or property as torch hands it to a mode."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name  # type: ignore[attr-defined]


def is_in_place(name: str) -> bool:
    """Tell whether a call of that name writes to its first argument."""
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__"))


def tensors_in(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yield the tensors among a call's arguments, those in lists included."""
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, _NESTED):
            yield from (one for one in argument if isinstance(one, Tensor))


def with_tensors(arguments: Any, new: Mapping[int, Tensor]) -> Any:
    """Return arguments with other tensors in the place of those with these ids."""
    if isinstance(arguments, Tensor):
        return new.get(id(arguments), arguments)
    if isinstance(arguments, Mapping):
        return {name: with_tensors(one, new) for name, one in arguments.items()}
    if type(arguments) in _NESTED:
        return type(arguments)(with_tensors(one, new) for one in arguments)
    return arguments


def _ancestors(target: Value) -> Collection[int]:
    found: set[int] = set()
    waiting = [target]
    while waiting:
        step = waiting.pop().step
        if step is not None and id(step) not in found:
            found.add(id(step))
            waiting += step.inputs
    return found
