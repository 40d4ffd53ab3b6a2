"""What is read off a class, and the wording of every refusal."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest
import torch

from kamui.discovery import Offer
from kamui.errors import InterventionContractError
from kamui.interventions import Intervention, contract_of, hookimpl
from kamui.interventions.contract import _manager


class Plain(Intervention):
    at: str = "output"

    @hookimpl
    def points(self) -> str:
        return self.at

    @hookimpl(trylast=True)
    def activation(self, value: Any, point: str) -> Any:
        return (self, value, point)


def refused(cls: Any) -> str:
    with pytest.raises(InterventionContractError) as caught:
        contract_of(cls)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_callback_tells_its_arguments_and_its_place() -> None:
    contract = contract_of(Plain)
    callback = contract.callback("activation")
    assert callback is not None
    assert callback.arguments == {"value", "point"}
    assert callback.priority == 1
    plain = Plain()
    assert callback.bind(plain)(point="p", value=1) == (plain, 1, "p")
    assert contract.callback("points").arguments == frozenset()  # type: ignore[union-attr]
    assert contract.callback("closed") is None


def test_the_contract_of_a_class_is_made_once() -> None:
    assert contract_of(Plain) is contract_of(Plain)


def test_priorities_order_as_the_names_say() -> None:
    class First(Intervention):
        @hookimpl(tryfirst=True)
        def activation(self) -> None: ...

        @hookimpl
        def opened(self) -> None: ...

    contract = contract_of(First)
    assert [contract.callback(name).priority for name in ("activation", "opened")] == [-1, 0]  # type: ignore[union-attr]


def test_arguments_with_a_default_and_keyword_only_ones_are_given_too() -> None:
    class Optional(Intervention):
        @hookimpl
        def activation(self, value: Any = None, own: int = 3, *, call: Any) -> Any: ...

    assert contract_of(Optional).callback("activation").arguments == {"value", "call"}  # type: ignore[union-attr]


def test_an_implementation_may_have_a_name_of_its_own() -> None:
    class Named(Intervention):
        @hookimpl(specname="activation")
        def edit(self, value: Any) -> Any:
            return value + 1

    callback = contract_of(Named).callback("activation")
    assert callback is not None
    assert callback.bind(Named())(value=1) == 2


def test_a_subclass_overrides_and_inherits_callbacks() -> None:
    class Derived(Plain):
        @hookimpl(tryfirst=True)
        def activation(self, value: Any) -> Any:  # type: ignore[override]
            return -value

    callback = contract_of(Derived).callback("activation")
    assert callback is not None
    assert (callback.priority, callback.bind(Derived())(value=2)) == (-1, -2)
    assert contract_of(Derived).callback("points") is not None


def test_points_may_be_a_generator() -> None:
    class Several(Intervention):
        @hookimpl
        def points(self) -> Iterator[str]:
            yield "output"

    assert contract_of(Several).callback("points") is not None


def test_a_hook_of_a_later_version_is_allowed_where_it_is_optional() -> None:
    class Ahead(Plain):
        @hookimpl(optionalhook=True)
        def later(self, unheard: Any) -> None: ...

    assert contract_of(Ahead).callback("later") is not None


def test_no_property_is_evaluated() -> None:
    class Lazy(Plain):
        @property
        def weights(self) -> NoReturn:
            raise RuntimeError("not loaded yet")

    assert contract_of(Lazy).callback("points") is not None


def test_classes_are_neither_kept_alive_nor_left_registered() -> None:
    class Passing(Plain):
        @hookimpl
        def points(self) -> str:
            return super().points()

    contract_of(Passing)
    reference = weakref.ref(Passing)
    del Passing
    gc.collect()
    assert reference() is None
    assert _manager.get_plugins() == set()


def test_a_broken_class_does_not_poison_the_next() -> None:
    class Broken(Intervention):
        @hookimpl
        def activaton(self) -> None: ...

    for _ in range(2):
        assert "activaton" in refused(Broken)
    assert contract_of(type("Next", (Plain,), {})).callback("points") is not None
    assert _manager.get_plugins() == set()


@pytest.mark.parametrize(
    ("thing", "who"),
    [
        (int, "class 'int'"),
        (len, "builtin_function_or_method 'len'"),
        (Plain(), "an instance of 'Plain'"),
        (3, "int 3"),
    ],
)
def test_only_intervention_classes_are_taken(thing: object, who: str) -> None:
    expected = "is not a class that derives from kamui.Intervention; write 'class Name(kamui.Intervention)'"
    assert refused(thing) == f"{who} {expected}"


def test_the_distribution_is_named_when_it_is_known() -> None:
    with pytest.raises(InterventionContractError, match=r"^class 'int' of 'kamui-scale' 1\.2 is not a class"):
        contract_of(int, Offer("scale", "kamui_scale:Scale", "kamui-scale", "1.2"))  # type: ignore[arg-type]


def test_a_class_without_hooks_is_refused() -> None:
    class Idle(Intervention):
        pass

    assert refused(Idle) == (
        "intervention class 'Idle' implements no hook; mark at least one method with @kamui.hookimpl: "
        "'activation', 'closed', 'forward_finished', 'forward_started', 'opened', 'points'"
    )


def test_a_misspelt_hook_is_refused() -> None:
    class Typo(Intervention):
        @hookimpl
        def activaton(self) -> None: ...

    assert refused(Typo) == (
        "method 'activaton' of intervention class 'Typo' is marked @kamui.hookimpl, but no hook is called 'activaton'; "
        "did you mean 'activation'? (hooks: "
        "'activation', 'closed', 'forward_finished', 'forward_started', 'opened', 'points')"
    )


def test_a_forgotten_decorator_is_refused() -> None:
    class Forgot(Plain):
        def activation(self, value: Any) -> Any: ...  # type: ignore[override]

    assert refused(Forgot) == (
        "intervention class 'Forgot' has 'activation', the name of a hook, without @kamui.hookimpl; "
        "add the decorator, or rename it"
    )


def _unknown(self: Any, value: Any, layer: Any) -> None: ...
def _rest(self: Any, **rest: Any) -> None: ...
def _by_position(self: Any, value: Any, /) -> None: ...


@pytest.mark.parametrize(
    ("function", "taken"),
    [(_unknown, "'layer'"), (_rest, "'**rest'"), (_by_position, "'value' by position only")],
)
def test_arguments_that_are_not_given_are_refused(function: Any, taken: str) -> None:
    cls = type("Extra", (Intervention,), {"activation": hookimpl(function)})
    assert refused(cls) == (
        f"method 'activation' of intervention class 'Extra' takes {taken}; "
        "the hook 'activation' gives, by name, 'call', 'point', 'value'"
    )


@pytest.mark.parametrize("mark", ["wrapper", "hookwrapper"])
def test_wrappers_are_refused(mark: str) -> None:
    def activation(self: Any, value: Any) -> Iterator[None]:
        yield

    cls = type("Wraps", (Intervention,), {"activation": hookimpl(**{mark: True})(activation)})
    assert refused(cls) == (
        "method 'activation' of intervention class 'Wraps' is a wrapper, which KAMUI does not call; "
        "let 'activation' return the new value, with tryfirst or trylast for its place in the order"
    )


def test_generators_and_coroutines_are_refused() -> None:
    class Yields(Intervention):
        @hookimpl
        def activation(self, value: Any) -> Iterator[Any]:
            yield value

    class Awaits(Intervention):
        @hookimpl
        async def activation(self, value: Any) -> None: ...

    assert refused(Yields).endswith("is a generator, whose body would never run; return instead of 'yield'")
    assert refused(Awaits).endswith("is async, and hooks are called inside the forward pass; write a plain 'def'")


def test_two_methods_for_one_hook_are_refused() -> None:
    class Twice(Plain):
        @hookimpl(specname="points")
        def more(self) -> str: ...

    assert refused(Twice) == (
        "intervention class 'Twice' implements the hook 'points' 2 times; keep one of 'more', 'points'"
    )


def test_an_own_init_is_refused() -> None:
    class Own(Plain):
        def __init__(self, at: str) -> None:
            self.at = at

    assert refused(Own) == (
        "intervention class 'Own' defines __init__; declare its options as fields (name: type = default) "
        "and set state in __post_init__ or in the hook 'opened'"
    )


def test_an_own_or_inherited_eq_is_refused() -> None:
    class Own(Plain):
        def __eq__(self, other: object) -> bool:
            return True

    class Comparable:
        def __eq__(self, other: object) -> bool:
            return True

        __hash__ = None  # type: ignore[assignment]

    class Inherits(Comparable, Plain):
        pass

    assert refused(Own) == (
        "intervention class 'Own' defines __eq__; remove it, interventions are compared by identity"
    )
    assert refused(Inherits) == (
        "intervention class 'Inherits' inherits __eq__ from 'Comparable'; "
        "interventions are compared by identity, leave it out"
    )


@pytest.mark.parametrize("arguments", [{}, {"eq": False, "kw_only": True}, {"slots": True}, {"frozen": False}])
def test_a_dataclass_decorator_is_refused(arguments: dict[str, bool]) -> None:
    class Decorated(Plain):
        heads: list[int] = field(default_factory=list)

    again = dataclass(**arguments)(Decorated)  # type: ignore[call-overload]
    assert refused(again) == (
        "intervention class 'Decorated' is decorated with @dataclass; "
        "remove it, the base class makes it a dataclass already"
    )


def test_a_tensor_as_default_is_refused() -> None:
    class Shared(Plain):
        vector: torch.Tensor = torch.zeros(3)

    assert refused(Shared) == (
        "intervention class 'Shared' has a tensor as default of option 'vector', which all instances would share; "
        "write 'vector: Tensor | None = None' and make it in 'opened', or leave the default out"
    )


def test_a_list_as_default_is_refused() -> None:
    class Listed(Plain):
        heads: list[int] = []

    assert refused(Listed) == (
        "intervention class 'Listed' cannot be made a dataclass: "
        "mutable default <class 'list'> for field heads is not allowed: use default_factory"
    )


@pytest.mark.parametrize("name", ["points", "label"])
def test_an_option_with_a_name_of_ours_is_refused(name: str) -> None:
    class Edits(Intervention):
        @hookimpl
        def activation(self) -> None: ...

    cls = type("Clash", (Edits,), {"__annotations__": {name: str}, "__module__": __name__})
    assert refused(cls) == (
        f"intervention class 'Clash' has an option {name!r}, a name that interventions keep for themselves; "
        "rename the option"
    )


def test_an_abstract_class_is_refused() -> None:
    from abc import ABC, abstractmethod

    class Unfinished(Plain, ABC):
        @abstractmethod
        def missing(self) -> None: ...

    assert refused(Unfinished).startswith("intervention class 'Unfinished' cannot be instantiated: ")


def test_a_version_requirement_is_checked(install: Any) -> None:
    install("kamui-core", {}, version="0.3.0")
    fits = type("Fits", (Plain,), {"requires_kamui": ">=0.1,<1"})
    newer = type("Newer", (Plain,), {"requires_kamui": ">=99"})
    wrong = type("Wrong", (Plain,), {"requires_kamui": "0.1 or so"})
    assert contract_of(fits).callback("points") is not None
    assert refused(newer) == (
        "intervention class 'Newer' requires kamui >=99, but kamui 0.3.0 is installed; "
        "install versions that fit each other"
    )
    assert refused(wrong) == (
        "intervention class 'Wrong' has requires_kamui = '0.1 or so', which is no version specifier; "
        "write one such as '>=0.1,<1'"
    )


def test_a_version_requirement_needs_a_known_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [])
    cls = type("Unsure", (Plain,), {"requires_kamui": ">=0.1"})
    assert refused(cls) == (
        "intervention class 'Unsure' requires kamui >=0.1, and the version of kamui is unknown; "
        "install 'kamui-core' with pip"
    )
