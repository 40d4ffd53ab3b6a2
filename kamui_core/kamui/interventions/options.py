"""Options: what a user passes by name, checked against the fields of an intervention class."""

from __future__ import annotations

import inspect
import re
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any
from weakref import WeakKeyDictionary

from kamui.errors import OptionError, did_you_mean
from kamui.interventions.annotations import UNKNOWN, adapted, fits, hint_of
from kamui.interventions.contract import contract_of
from kamui.interventions.intervention import Intervention


@dataclass(frozen=True)
class Option:
    """One option of an intervention class.

    Attributes:
        name: Its name.
        annotation: Its type as text, without module names.
        default: Its default as text, or `None` where it is required.
        hint: Its type, or a value that stands for a type that cannot be told.
    """

    name: str
    annotation: str
    default: str | None
    hint: object

    @property
    def required(self) -> bool:
        """Whether it must be given."""
        return self.default is None

    def __str__(self) -> str:
        return f"{self.name}: {self.annotation}" + ("" if self.default is None else f" = {self.default}")


_known: WeakKeyDictionary[type[Intervention], tuple[Option, ...]] = WeakKeyDictionary()


def build(cls: type[Intervention], options: Mapping[str, Any], label: str) -> Intervention:
    """Make an instance after checking its options.

    Args:
        cls: The intervention class.
        options: The options by name.
        label: The name that messages use; the instance keeps it.

    Raises:
        InterventionContractError: The class does not fit the contract.
        OptionError: An option is unknown, missing or of another type.
    """
    known = {option.name: option for option in options_of(cls)}
    _check_names(options, known, label)
    for name, value in options.items():
        if not fits(value, known[name].hint):
            raise OptionError(
                f"option {name!r} of intervention {label!r} takes {known[name].annotation}, not {_shown(value)}"
            )
    try:
        instance = cls(**{name: adapted(value, known[name].hint) for name, value in options.items()})
    except Exception as error:
        error.add_note(f"raised while intervention {label!r} was made from its options")
        raise
    instance.label = label
    return instance


def options_of(cls: type[Intervention]) -> tuple[Option, ...]:
    """Return the options of a class, sorted by name.

    Raises:
        InterventionContractError: The class does not fit the contract.
    """
    known = _known.get(cls)
    if known is None:
        contract_of(cls)
        parameters = inspect.signature(cls.__init__).parameters
        known = tuple(_option(cls, parameters[name]) for name in sorted(parameters) if name != "self")
        if all(option.hint is not UNKNOWN for option in known):  # else more may be known when torch is loaded
            _known[cls] = known
    return known


def describe_options(cls: type[Intervention]) -> str:
    """Return the options in one line, such as `"alpha: float = 1.0, at: str"`."""
    return ", ".join(map(str, options_of(cls)))


def _check_names(options: Mapping[str, Any], known: Mapping[str, Option], label: str) -> None:
    if unknown := [name for name in options if name not in known]:
        hint = did_you_mean(unknown[0], known)
        raise OptionError(f"intervention {label!r} has no {_listed(unknown)}{hint} ({_taken(known)})")
    if missing := [name for name, option in known.items() if option.required and name not in options]:
        raise OptionError(f"intervention {label!r} needs {_listed(missing)} ({_taken(known)})")


def _taken(known: Mapping[str, Option]) -> str:
    return f"it takes {', '.join(map(str, known.values())) or 'no options'}"


def _listed(names: list[str]) -> str:
    return f"option{'s' if len(names) > 1 else ''} {', '.join(map(repr, names))}"


def _option(cls: type[Intervention], parameter: inspect.Parameter) -> Option:
    text, hint = hint_of(cls, parameter.name)
    return Option(parameter.name, _without_modules(text), _default(cls, parameter), hint)


def _default(cls: type[Intervention], parameter: inspect.Parameter) -> str | None:
    if parameter.default is inspect.Parameter.empty:
        return None
    factory = cls.__dataclass_fields__[parameter.name].default_factory
    if factory is not MISSING:
        return f"{getattr(factory, '__name__', 'made')}()".replace("<lambda>()", "...")
    return reprlib.repr(parameter.default)


def _without_modules(text: str) -> str:
    """Shorten `torch.Tensor` to `Tensor`, but leave what stands in quotes."""
    return re.sub(r"('[^']*'|\"[^\"]*\")|\b(?:[A-Za-z_]\w*\.)+", lambda found: found[1] or "", text)


def _shown(value: object) -> str:
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"{type(value).__name__} of shape {tuple(shape)}"
    return f"{type(value).__name__} {reprlib.repr(value)}"
