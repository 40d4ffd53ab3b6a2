"""Options are checked by name and by type, and refused in words that tell what there is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import InitVar, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Literal, NewType, Optional, Protocol, TypeVar, Union

import numpy as np
import pytest
import torch

from kamui.errors import InterventionContractError, OptionError
from kamui.interventions import Intervention, build, describe_options, hookimpl, options_of
from kamui.interventions.annotations import UNKNOWN, adapted, fits, hint_of

if TYPE_CHECKING:
    from fractions import Fraction

    from torch import Tensor


class Steering(Intervention):
    vector: Tensor
    at: str
    alpha: float = 1.0

    @hookimpl
    def points(self) -> str:
        return self.at


class Various(Intervention):
    paths: list[Path] = field(default_factory=list)
    mode: Literal["add", "a.b"] = "add"
    scale: torch.Tensor | None = None
    seed: InitVar[int] = 0
    state: int = field(init=False, default=0)

    @hookimpl
    def points(self) -> str:
        return "output"

    def __post_init__(self, seed: int) -> None:
        if seed < 0:
            raise ValueError("the seed is negative")


def refused(cls: type[Intervention], options: Mapping[str, Any]) -> str:
    with pytest.raises(OptionError) as caught:
        build(cls, options, "steering")
    return str(caught.value)


def test_an_instance_is_made_and_labelled() -> None:
    vector = torch.ones(3)
    steering = build(Steering, {"vector": vector, "at": "output", "alpha": 2}, "steering")
    assert isinstance(steering, Steering)
    assert steering.vector is vector
    assert (steering.alpha, steering.label) == (2, "steering")


def test_an_unknown_option_is_refused_with_the_nearest_and_all_known() -> None:
    assert refused(Steering, {"alhpa": 2.0}) == (
        "intervention 'steering' has no option 'alhpa'; did you mean 'alpha'? "
        "(it takes alpha: float = 1.0, at: str, vector: Tensor)"
    )


def test_several_unknown_options_are_refused_at_once() -> None:
    assert refused(Steering, {"zzz": 1, "qqq": 2}) == (
        "intervention 'steering' has no options 'zzz', 'qqq' (it takes alpha: float = 1.0, at: str, vector: Tensor)"
    )


def test_missing_options_are_named() -> None:
    assert refused(Steering, {}) == (
        "intervention 'steering' needs options 'at', 'vector' (it takes alpha: float = 1.0, at: str, vector: Tensor)"
    )


def test_an_intervention_without_options_says_so() -> None:
    class Bare(Intervention):
        @hookimpl
        def points(self) -> str:
            return "output"

    assert refused(Bare, {"at": 1}) == "intervention 'steering' has no option 'at' (it takes no options)"
    assert describe_options(Bare) == ""


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha": "0.5"}, "option 'alpha' of intervention 'steering' takes float, not str '0.5'"),
        ({"alpha": True}, "option 'alpha' of intervention 'steering' takes float, not bool True"),
        ({"at": 3}, "option 'at' of intervention 'steering' takes str, not int 3"),
        ({"vector": [1.0]}, "option 'vector' of intervention 'steering' takes Tensor, not list [1.0]"),
        ({"at": torch.ones(2, 3)}, "option 'at' of intervention 'steering' takes str, not Tensor of shape (2, 3)"),
    ],
)
def test_an_option_of_another_type_is_refused(wrong: Mapping[str, Any], message: str) -> None:
    assert refused(Steering, {"vector": torch.ones(3), "at": "output"} | dict(wrong)) == message


def test_options_are_described_without_module_names() -> None:
    assert describe_options(Various) == (
        "mode: Literal['add', 'a.b'] = 'add', paths: list[Path] = list(), scale: Tensor | None = None, seed: int = 0"
    )
    assert [(row.name, row.required) for row in options_of(Steering)] == [
        ("alpha", False),
        ("at", True),
        ("vector", True),
    ]


def test_a_path_may_be_given_as_text() -> None:
    built = build(Various, {"paths": ["a", "b"]}, "various")
    assert built.paths == ["a", "b"]  # type: ignore[attr-defined]
    assert adapted("a", Path) == Path("a")
    assert adapted("a", Path | None) == Path("a")
    assert adapted("a", str | Path) == "a"
    assert adapted([1, 2], tuple[int, ...]) == (1, 2)


def test_an_error_of_the_author_names_the_intervention() -> None:
    with pytest.raises(ValueError, match="the seed is negative") as caught:
        build(Various, {"seed": -1}, "various")
    assert caught.value.__notes__ == ["raised while intervention 'various' was made from its options"]


def test_a_class_that_breaks_the_contract_is_refused_before_its_options() -> None:
    class Own(Steering):
        def __init__(self) -> None: ...

    with pytest.raises(InterventionContractError, match="defines __init__"):
        build(Own, {"alhpa": 1}, "own")


class Protocolled(Protocol):
    def go(self) -> None: ...


Layer = NewType("Layer", int)
T = TypeVar("T")
TENSOR = torch.ones(2)


@pytest.mark.parametrize(
    ("hint", "good", "bad"),
    [
        (float, [1, 1.5, np.float32(1)], [True, "1", None, TENSOR, 1j]),
        (int, [1, np.int64(1)], [True, 1.0, "1"]),
        (bool, [True], [1, "yes"]),
        (str, ["a"], [1, b"a", Path("a")]),
        (None, [None], [0]),
        (Any, [1, None, TENSOR], []),
        (Literal["add", 1], ["add", 1], ["sub", True, 1.0]),
        (int | None, [1, None], ["1", 1.0]),
        (Optional[float], [1, None], ["1"]),  # noqa: UP045
        (Union[str, list[int]], ["a", [1]], [["a"], 1]),  # noqa: UP007
        (list[int], [[1], []], [(1,), [1.0], "ab", 1]),
        (list, [[1, "a"]], [(1,)]),
        (tuple[int, str], [(1, "a"), [1, "a"]], [(1,), (1, 2), 1]),
        (tuple[int, ...], [(), (1, 2), [1]], [(1, "a")]),
        (tuple, [(1, "a")], [1]),
        (dict[str, int], [{"a": 1}], [{1: 1}, {"a": "b"}, [("a", 1)]]),
        (Mapping[str, float], [{"a": 1}], [{"a": "b"}]),
        (set[int], [{1}], [{"a"}, [1]]),
        (Sequence[str], [["a"], ("a", "b")], ["ab", [1], 1]),
        (Callable[[int], int], [len, lambda x: x], [1, "len"]),
        (Path, ["a", Path("a")], [1, b"a"]),
        (slice, [slice(1)], [1, (1, 2)]),
        (torch.Tensor, [TENSOR, torch.nn.Parameter(TENSOR)], [1.0, [1.0], np.ones(2)]),
        (type[int], [int], [1]),
        (Layer, [1], ["a"]),
        (Protocolled, [1, "a"], []),
        (T, [1, "a"], []),
        (UNKNOWN, [1, "a"], []),
    ],
)
def test_what_fits(hint: object, good: list[object], bad: list[object]) -> None:
    assert [value for value in good if not fits(value, hint)] == []
    assert [value for value in bad if fits(value, hint)] == []


def test_an_iterator_is_not_used_up_by_looking() -> None:
    steps = iter([1, 2])
    assert fits(steps, Iterator[int])
    assert list(steps) == [1, 2]


def test_what_cannot_be_resolved_is_not_checked() -> None:
    class Odd(Intervention, Generic[T]):
        ratio: Fraction
        given: T
        missing: "nothing.of | this" = None  # type: ignore[name-defined]  # noqa: F821, UP037

        @hookimpl
        def points(self) -> str:
            return "output"

    assert hint_of(Odd, "ratio") == ("Fraction", UNKNOWN)
    built = build(Odd, {"ratio": "1/2", "given": 3, "missing": 4}, "odd")
    assert (built.ratio, built.missing) == ("1/2", 4)  # type: ignore[attr-defined]


def test_an_inherited_option_is_resolved_where_it_was_written() -> None:
    class Derived(Steering):
        beta: int = 0

    assert hint_of(Derived, "vector") == ("Tensor", torch.Tensor)
