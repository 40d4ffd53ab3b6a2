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
from weakref import ref

from torch import nn

from kamui.errors import AttentionError, ScopeError
from kamui.hooks.call import Call
from kamui.hooks.chain import Listener
from kamui.hooks.compiled import run_compiled, run_eagerly
from kamui.hooks.context import activate, deactivate
from kamui.hooks.generation import shadow_generate, unshadow_generate
from kamui.hooks.passes import Entry, ForwardPass, PassLog
from kamui.hooks.places import Locator, Place, without_adapters
from kamui.hooks.points import ATTENTION_IOS, GRADIENT_PREFIX, HookPoint
from kamui.hooks.sequence import Prompts, SequenceFacts, encoder_of, read_decoder_facts, read_facts
from kamui.hooks.stopping import Stop, StopForward, check_stop
from kamui.hooks.taps import unwire, wire
from kamui.hooks.use import Use
from kamui.hooks.values import argument_path, arguments_by_name, take

if TYPE_CHECKING:
    from kamui.hooks.ports import Port
    from kamui.interventions.intervention import Intervention

_serials: Final = itertools.count()


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
        self._stops: dict[int, Stop] = {}
        self._roots = (model, without_adapters(model)[0])
        self._encoder = encoder_of(model)

    @property
    def manager(self) -> Any:
        """The `HookManager` whose entry this is; it holds the scope, so the scope does not hold it."""
        return self._manager()

    def open(self) -> None:
        """Begin: the model's own calls are seen from here on."""
        self.is_open = True
        activate(self)
        try:
            for module in self._roots:
                self._tap(module)
            if self._encoder is not None:
                self._tap(self._encoder)
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
            self._listen(use, use.names(self.model))
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
        _surely(self.passes.close, errors)
        for use in reversed(self.uses):
            try:
                use.close(self.manager)
            except BaseException as error:
                errors.append(error)
        return here is not False, errors

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Entry:
        """Note that a call of a tapped module begins; the outermost one begins a forward pass."""
        entry = self.passes.enter(module)
        stack = entry.forward_pass.stack
        if len(stack) == 1:
            self._begin(entry, args, kwargs)
        else:
            entry.facts = self._facts_of(entry, args, kwargs) if module is self._encoder else stack[-2].facts
        return entry

    def tell_finished(self, entry: Entry, output: Any) -> None:
        """Tell the interventions that a forward pass ends well; one that objects drops it, in every scope."""
        if not entry.forward_pass.recomputing:
            for use in self.uses:
                use.ask("forward_finished", output=output, call=Call(entry))

    def keep(self, forward_pass: ForwardPass) -> None:
        """Note that a forward pass ended well, and keep what was captured in it."""
        index = self.passes.end(forward_pass)
        if forward_pass.recomputing:
            return
        for use in self.uses:
            for captures in use.stores:
                captures.commit(forward_pass, index)

    def run_until_served(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Call `model`, and leave it once every point that is listened to has fired; the pass counts as finished.

        Raises:
            ScopeError: It cannot be left in the middle, or a forward pass or a generation runs here already.
        """
        here = get_ident()
        if self._prompts_here().generating or self.passes.runs_here():
            raise ScopeError("run(..., stop=True) came while the model runs or generates; call it outside of that")
        check_stop(model, self.listeners(), args, kwargs)
        self._stops[here] = Stop(self.listeners())
        try:
            model(*args, **kwargs)
        except StopForward as stop:
            self.tell_finished(stop.outermost, None)
            self.keep(stop.outermost.forward_pass)
        finally:
            del self._stops[here]

    def may_stop(self, entry: Entry, ports: Iterable[Port]) -> bool:
        """Note which ports a call has served, and tell whether its forward pass may stop there."""
        stop = self._stops.get(get_ident()) if self._stops else None
        return stop is not None and stop.reached(ports, entry)

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
        if entry.forward_pass.recomputing:
            entry.facts = self.passes.last_facts if self._encoder is None else None
            return
        entry.facts = self.passes.last_facts = self._facts_of(entry, args, kwargs)
        for use in self.uses:
            use.ask("forward_started", call=Call(entry))

    def _facts_of(self, entry: Entry, args: tuple[Any, ...], kwargs: dict[str, Any]) -> SequenceFacts | None:
        module = entry.module
        named = arguments_by_name(module, args, kwargs)
        if self._encoder is not None and module in self._roots:
            return read_decoder_facts(named, self._prompts_here())
        path = argument_path(module, args, kwargs, ())
        main = None if path is None else take((args, kwargs), path)
        return read_facts(main, named, Prompts() if module is self._encoder else self._prompts_here())

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
            if place.io.removeprefix(GRADIENT_PREFIX) in ATTENTION_IOS and place.selector:
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
