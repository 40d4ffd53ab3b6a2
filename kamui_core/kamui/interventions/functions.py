"""Bare functions as interventions: `scope.use(function, at="blocks.3.output")`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import field
from functools import partial
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any

from kamui.errors import InterventionContractError
from kamui.interventions.hookspecs import hookimpl
from kamui.interventions.intervention import Intervention

if TYPE_CHECKING:
    from torch import Tensor

    from kamui.hooks.call import Call
    from kamui.hooks.points import HookPoint

_GIVEN = ("value", "point", "call")
_POSITIONAL = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)


class EditFunction:
    """A function of an activation, as users write it, ready to be called at a point.

    The function takes any of `value`, `point` and `call` by name, or the value as its first argument. It gets
    a copy, which it may write to.

    Args:
        function: The function.

    Attributes:
        name: What messages call it.

    Raises:
        InterventionContractError: The function needs something that it is not given.
    """

    def __init__(self, function: Callable[..., Tensor | None]) -> None:
        self.name = _name(function)
        self._function = function
        self._by_position, self._takes = _arguments(function)

    def __call__(self, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
        """Return what the function returns, or the copy if it wrote to that, or None for unchanged."""
        copy = _writable(value)
        written = copy._version
        given = {"value": copy, "point": point, "call": call}
        by_name = {name: given[name] for name in self._takes}
        result = self._function(copy, **by_name) if self._by_position else self._function(**by_name)
        if result is None and copy._version != written:
            return copy
        return result


class FunctionIntervention(Intervention):
    """Apply a function at one or several points.

    The function takes any of `value`, `point` and `call` by name, or the value as its first argument. It gets
    a copy, which it may write to. What it returns replaces the activation; where it returns `None`, the copy
    does, if it was written to.

    Attributes:
        function: The function.
        at: The point or pattern, or several.
    """

    function: Callable[..., Tensor | None]
    at: str | Sequence[str]
    _edit: EditFunction = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._edit = EditFunction(self.function)
        self.label = self._edit.name

    @hookimpl
    def points(self) -> str | Sequence[str]:
        """Listen where the user said."""
        return self.at

    @hookimpl
    def activation(self, point: HookPoint, value: Tensor, call: Call) -> Tensor | None:
        """Call the function with a copy of the value, and tell what came of it."""
        return self._edit(point, value, call)


def _writable(value: Tensor) -> Tensor:
    """Return a copy that counts its writes, which a tensor made under `torch.inference_mode` does not."""
    import torch

    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return value.detach().clone()
    return value.clone()


def _arguments(function: Callable[..., Any]) -> tuple[bool, frozenset[str]]:
    """Return whether the first argument is the value by position, and which are given by name.

    Raises:
        InterventionContractError: The function needs something that it is not given.
    """
    try:
        parameters = list(signature(function).parameters.values())
    except (TypeError, ValueError):  # many functions of torch are built in, without a signature
        return True, frozenset()
    first = parameters[0] if parameters else None
    by_position = first is not None and first.name not in _GIVEN and _takes_the_value(first, parameters)
    rest = parameters[1:] if by_position else parameters
    if unknown := [each for each in rest if _is_required(each) and not _is_given(each)]:
        raise InterventionContractError(
            f"function {_name(function)!r} takes {', '.join(repr(each.name) for each in unknown)}; "
            "it is given any of value, point, call by name, or the value as its first argument"
        )
    return by_position, frozenset(each.name for each in rest if _is_given(each))


def _takes_the_value(first: Parameter, parameters: Sequence[Parameter]) -> bool:
    if any(each.name == "value" and _is_given(each) for each in parameters):
        return False
    return first.kind is Parameter.VAR_POSITIONAL or (first.kind in _POSITIONAL and _is_required(first))


def _is_given(parameter: Parameter) -> bool:
    return parameter.name in _GIVEN and parameter.kind in (
        Parameter.POSITIONAL_OR_KEYWORD,
        Parameter.KEYWORD_ONLY,
    )


def _is_required(parameter: Parameter) -> bool:
    variable = parameter.kind in (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and not variable


def _name(function: Callable[..., Any]) -> str:
    if isinstance(function, partial):
        return _name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))
