"""The base class: what it makes of a subclass, and what it leaves to be refused at use."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from dataclasses import InitVar, field, fields
from typing import ClassVar

import pytest
import torch

from kamui.errors import InterventionContractError
from kamui.interventions import Intervention, hookimpl
from kamui.interventions.intervention import flaw_of


class Scale(Intervention):
    at: str
    factor: float = 1.0

    @hookimpl
    def points(self) -> str:
        return self.at


def test_fields_are_keyword_only_options() -> None:
    scale = Scale(at="output", factor=2.0)
    assert (scale.at, scale.factor) == ("output", 2.0)
    with pytest.raises(TypeError, match="positional"):
        Scale("output")  # type: ignore[misc]


def test_instances_are_compared_and_hashed_by_identity() -> None:
    one, other = Scale(at="output"), Scale(at="output")
    assert one == one
    assert one != other
    assert len({one, other}) == 2


def test_a_required_field_may_follow_an_inherited_default() -> None:
    class Shifted(Scale):
        shift: float

    assert [each.name for each in fields(Shifted)] == ["at", "factor", "shift"]
    assert Shifted(at="output", shift=3.0).shift == 3.0


def test_class_variables_state_and_init_variables_are_no_options() -> None:
    class Seeded(Scale):
        replaces: ClassVar[bool] = True
        seed: InitVar[int] = 0
        seen: list[int] = field(init=False, default_factory=list)

        def __post_init__(self, seed: int) -> None:
            self.seen.append(seed)

    assert Seeded(at="output", seed=7).seen == [7]
    assert Seeded.replaces
    assert not Scale.replaces


def test_the_label_is_the_class_name_until_the_scope_sets_it() -> None:
    scale = Scale(at="output")
    assert scale.label == "Scale"
    scale.label = "scale"
    assert scale.label == "scale"
    assert Scale.__new__(Scale).label == "Scale"


def test_the_representation_shows_shapes_instead_of_numbers() -> None:
    class Add(Scale):
        vector: torch.Tensor

    assert repr(Add(at="output", vector=torch.zeros(3, 4))) == "Add(at='output', factor=1.0, vector=Tensor(3, 4))"
    assert repr(Scale.__new__(Scale)) == "Scale(at=Ellipsis, factor=1.0)"


def test_instances_can_be_copied_and_pickled() -> None:
    scale = Scale(at="output", factor=2.0)
    scale.label = "scale"
    for twin in (copy.deepcopy(scale), pickle.loads(pickle.dumps(scale))):
        assert (twin.at, twin.factor, twin.label) == ("output", 2.0, "scale")


def test_a_mutable_default_does_not_break_the_import_but_names_the_remedy() -> None:
    class Listed(Scale):
        heads: list[int] = []

    assert "use default_factory" in (flaw_of(Listed) or "")
    with pytest.raises(InterventionContractError, match="'Listed' cannot be made a dataclass: mutable default"):
        Listed(at="output", heads=[1])


def test_a_flaw_is_inherited() -> None:
    class Own(Scale):
        def __init__(self) -> None: ...

    class Derived(Own):
        pass

    assert (flaw_of(Derived) or "").startswith("derives from 'Own', which defines __init__; declare its options")


def test_classes_are_not_kept_alive() -> None:
    class Passing(Scale):
        pass

    reference = weakref.ref(Passing)
    del Passing
    gc.collect()
    assert reference() is None
