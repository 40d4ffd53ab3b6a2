"""What installed packages offer under an entry-point group, read from their metadata alone.

Nothing is imported until one offer is loaded, and one package whose metadata is broken never hides another.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from configparser import ConfigParser
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions
from typing import Any

from kamui.errors import PluginImportError

CORE = "kamui-core"
_PLACE = r"\s*[\w.]+\s*(:\s*[\w.]+\s*)?(\[.*\]\s*)?"


@dataclass(frozen=True, order=True)
class Offer:
    """One entry point of one installed distribution.

    Attributes:
        name: The name under which it is offered.
        value: Where it is, such as `"kamui_scale:Scale"`.
        distribution: The name of the distribution, as its metadata spell it.
        version: The version of the distribution.
    """

    name: str
    value: str
    distribution: str
    version: str

    @property
    def package(self) -> str:
        """The distribution and its version, as messages name them."""
        return f"{self.distribution!r} {self.version}"

    @property
    def is_bundled(self) -> bool:
        """Whether it comes along with KAMUI."""
        return _normalized(self.distribution) == CORE

    def load(self) -> Any:
        """Import what is offered.

        Raises:
            PluginImportError: The import failed, for whatever reason; chained to it.
        """
        try:
            return EntryPoint(self.name, self.value, "").load()
        except (Exception, SystemExit) as error:
            who = f"plugin {self.name!r} of {self.package} cannot be imported from {self.value!r}"
            raise PluginImportError(f"{who}: {self._cause(error)}") from error

    def _cause(self, error: BaseException) -> str:
        if not re.fullmatch(_PLACE, self.value):
            return f"it is not written as 'module:name'; update or uninstall {self.distribution!r}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            own = self.value.partition(":")[0].strip()
            if own == error.name or own.startswith(f"{error.name}."):
                return f"there is no module {error.name!r}; reinstall {self.distribution!r}"
            return f"it needs the module {error.name!r}, which is not installed; install it"
        return f"{_one_line(error)}; update or uninstall {self.distribution!r}"


@dataclass(frozen=True)
class Discovery:
    """The offers of one group at one moment.

    Attributes:
        offers: All of them, sorted by name.
        problems: One line for each distribution whose metadata could not be read.
    """

    offers: tuple[Offer, ...]
    problems: tuple[str, ...]

    def __iter__(self) -> Iterator[Offer]:
        return iter(self.offers)

    @property
    def reserved(self) -> frozenset[str]:
        """The names that come along with KAMUI, which no other distribution may claim."""
        return frozenset(offer.name for offer in self.offers if offer.is_bundled)

    def claims(self, name: str) -> tuple[Offer, ...]:
        """Return the offers that count for a name: one, none, or several that are in conflict."""
        named = [offer for offer in self.offers if offer.name == name]
        return tuple(offer for offer in named if offer.is_bundled or name not in self.reserved)

    def usurpers(self) -> tuple[Offer, ...]:
        """Return the offers that claim a reserved name; they never win."""
        return tuple(offer for offer in self.offers if offer.name in self.reserved and not offer.is_bundled)


def discover(group: str) -> Discovery:
    """Read what every installed distribution offers under `group`.

    A distribution that is seen twice, through two entries of `sys.path`, counts once; of two versions of it
    the first on the path counts, which is the one that `import` would find.
    """
    offers: dict[tuple[str, str], Offer] = {}
    problems: list[str] = []
    for distribution in distributions():
        try:
            for offer in _offers_of(distribution, group):
                offers.setdefault((_normalized(offer.distribution), offer.name), offer)
        # Any exception: how the parser fails on half a file differs from one Python to the next.
        except Exception as error:
            problems.append(
                f"package at {_place(distribution)!r} is ignored, its metadata cannot be read "
                f"({_one_line(error)}); reinstall it"
            )
    return Discovery(tuple(sorted(offers.values())), tuple(problems))


def _offers_of(distribution: Distribution, group: str) -> Iterator[Offer]:
    text = distribution.read_text("entry_points.txt") or ""
    if group not in text:
        return
    # The parser of importlib.metadata lets half a file pass as one without entries.
    parser = ConfigParser(delimiters="=", interpolation=None, strict=False)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    if group not in parser:
        return
    metadata = distribution.metadata
    if lacking := [key for key in ("Name", "Version") if key not in metadata]:
        raise ValueError(f"METADATA has no {' and no '.join(lacking)}")
    for name, value in parser[group].items():
        yield Offer(name, value, metadata["Name"], metadata["Version"])


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def _place(distribution: Distribution) -> str:
    return str(getattr(distribution, "_path", None) or distribution.locate_file(""))


def _normalized(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()
