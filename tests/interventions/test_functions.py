"""Bare functions: what they are given, and what counts as a change."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from kamui.errors import InterventionContractError, OptionError
from kamui.interventions import FunctionIntervention, build, contract_of


def applied(function: Any, value: Tensor) -> Tensor | None:
    made = FunctionIntervention(function=function, at="output")
    return made.activation(point="output", value=value, call="call")  # type: ignore[arg-type]


def test_it_fits_its_own_contract() -> None:
    callback = contract_of(FunctionIntervention).callback("activation")
    assert callback is not None
    assert callback.arguments == {"point", "value", "call"}


def test_a_returned_tensor_replaces() -> None:
    value = torch.ones(3)
    assert torch.equal(applied(lambda value: value * 2, value), torch.full((3,), 2.0))  # type: ignore[arg-type]
    assert torch.equal(value, torch.ones(3))


def test_none_changes_nothing() -> None:
    seen = []
    assert applied(lambda value: seen.append(value.sum().item()), torch.ones(3)) is None
    assert seen == [3.0]


@pytest.mark.parametrize("inference", [False, True])
def test_writing_to_the_copy_replaces_and_leaves_the_value_alone(*, inference: bool) -> None:
    def erase(value: Tensor) -> None:
        value[0] = 0.0

    with torch.inference_mode(inference):
        value = torch.ones(3)
        result = applied(erase, value)
        unwritten = applied(lambda value: None, value)
    assert result is not None
    assert result.tolist() == [0.0, 1.0, 1.0]
    assert value.tolist() == [1.0, 1.0, 1.0]
    assert unwritten is None


def test_gradients_pass_through_the_copy() -> None:
    value = torch.ones(3, requires_grad=True)

    def double(value: Tensor) -> None:
        value.mul_(2)

    result = applied(double, value)
    assert result is not None
    result.sum().backward()
    assert value.grad is not None
    assert value.grad.tolist() == [2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("function", "given"),
    [
        (lambda value: [value], ["v"]),
        (lambda anything: [anything], ["v"]),
        (lambda value, point: [value, point], ["v", "output"]),
        (lambda point, value: [point, value], ["output", "v"]),
        (lambda x, call: [x, call], ["v", "call"]),
        (lambda *, call, point: [call, point], ["call", "output"]),
        (lambda x, scale=3: [x, scale], ["v", 3]),
        (lambda x, point=None: [x, point], ["v", "output"]),
        (lambda *everything: list(everything), ["v"]),
        (lambda x, /: [x], ["v"]),
        (lambda: [], []),
        (partial(lambda scale, value: [scale, value], 3), [3, "v"]),
    ],
)
def test_a_function_is_given_what_it_names(function: Any, given: list[object]) -> None:
    value = torch.ones(2)
    result: Any = applied(function, value)
    assert ["v" if isinstance(each, Tensor) else each for each in result] == given


def test_functions_of_torch_are_taken() -> None:
    value = torch.tensor([-1.0, 2.0])
    for function in (torch.relu, torch.nn.functional.relu, torch.nn.ReLU()):
        assert torch.equal(applied(function, value), torch.tensor([0.0, 2.0]))  # type: ignore[arg-type]


def test_an_argument_that_is_not_given_is_refused() -> None:
    def edit(value: Tensor, layer: int) -> None: ...

    with pytest.raises(InterventionContractError) as caught:
        FunctionIntervention(function=edit, at="output")
    assert str(caught.value) == (
        "function 'edit' takes 'layer'; "
        "it is given any of value, point, call by name, or the value as its first argument"
    )


def test_it_is_named_after_the_function() -> None:
    def edit(value: Tensor) -> None: ...

    assert FunctionIntervention(function=edit, at="output").label == "edit"
    assert FunctionIntervention(function=partial(edit), at="output").label == "edit"


def test_it_needs_a_place() -> None:
    with pytest.raises(OptionError, match=r"^intervention 'relu' needs option 'at' "):
        build(FunctionIntervention, {"function": torch.relu}, "relu")
    built = build(FunctionIntervention, {"function": torch.relu, "at": ["a.output", "b.output"]}, "relu")
    assert built.points() == ["a.output", "b.output"]  # type: ignore[attr-defined]
