"""Every exception and warning of KAMUI.

Each error is a `KamuiError`, and also the built-in type that a user would catch in that place::

    KamuiError
    ├── ConfigError (ValueError)               a model config that cannot be used
    ├── PointError (ValueError)                a hook point that is written wrongly
    ├── UnknownPointError (KeyError)           a hook point that this model does not have
    ├── UnsupportedModelError (TypeError)      canonical names on a model that nothing recognises
    ├── NotCapturedError (KeyError)            `get` on something that was not captured
    │   └── CallIndexError (IndexError)        a forward pass or call that there was not
    ├── PositionError (IndexError)             token positions that cannot be known, or do not fit
    ├── HeadError (IndexError)                 attention heads that a value does not have
    ├── ValueStructureError (TypeError)        a selector or an edit that does not fit a nested value
    ├── ReplacementError (ValueError)          a replacement of another type, shape, dtype or device
    ├── InPlaceEditError (RuntimeError)        a callback that wrote to the live activation
    ├── AttentionError (RuntimeError)          attention internals that this computation does not form
    ├── TransformError (RuntimeError)          a gradient point inside a torch.func transform
    ├── StrictError (RuntimeError)             what a strict scope found at its end
    ├── SweepError (ValueError)                a sweep whose inputs or metric leave nothing to compare
    ├── MissingExtraError (ImportError)        an optional package that is not installed
    ├── ScopeError (RuntimeError)              a scope used outside its block, or entered twice
    │   ├── NoOpenScopeError                   `kamui.use` outside any scope
    │   └── ScopeClosedError                   something that needed the scope came after its end
    └── PluginError                            an intervention that cannot be had by its name
        ├── PluginNotFoundError (KeyError)     nothing of that name is installed
        ├── PluginDisabledError                switched off by KAMUI_DISABLE_PLUGINS
        ├── PluginConflictError                two packages claim one name
        ├── PluginImportError (ImportError)    the package fails on import
        ├── InterventionContractError (TypeError)  not an Intervention, or a callback that does not fit
        └── OptionError (TypeError)            an option that is unknown, missing or of another type

    KamuiWarning (UserWarning)
    ├── AmbiguousPointWarning                  a name that is both a module path and a canonical name
    ├── NeverFiredWarning                      a point that was listened to and never reached
    ├── NoEffectWarning                        a replacement that replaced nothing
    ├── SwappedModuleWarning                   a module that was replaced while it was listened to
    ├── ForeignForwardWarning                  the model ran in a thread that does not have the scope
    └── PluginWarning                          an installed package that is broken or ignored
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class KamuiError(Exception):
    """The root of every exception that KAMUI raises."""

    def __str__(self) -> str:
        # KeyError would show the representation of its argument, quotes and escapes included.
        return " ".join(str(argument) for argument in self.args)


class ConfigError(KamuiError, ValueError):
    """A model config that cannot be used."""


class PointError(KamuiError, ValueError):
    """A hook point that is written wrongly."""


class UnknownPointError(KamuiError, KeyError):
    """A hook point that this model does not have."""


class UnsupportedModelError(KamuiError, TypeError):
    """Canonical names were used on a model that no architecture recognises."""


class NotCapturedError(KamuiError, KeyError):
    """`get` was asked for something that was not captured."""


class CallIndexError(NotCapturedError, IndexError):
    """A forward pass, or a call of a module in it, that there was not."""


class PositionError(KamuiError, IndexError):
    """Token positions that cannot be known, or that do not fit the value."""


class HeadError(KamuiError, IndexError):
    """Attention heads that a value does not have."""


class ValueStructureError(KamuiError, TypeError):
    """A selector or an edit that does not fit the structure of a module's value."""


class ReplacementError(KamuiError, ValueError):
    """A replacement of another type, shape, dtype or device than the value it replaces."""


class InPlaceEditError(KamuiError, RuntimeError):
    """A callback that wrote to the live activation instead of returning a new one."""


class AttentionError(KamuiError, RuntimeError):
    """Attention internals that this computation does not form."""


class TransformError(KamuiError, RuntimeError):
    """A gradient point that was reached inside a `torch.func` transform."""


class StrictError(KamuiError, RuntimeError):
    """What a strict scope found at its end: a point that never fired, a run that it did not see."""


class SweepError(KamuiError, ValueError):
    """A sweep whose inputs or metric leave nothing to compare."""


class MissingExtraError(KamuiError, ImportError):
    """An optional package that is not installed; the message says how to have it."""


class ScopeError(KamuiError, RuntimeError):
    """A scope that is used outside its block, or entered twice."""


class NoOpenScopeError(ScopeError):
    """`kamui.use` was called outside any scope."""


class ScopeClosedError(ScopeError):
    """Something that needed an open scope came after its end."""


class PluginError(KamuiError):
    """An intervention that cannot be had by its name."""


class PluginNotFoundError(PluginError, KeyError):
    """Nothing of that name is installed."""


class PluginDisabledError(PluginError):
    """The name is switched off by KAMUI_DISABLE_PLUGINS."""


class PluginConflictError(PluginError):
    """Two packages claim one name."""


class PluginImportError(PluginError, ImportError):
    """The package that offers the name fails on import."""


class InterventionContractError(PluginError, TypeError):
    """A class that is not an intervention, or whose callbacks do not fit the hookspecs."""


class OptionError(PluginError, TypeError):
    """An option that is unknown, missing or of another type."""


class KamuiWarning(UserWarning):
    """The root of every warning that KAMUI gives."""


class AmbiguousPointWarning(KamuiWarning):
    """A name that is both a module path and a canonical name of another place."""


class NeverFiredWarning(KamuiWarning):
    """A point that was listened to and never reached."""


class NoEffectWarning(KamuiWarning):
    """A replacement that was asked each time and replaced nothing."""


class SwappedModuleWarning(KamuiWarning):
    """A module that was listened to was replaced inside the scope."""


class ForeignForwardWarning(KamuiWarning):
    """The model ran in a thread or task that does not have the scope."""


class PluginWarning(KamuiWarning):
    """An installed package that is broken or ignored."""


def nearest(name: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """Return the names in `known` that look most like `name`, best first."""
    return difflib.get_close_matches(name, list(known), n=limit, cutoff=0.6)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return `"; did you mean 'x'?"` for the nearest known name, or an empty string."""
    close = nearest(name, known, limit=1)
    return f"; did you mean {close[0]!r}?" if close else ""
