"""One open scope: the interventions in use, where they listen, and the forward passes that they see.

`HookManager` is what users hold; each entry of it opens one of these. The taps report to it, and it knows
nothing of how they are wired to torch.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from threading import get_ident
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakSet, ref

from torch import nn

from kamui.errors import AttentionError, InterventionContractError, ScopeError
from kamui.hooks.call import Call
from kamui.hooks.chain import Listener
from kamui.hooks.compiled import run_compiled, run_eagerly
from kamui.hooks.context import activate, deactivate
from kamui.hooks.generation import shadow_generate, unshadow_generate
from kamui.hooks.passes import Entry, PassLog
from kamui.hooks.places import Locator, Place
from kamui.hooks.points import ATTENTION_IOS, HookPoint
from kamui.hooks.sequence import Prompts, read_facts
from kamui.hooks.store import Captures
from kamui.hooks.taps import unwire, wire
from kamui.hooks.values import argument_path, arguments_by_name, take
from kamui.interventions.contract import Callback, contract_of

if TYPE_CHECKING:
    from kamui.interventions.intervention import Intervention

_serials: Final = itertools.count()
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


class Scope:
    """What one entry of a `HookManager` holds.

    Attributes:
        model: The model, without wrappers.
        locator: Finds points in the model.
        isolated: Whether only the context that opened it sees it.
        passes: The forward passes seen.
        uses: The interventions, in the order of use.
    """

    def __init__(self, manager: object, model: nn.Module, *, strict: bool, isolated: bool) -> None:
        self._manager = ref(manager)
        self.model = model
        self.strict = strict
        self.isolated = isolated
        self.serial = next(_serials)
        self.is_open = False
        self.locator = Locator(model)
        self.passes = PassLog()
        self.uses: list[Use] = []
        self._tapped: dict[nn.Module, None] = {}
        self._prompts: defaultdict[int, Prompts] = defaultdict(Prompts)

    @property
    def manager(self) -> Any:
        """The `HookManager` whose entry this is; it holds the scope, so the scope does not hold it."""
        return self._manager()

    def open(self) -> None:
        """Begin: the model's own calls are seen from here on."""
        self.is_open = True
        activate(self)
        try:
            self._tap(self.model)
            shadow_generate(self.model, self, self._prompts_here)
            run_eagerly(self.manager.model, self)
        except BaseException:
            self.close()
            raise

    def use(self, intervention: Intervention, label: str) -> Use:
        """Take an intervention in, and listen where it asks to. If it fails half way, nothing of it stays."""
        use = Use(intervention, label)
        self.uses.append(use)
        try:
            use.open(self.manager)
            self._listen(use, _as_names(use, use.ask("points", model=self.model)))
        except BaseException as error:
            self._undo(use, error)
            raise
        return use

    def close(self) -> tuple[bool, list[BaseException]]:
        """End: take everything off the model, then tell the interventions, last one first.

        Returns:
            Whether it was this context that had opened the scope, and the errors on the way.
        """
        errors: list[BaseException] = []
        self.is_open = False
        here = _surely(lambda: deactivate(self), errors)
        _surely(lambda: unshadow_generate(self.model, self), errors)
        _surely(lambda: run_compiled(self), errors)
        for module in list(self._tapped):
            _surely(partial(unwire, self, module), errors)
        _surely(self.passes.abandon_all, errors)
        for use in reversed(self.uses):
            try:
                use.close(self.manager)
            except BaseException as error:
                errors.append(error)
        return here is not False, errors

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Note that a call of a tapped module begins; the outermost one begins a forward pass."""
        entry = self.passes.enter(module)
        if len(entry.forward_pass.stack) == 1:
            self._begin(entry, args, kwargs)
        return entry

    def finish(self, entry: Entry, output: Any) -> None:
        """Note that a forward pass ended well, and keep what was captured in it."""
        forward_pass = entry.forward_pass
        if forward_pass.recomputing:
            self.passes.end(forward_pass)
            return
        for use in self.uses:
            use.ask("forward_finished", output=output, call=Call(entry))
        index = self.passes.end(forward_pass)
        for use in self.uses:
            for captures in use.stores:
                captures.commit(forward_pass, index)

    def listeners(self) -> Iterable[Listener]:
        """Return every listener, in the order of use."""
        return itertools.chain.from_iterable(use.listeners for use in list(self.uses))

    def clear(self) -> None:
        """Forget what was captured, and count forward passes from 0 again."""
        self.passes.restart()
        for use in self.uses:
            for captures in use.stores:
                captures.clear()
        for listener in self.listeners():
            listener.since = 0

    def _begin(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        forward_pass = entry.forward_pass
        if forward_pass.recomputing:
            forward_pass.facts = self.passes.last_facts
            return
        path = argument_path(entry.module, args, kwargs, ())
        main = None if path is None else take((args, kwargs), path)
        named = arguments_by_name(entry.module, args, kwargs)
        forward_pass.facts = self.passes.last_facts = read_facts(main, named, self._prompts_here())
        for use in self.uses:
            use.ask("forward_started", call=Call(entry))

    def _prompts_here(self) -> Prompts:
        return self._prompts[get_ident()]

    def _listen(self, use: Use, names: Iterable[str]) -> None:
        callback = use.callback("activation")
        if callback is None:
            return
        places: dict[Place, HookPoint] = {}
        for name in names:
            for point, place in self.locator.find(name).items():
                places.setdefault(place, point)
        for place, point in places.items():
            if place.io in ATTENTION_IOS and place.selector:
                raise AttentionError(f"point {point!r} is one tensor; leave the selector out")
            listener = Listener(
                point,
                use.label,
                callback.bind(use.intervention),
                callback.arguments,
                priority=callback.priority,
                place=place,
                strict=self.strict,
                since=self.passes.finished,
            )
            use.listeners.append(listener)
            self._tap(place.module).port(place.io, place.selector, place.call).add(listener)

    def _tap(self, module: nn.Module) -> Any:
        self._tapped[module] = None
        return wire(self, module)

    def _undo(self, use: Use, error: BaseException) -> None:
        self.uses.remove(use)
        for listener in use.listeners:
            place = listener.place
            self._tap(place.module).port(place.io, place.selector, place.call).remove(listener)
        try:
            use.close(self.manager)
        except Exception as later:
            error.add_note(f"and then {use.label!r} failed to close: {later!r}")


def _as_names(use: Use, points: Any) -> Iterable[str]:
    if points is None:
        return ()
    names = (points,) if isinstance(points, str) else points
    if not isinstance(names, Iterable):
        raise InterventionContractError(
            f"intervention {use.label!r} returned {points!r} from 'points'; return a hook point or a list of them"
        )
    return names


def _surely(action: Callable[[], Any], errors: list[BaseException]) -> Any:
    """Do `action`, which may be done twice, even if an interrupt comes in the middle of it."""
    while True:
        try:
            return action()
        except KeyboardInterrupt as interrupt:
            errors.append(interrupt)
        except Exception as error:
            errors.append(error)
            return None
