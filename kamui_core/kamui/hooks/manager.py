"""`HookManager`: the managed scope."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload
from weakref import finalize

from torch import Tensor, nn

from kamui.errors import (
    InterventionContractError,
    KamuiWarning,
    NoOpenScopeError,
    OptionError,
    PointError,
    ScopeClosedError,
    ScopeError,
    StrictError,
    UnsupportedModelError,
)
from kamui.hooks.architecture import Architecture
from kamui.hooks.context import active_scopes
from kamui.hooks.findings import findings_of
from kamui.hooks.places import Locator, unwrap
from kamui.hooks.points import HookPoint
from kamui.hooks.reading import Forward, read, read_all
from kamui.hooks.report import Report
from kamui.hooks.scope import Scope
from kamui.hooks.use import Use
from kamui.interventions.catalogue import catalogue
from kamui.interventions.functions import FunctionIntervention
from kamui.interventions.intervention import Intervention
from kamui.interventions.options import build

if TYPE_CHECKING:
    Kind = TypeVar("Kind", bound=Intervention)
    Source = str | type[Intervention] | Intervention | Callable[..., Tensor | None]


class HookManager:
    """A managed scope on a model: observe its activations and change them, and leave nothing behind.

    Usage::

        with HookManager(model) as hooks:
            hooks.attach("blocks.3.attn", point="output")
            hooks.use("steering", alpha=0.5, vector=v, at="blocks.3.output")
            logits = model(token_ids)
            hooks.get("blocks.3.attn.output")  # (B, S, D)

    Everything is taken off at the end of the block, whatever happened inside; what was captured can still be
    read. Entering again starts empty.

    Args:
        model: Any module. Wrappers (`torch.compile`, DDP) are no part of a point's name.
        strict: Make an error of what is otherwise a warning at the end of the block.
        isolated: Only the context (thread, task) that enters the block has the scope; False opens it to all.

    Raises:
        UnsupportedModelError: `model` is no module.
    """

    def __init__(self, model: nn.Module, *, strict: bool = False, isolated: bool = True) -> None:
        if not isinstance(model, nn.Module):
            raise UnsupportedModelError(f"HookManager takes a torch.nn.Module, not {model!r}")
        self._model = model
        self._strict = strict
        self._isolated = isolated
        self._scope: Scope | None = None

    @property
    def model(self) -> nn.Module:
        """The model, as it was given."""
        return self._model

    @property
    def architecture(self) -> Architecture | None:
        """How the model spells the canonical names; None where nothing recognises it."""
        return Locator(unwrap(self._model)).names.architecture

    def module(self, path: str) -> nn.Module:
        """Return the module at a module path or of a canonical name such as `"final_ln"`.

        Raises:
            UnknownPointError: There is no such module.
        """
        return Locator(unwrap(self._model)).module(path)

    def __enter__(self) -> Self:
        if self._scope is not None and self._scope.is_open:
            raise ScopeError("this HookManager is open already; make another one to nest scopes on one model")
        scope = Scope(self, unwrap(self._model), strict=self._strict, isolated=self._isolated)
        scope.open()
        self._scope = scope
        self._finalizer = finalize(self, _close_abandoned, scope)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        scope = self._open_scope("__exit__")
        self._finalizer.detach()
        opened_here, errors = scope.close()
        if not opened_here:
            errors.append(
                ScopeError("this scope was closed in another thread or task than opened it; it is gone from the model")
            )
        if error is None and not errors:
            _tell(findings_of(scope), strict=self._strict)
        _raise_first(error, errors)

    def attach(
        self, module: str, point: str = "output", *, replace_with: Any = None, **options: Any
    ) -> tuple[HookPoint, ...]:
        """Capture a point, or replace what passes there.

        Args:
            module: A module path or canonical name; patterns stand for many. Empty for the model itself.
            point: The io: `"output"`, `"input"`, `"weights"`, ...
            replace_with: A tensor, or a callable that takes the value and returns its replacement.
            options: Options of the `cache` intervention, or of `patching` when something is replaced.

        Returns:
            The points that are now listened to.

        Raises:
            UnknownPointError: There is no such point, or the pattern matches nothing.
            ScopeError: The scope is not open.
        """
        if not isinstance(module, str) or not isinstance(point, str):
            raise PointError(f"attach takes a module path and an io, both strings, not {module!r} and {point!r}")
        at = f"{module}.{point}" if module else point
        name = "cache" if replace_with is None else "patching"
        if replace_with is not None:
            options["value"] = replace_with
        use = self._use("attach", name, {"at": at, **options})
        return tuple(listener.point for listener in use.listeners)

    @overload
    def use(self, source: type[Kind] | Kind, /, **options: Any) -> Kind: ...

    @overload
    def use(self, source: str | Callable[..., Tensor | None], /, **options: Any) -> Any: ...

    def use(self, source: Source, /, **options: Any) -> Any:
        """Use an intervention in this scope, after those in use already.

        Args:
            source: The name of an installed intervention, a class, an instance, or a function of the value (then
                with `at`).
            options: The intervention's options.

        Returns:
            The `Intervention`, an instance of the class that was asked for.

        Raises:
            PluginError: It cannot be had, or an option does not fit.
            ScopeError: The scope is not open.
        """
        return self._use("use", source, options).intervention

    def get(self, point: str, *, call: int | None = None, forward: Forward = -1) -> Tensor:
        """Return what was captured at a point.

        Args:
            point: The point, under any of its names.
            call: Which call of the module, where it was called more than once in the pass.
            forward: Which forward pass: -1 is the last that finished, `"all"` joins them along the sequence.

        Raises:
            NotCapturedError: There is nothing; the message says why.
        """
        return read(self._any_scope("get"), point, call, forward)

    def get_all(self, *, forward: Forward = -1) -> dict[str, Tensor]:
        """Return everything captured in one forward pass, by point.

        A point called n > 1 times in it has the keys `"act.output#0"`, `"act.output#1"`, ...
        """
        return read_all(self._any_scope("get_all"), forward)

    def clear(self) -> None:
        """Forget what was captured so far; forward passes are counted from 0 again."""
        self._any_scope("clear").clear()

    def run(self, *args: Any, stop: bool = False, **kwargs: Any) -> Any:
        """Call the model in this scope and return what it gives.

        Args:
            args: Positional arguments of the model.
            stop: Leave the model once every point that this scope listens to has fired, and return None. A module
                that is called more than once has fired with its first call. The pass counts as finished, and
                `forward_finished` gets None for the output; in scopes around this one it counts as failed.
            kwargs: Keyword arguments of the model.

        Raises:
            ScopeError: With `stop`: nothing is listened to, a cache is among the arguments, FSDP shards the model, or
                it runs already.
        """
        scope = self._open_scope("run")
        if not stop:
            return self._model(*args, **kwargs)
        scope.run_until_served(self._model, args, kwargs)
        return None

    def report(self) -> Report:
        """Return what fired where so far."""
        return Report.of(self._any_scope("report"))

    def _use(self, verb: str, source: Source, options: dict[str, Any]) -> Use:
        scope = self._open_scope(verb)
        intervention, label = _instance_of(source, options)
        return scope.use(intervention, label)

    def _open_scope(self, verb: str) -> Scope:
        scope = self._any_scope(verb)
        if not scope.is_open:
            raise ScopeClosedError(
                f"{verb!r} came after the end of the scope; write it inside 'with HookManager(model) as hooks:'"
            )
        return scope

    def _any_scope(self, verb: str) -> Scope:
        if self._scope is None:
            raise ScopeError(
                f"{verb!r} came before the scope was opened; write it inside 'with HookManager(model) as hooks:'"
            )
        return self._scope


@overload
def use(source: type[Kind] | Kind, /, **options: Any) -> Kind: ...


@overload
def use(source: str | Callable[..., Tensor | None], /, **options: Any) -> Any: ...


def use(source: Source, /, **options: Any) -> Any:
    """Use an intervention in the innermost open scope of this context, as `HookManager.use` does.

    Returns:
        The `Intervention`.

    Raises:
        NoOpenScopeError: No scope is open here.
        PluginError: The intervention cannot be had, or an option does not fit.
    """
    scopes = [scope for scope in active_scopes() if scope.is_open and scope.manager is not None]
    if not scopes:
        name = repr(source) if isinstance(source, str) else getattr(source, "__name__", type(source).__name__)
        raise NoOpenScopeError(
            f"kamui.use({name}) needs an open scope; write 'with HookManager(model) as hooks:' and, inside it, "
            f"'kamui.use({name}, ...)'"
        )
    innermost: HookManager = scopes[-1].manager
    return innermost.use(source, **options)


def _close_abandoned(scope: Scope) -> None:
    if scope.is_open:
        scope.close()
        warnings.warn(
            f"a HookManager scope on a {type(scope.model).__name__} was never left and is closed now that nothing "
            f"refers to it; write 'with HookManager(model) as hooks:'",
            ResourceWarning,
            stacklevel=2,
        )


def _instance_of(source: Source, options: dict[str, Any]) -> tuple[Intervention, str]:
    if isinstance(source, str):
        return build(catalogue.load(source), options, source), source
    if isinstance(source, type):
        return build(source, options, source.__name__), source.__name__
    if isinstance(source, Intervention):
        if options:
            raise OptionError(f"intervention {source.label!r} is an instance already; give its options when it is made")
        return source, source.label
    if callable(source):
        label = getattr(source, "__name__", type(source).__name__)
        return build(FunctionIntervention, {"function": source, **options}, label), label
    raise InterventionContractError(
        f"{source!r} is no intervention; use takes a name, a class, an instance or a function of the value"
    )


def _tell(findings: list[KamuiWarning], *, strict: bool) -> None:
    if strict and findings:
        raise StrictError("; ".join(str(finding) for finding in findings))
    for finding in findings:
        warnings.warn(finding, stacklevel=3)


def _raise_first(under_way: BaseException | None, errors: list[BaseException]) -> None:
    """Let the first error be the one that is seen, with the later ones in its notes."""
    if not errors:
        return
    first, later = (under_way, errors) if under_way is not None else (errors[0], errors[1:])
    for error in later:
        first.add_note(f"and then, while the scope closed: {error!r}")
    if under_way is None:
        raise first
