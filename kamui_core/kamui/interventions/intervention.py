"""The base class of every intervention: its fields are the options, its marked methods the callbacks."""

from __future__ import annotations

from dataclasses import Field, dataclass, field, fields
from typing import ClassVar, dataclass_transform
from weakref import WeakKeyDictionary

from kamui.errors import InterventionContractError

# What was noticed while a class was made. Kept beside the classes, whose names are their authors'.
_flaws: WeakKeyDictionary[type, str] = WeakKeyDictionary()
_parameters: WeakKeyDictionary[type, object] = WeakKeyDictionary()


@dataclass_transform(kw_only_default=True, eq_default=False, field_specifiers=(field, Field))
@dataclass(kw_only=True, eq=False, repr=False)
class Intervention:
    """A way to look into a model or to change what it computes, installable as a plugin.

    A subclass is made a keyword-only dataclass. Its fields are the options, which are checked at each use.
    State is set in `opened`, in `__post_init__` or is `field(init=False)`::

        class Scale(kamui.Intervention):
            at: str
            factor: float = 1.0

            @kamui.hookimpl
            def points(self):
                return self.at

            @kamui.hookimpl
            def activation(self, value):
                return value * self.factor

    What cannot work (an own `__init__` or `__eq__`, `@dataclass`, a tensor or a list as default) is refused
    when the class is used, with the remedy.

    Attributes:
        replaces: Whether what `activation` returns does not depend on the value it was given, so that edits made
            before it at the same point are thrown away.
        requires_kamui: The versions of KAMUI that the class works with, such as `">=0.1,<1"`.
    """

    replaces: ClassVar[bool] = False
    requires_kamui: ClassVar[str | None] = None

    def __init_subclass__(cls, **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        _make(cls)

    @property
    def label(self) -> str:
        """The name that messages use: the plugin's, set by the scope, or else the class's."""
        return str(self.__dict__.get("_label") or type(self).__name__)

    @label.setter
    def label(self, label: str) -> None:
        self.__dict__["_label"] = label

    def __repr__(self) -> str:
        shown = [f"{each.name}={_brief(getattr(self, each.name, ...))}" for each in fields(self) if each.repr]
        return f"{type(self).__name__}({', '.join(shown)})"


def flaw_of(cls: type[Intervention]) -> str | None:
    """Return why the class cannot be used, as the end of a sentence about it, or `None`."""
    for made in cls.__mro__:
        if made in _flaws:
            return _flaws[made] if made is cls else f"derives from {made.__name__!r}, which {_flaws[made]}"
        if made in _parameters and vars(made)["__dataclass_params__"] is not _parameters[made]:
            return _DECORATED
    if cls.__eq__ is not object.__eq__:
        owner = next(made for made in cls.__mro__ if "__eq__" in vars(made))
        return f"inherits __eq__ from {owner.__name__!r}; interventions are compared by identity, leave it out"
    return None


_DECORATED = "is decorated with @dataclass; remove it, the base class makes it a dataclass already"
_OWN_INIT = (
    "defines __init__; declare its options as fields (name: type = default) "
    "and set state in __post_init__ or in the hook 'opened'"
)
_OWN_EQ = "defines __eq__; remove it, interventions are compared by identity"


def _make(cls: type[Intervention]) -> None:
    """Make the class a dataclass and note what would not work, without raising in the author's import."""
    own = vars(cls)
    if "__dataclass_params__" in own:  # @dataclass(slots=True) makes the class a second time
        _flaws[cls] = _DECORATED
        return
    if "__init__" in own:
        _flaws[cls] = _OWN_INIT
    elif "__eq__" in own:
        _flaws[cls] = _OWN_EQ
    try:
        dataclass(kw_only=True, eq=False, repr=False)(cls)
    except (TypeError, ValueError) as error:
        _flaws[cls] = flaw = f"cannot be made a dataclass: {error}"
        _refuse_instances(cls, flaw)
    else:
        _parameters[cls] = own["__dataclass_params__"]


def _refuse_instances(cls: type[Intervention], flaw: str) -> None:
    def __init__(self: Intervention, **_: object) -> None:  # noqa: N807
        raise InterventionContractError(f"intervention class {type(self).__name__!r} {flaw}")

    cls.__init__ = __init__  # type: ignore[assignment]


def _brief(value: object) -> str:
    """Return a tensor's shape instead of its numbers, and the representation of anything else."""
    shape = getattr(value, "shape", None)
    return repr(value) if shape is None else f"{type(value).__name__}{tuple(shape)}"
