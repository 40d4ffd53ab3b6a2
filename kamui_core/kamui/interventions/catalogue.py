"""The interventions that are installed: found by name, imported when they are asked for.

What a user passes in code is used as it is; a name is looked up among the entry points of the group
`kamui.interventions`. `KAMUI_DISABLE_PLUGINS` switches names off, separated by commas; `*` stands for every
name but those that come along with KAMUI, without which a scope could not work.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings
from functools import reduce
from weakref import WeakKeyDictionary

from kamui.discovery import CORE, Discovery, Offer, discover
from kamui.errors import (
    PluginConflictError,
    PluginDisabledError,
    PluginError,
    PluginNotFoundError,
    PluginWarning,
    did_you_mean,
)
from kamui.interventions.contract import contract_of
from kamui.interventions.intervention import Intervention

GROUP = "kamui.interventions"
DISABLE = "KAMUI_DISABLE_PLUGINS"


class Catalogue:
    """The intervention classes that installed packages offer.

    Success is kept, failure is not: what failed is tried again the next time that it is asked for.
    """

    def __init__(self, group: str = GROUP) -> None:
        self._group = group
        self._lock = threading.Lock()
        self._chosen: dict[str, Offer] = {}
        self._loaded: dict[str, type[Intervention]] = {}
        self._failures: dict[str, str] = {}
        self._said: set[str] = set()
        self._offer_of: WeakKeyDictionary[type, Offer | None] = WeakKeyDictionary()

    def offers(self) -> tuple[Offer, ...]:
        """Return everything that is offered, from metadata alone; those that `check` refuses included."""
        return self._discover().offers

    def load(self, name: str) -> type[Intervention]:
        """Import the intervention of that name, and only this one, and check it.

        Raises:
            PluginNotFoundError: Nothing of that name is installed.
            PluginDisabledError: The name is switched off.
            PluginConflictError: Several packages claim the name.
            PluginImportError: The import failed.
            InterventionContractError: It is no intervention, or does not fit the hooks or the versions.
        """
        loaded = self._loaded.get(name)
        if loaded is not None:
            _refuse_disabled(self._chosen[name])
            return loaded
        offer = self._choose(name)
        _refuse_disabled(offer)
        try:
            cls = _load(offer)
        except PluginError as error:
            self._failures[name] = str(error)
            importlib.invalidate_caches()  # what is missing may be installed before the next try
            raise
        self._failures.pop(name, None)
        self._chosen[name], self._loaded[name] = offer, cls
        self._offer_of[cls] = offer
        return cls

    def refusal(self, offer: Offer) -> PluginError | None:
        """Return why an offer cannot be used as far as metadata tell, or `None`; imports nothing."""
        discovery = self._discover()
        try:
            if offer in discovery.usurpers():
                raise PluginConflictError(_usurped(offer))
            _only(discovery.claims(offer.name))
            _refuse_disabled(offer)
        except PluginError as error:
            return error
        return None

    def check(self, offer: Offer) -> PluginError | None:
        """Return why an offer cannot be used, or `None`; imports it unless its metadata tell enough."""
        refusal = self.refusal(offer)
        if refusal is not None:
            return refusal
        try:
            _load(offer)
        except PluginError as error:
            return error
        return None

    def offer_of(self, cls: type[Intervention]) -> Offer | None:
        """Return the offer that a class was or could be loaded from, or `None`; imports nothing."""
        if cls not in self._offer_of:
            found = (offer for offer in self._discover().offers if _points_to(offer, cls))
            self._offer_of[cls] = next(found, None)
        return self._offer_of[cls]

    def _discover(self) -> Discovery:
        discovery = discover(self._group)
        for text in [*discovery.problems, *map(_usurped, discovery.usurpers())]:
            with self._lock:
                new = text not in self._said
                self._said.add(text)
            if new:
                warnings.warn(text, PluginWarning, stacklevel=3)
        return discovery

    def _choose(self, name: str) -> Offer:
        discovery = self._discover()
        if not discovery.claims(name):
            importlib.invalidate_caches()  # a package that was installed a moment ago
            discovery = self._discover()
        claims = discovery.claims(name)
        if not claims:
            raise PluginNotFoundError(self._not_found(name, discovery))
        _refuse_disabled(*claims)
        return _only(claims)

    def _not_found(self, name: str, discovery: Discovery) -> str:
        known = sorted({offer.name for offer in discovery.offers})
        remedy = did_you_mean(name, known) or "; install the package that offers it, or pass the class itself"
        installed = ", ".join(map(repr, known)) or "none"
        broken = "; ".join([*(self._failures[each] for each in sorted(self._failures)), *discovery.problems])
        known_text = f"installed: {installed}" + (f"; broken: {broken}" if broken else "")
        return f"intervention {name!r} is not installed{remedy} ({known_text})"


def _load(offer: Offer) -> type[Intervention]:
    cls: type[Intervention] = offer.load()
    contract_of(cls, offer)
    return cls


def _only(claims: tuple[Offer, ...]) -> Offer:
    if len(claims) == 1:
        return claims[0]
    packages = " and ".join(f"{claim.package} ({claim.value!r})" for claim in claims)
    raise PluginConflictError(
        f"intervention {claims[0].name!r} is offered by {packages}; uninstall all but one, or pass the class itself"
    )


def _refuse_disabled(*claims: Offer) -> None:
    disabled = os.environ.get(DISABLE, "")
    names = {part.strip() for part in disabled.split(",")}
    offer = claims[0]
    if offer.name in names or ("*" in names and not offer.is_bundled):
        packages = " and ".join(claim.package for claim in claims)
        raise PluginDisabledError(
            f"intervention {offer.name!r} of {packages} is switched off by {DISABLE}={disabled!r}; change the variable"
        )


def _usurped(offer: Offer) -> str:
    return (
        f"intervention {offer.name!r} of {offer.package} is ignored, the name is reserved for {CORE!r}; "
        f"uninstall {offer.distribution!r}, or ask its author for another name"
    )


def _points_to(offer: Offer, cls: type) -> bool:
    module, _, path = offer.value.partition("[")[0].partition(":")
    found: object = sys.modules.get(module.strip())
    return bool(path) and reduce(lambda at, name: getattr(at, name, None), path.strip().split("."), found) is cls


catalogue = Catalogue()
"""The catalogue of this process."""
