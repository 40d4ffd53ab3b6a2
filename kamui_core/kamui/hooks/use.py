"""One use of an intervention: its instance at work in a scope, its callbacks, and where it listens and captures."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet

from kamui.errors import InterventionContractError, ScopeError
from kamui.hooks.store import Captures
from kamui.interventions.contract import Callback, contract_of

if TYPE_CHECKING:
    from torch import nn

    from kamui.hooks.chain import Listener
    from kamui.interventions.intervention import Intervention

_at_work: Final[WeakSet[Intervention]] = WeakSet()


class Use:
    """One use of an intervention in a scope."""

    def __init__(self, intervention: Intervention, label: str) -> None:
        self.intervention = intervention
        self.label = label
        self.listeners: list[Listener] = []
        self.captures: Captures | None = None
        self.stores: list[Captures] = []
        self.is_open = False
        self._contract = contract_of(type(intervention))

    def open(self, manager: object) -> None:
        """Let the intervention begin, and note where it captures, if it does.

        Raises:
            ScopeError: This instance is at work in an open scope.
        """
        if self.intervention in _at_work:
            raise ScopeError(
                f"this instance of intervention {self.label!r} is at work in an open scope; make another one"
            )
        self.ask("opened", scope=manager)
        _at_work.add(self.intervention)
        self.is_open = True
        self.stores = [value for value in vars(self.intervention).values() if isinstance(value, Captures)]
        captures = getattr(self.intervention, "captures", None)
        self.captures = captures if captures in self.stores else None

    def close(self, manager: object) -> None:
        """Let the intervention end, if it had begun."""
        if self.is_open:
            self.is_open = False
            _at_work.discard(self.intervention)
            self.ask("closed", scope=manager)

    def names(self, model: nn.Module) -> Iterable[str]:
        """Return the points and patterns that the intervention asks for on `model`.

        Raises:
            InterventionContractError: It returned something else.
        """
        points = self.ask("points", model=model)
        if points is None:
            return ()
        names = (points,) if isinstance(points, str) else points
        if not isinstance(names, Iterable):
            raise InterventionContractError(
                f"intervention {self.label!r} returned {points!r} from 'points'; return a hook point or a list of them"
            )
        return names

    def callback(self, name: str) -> Callback | None:
        """Return the intervention's implementation of one hook."""
        return self._contract.callback(name)

    def ask(self, name: str, **arguments: Any) -> Any:
        """Call one hook with the arguments that the implementation takes; errors name the intervention."""
        callback = self.callback(name)
        if callback is None:
            return None
        taken = {key: value for key, value in arguments.items() if key in callback.arguments}
        try:
            return callback.bind(self.intervention)(**taken)
        except BaseException as error:
            error.add_note(f"in {name!r} of intervention {self.label!r}")
            raise
