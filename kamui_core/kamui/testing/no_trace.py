"""Whether a scope left something behind on a model.

The model is compared with a twin, a deep copy on which the same calls were made without any scope. Before and
after would be the wrong comparison: some models put hooks of their own on themselves in their first call.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _WrappedHook
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from kamui.hooks.context import active_scopes, suspended

Result = TypeVar("Result")
Action = Callable[[nn.Module], Any]

_PLAIN: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_SHADOWED: Final = ("forward", "generate", "_compiled_call_impl")


class _Nothing:
    def __repr__(self) -> str:
        return "nothing"


_NOTHING: Final = _Nothing()


@contextmanager
def leaves_no_trace(model: nn.Module) -> Iterator[Recording]:
    """Check at the end of the block that the model is what it would be had no scope been opened on it.

    Usage::

        with leaves_no_trace(model) as run:
            with HookManager(model) as hooks:
                hooks.attach("blocks.0", "output")
                run(token_ids)  # model(token_ids), and later the same on the twin

    Hooks, attributes, classes, modes, parameters, buffers, gradients, the config and this thread's torch modes are
    compared, also when the block ends in an exception. Hooks that were on the model before are on the twin too,
    so they fire once more for each recorded call.

    Raises:
        AssertionError: Something differs; the message names the module.
    """
    twin = _twin_of(model)
    before = _Identities(model)
    surroundings = _surroundings()
    recording = Recording(model)
    try:
        yield recording
    finally:
        after = _surroundings()
        recording.replay(twin)
        _refuse([*_differences(surroundings, after), *before.differences(model), *_traces(model, twin)])


@dataclasses.dataclass(frozen=True)
class _Step:
    action: Action
    random_state: Tensor
    grad: bool
    inference: bool
    raised: tuple[type[BaseException], ...] = ()

    def repeat(self, twin: nn.Module) -> None:
        torch.set_rng_state(self.random_state)
        with (
            torch.inference_mode(self.inference),
            torch.set_grad_enabled(self.grad),
            contextlib.suppress(*self.raised),
        ):
            self.action(twin)


class Recording:
    """Calls a model, and remembers the calls in order to repeat them on its twin."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._steps: list[_Step] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model; the arguments are copied for the twin before the model may change them."""
        copied_args, copied_kwargs = copy.deepcopy((args, kwargs))
        return self._do(lambda model: model(*args, **kwargs), lambda twin: twin(*copied_args, **copied_kwargs))

    def apply(self, action: Callable[[nn.Module], Result]) -> Result:
        """Do anything else with the model, such as a step of training or `model.generate`."""
        result: Result = self._do(action, action)
        return result

    def replay(self, twin: nn.Module) -> None:
        """Repeat on `twin` what was done, with the same random numbers; what had raised may raise again."""
        with suspended(), torch.random.fork_rng(devices=[]):
            for step in self._steps:
                step.repeat(twin)

    def _do(self, action: Action, repetition: Action) -> Any:
        step = _Step(repetition, torch.get_rng_state(), torch.is_grad_enabled(), torch.is_inference_mode_enabled())
        try:
            result = action(self._model)
        except BaseException as error:
            self._steps.append(dataclasses.replace(step, raised=(Exception, type(error))))
            raise
        self._steps.append(step)
        return result


class _Identities:
    """The objects that a model must still hold itself, not copies of them."""

    def __init__(self, model: nn.Module) -> None:
        self._held = _held(model)

    def differences(self, model: nn.Module) -> Iterator[str]:
        now = _held(model)
        for name, thing in self._held.items():
            if now.get(name) is not thing:
                yield f"{name} is another object than before"


def _held(model: nn.Module) -> dict[str, object]:
    held: dict[str, object] = {
        f"parameter {name!r}": parameter for name, parameter in model.named_parameters(remove_duplicate=False)
    }
    for path, module in model.named_modules(remove_duplicate=False):
        held[f"module {path!r}"] = module
        held |= {f"{name!r} of module {path!r}": vars(module)[name] for name in _SHADOWED if name in vars(module)}
    return held


def _twin_of(model: nn.Module) -> nn.Module:
    twin = copy.deepcopy(model)
    for ours, copied in zip(model.parameters(), twin.parameters(), strict=True):
        copied.grad = None if ours.grad is None else ours.grad.detach().clone()
    return twin


def _surroundings() -> dict[str, object]:
    return {
        "torch function modes": list(_get_current_function_mode_stack()),  # type: ignore[no-untyped-call]
        "torch dispatch modes": list(_get_current_dispatch_mode_stack()),
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "open scopes": active_scopes(),
    }


def _traces(model: nn.Module, twin: nn.Module) -> Iterator[str]:
    modules, twins = (dict(one.named_modules(remove_duplicate=False)) for one in (model, twin))
    yield from _differences({"module paths": list(twins)}, {"module paths": list(modules)})
    for path, module in modules.items():
        if path in twins:
            for difference in _differences(_facts(twins[path]), _facts(module)):
                yield f"module {path!r}: {difference}"
    yield from _differences({"state_dict keys": list(twin.state_dict())}, {"state_dict keys": list(model.state_dict())})
    yield from _tensor_differences(dict(twin.named_parameters()), dict(model.named_parameters()), "parameter")
    yield from _tensor_differences(dict(twin.named_buffers()), dict(model.named_buffers()), "buffer")


def _facts(module: nn.Module) -> dict[str, object]:
    own = vars(module)
    facts: dict[str, object] = {"class": type(module)}
    facts |= {name: value if isinstance(value, _PLAIN) else type(value) for name, value in own.items()}
    for name in own:
        if name.endswith("_hooks"):
            facts |= _hook_facts(module, name)
    config = own.get("config")
    if config is not None:
        facts["config"] = _plain_config(config)
    return facts


def _hook_facts(module: nn.Module, name: str) -> dict[str, object]:
    """Describe one table of hooks, and which of them have keywords or are always called."""
    table = getattr(module, name) or {}
    facts: dict[str, object] = {name: [_name_of(hook) for hook in table.values()]}
    for suffix in ("_with_kwargs", "_always_called"):
        companion = getattr(module, name + suffix, {})
        facts[name + suffix] = [list(table).index(key) if key in table else "a removed hook" for key in companion]
    return facts


def _name_of(hook: object) -> str:
    if isinstance(hook, _WrappedHook):  # a deep copy of one has lost the name
        hook = hook.hook
    name = getattr(hook, "__qualname__", None) or type(hook).__qualname__
    return f"{getattr(hook, '__module__', type(hook).__module__)}.{name}"


def _plain_config(config: object) -> object:
    items = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    plain = {name: value for name, value in items.items() if isinstance(value, _PLAIN)}
    as_dict = getattr(config, "to_dict", None)
    return (plain, as_dict() if callable(as_dict) else None)


def _tensor_differences(expected: dict[str, Any], there: dict[str, Any], what: str) -> Iterator[str]:
    for name in dict.fromkeys([*expected, *there]):
        wanted, found = expected.get(name), there.get(name)
        if wanted is None or found is None:
            yield f"{what} {name!r} is {'missing' if found is None else 'new'}"
            continue
        if wanted.requires_grad != found.requires_grad:
            yield f"{what} {name!r}: requires_grad is {found.requires_grad} where {wanted.requires_grad} is expected"
        if not _equal(wanted, found):
            yield f"{what} {name!r} has other values"
        if not _equal(wanted.grad, found.grad):
            yield f"the gradient of {what} {name!r} differs; a backward pass belongs into 'run.apply'"


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    try:
        torch.testing.assert_close(other, one, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True


def _differences(expected: dict[str, Any], there: dict[str, Any]) -> Iterator[str]:
    for name in dict.fromkeys([*expected, *there]):
        wanted, found = expected.get(name, _NOTHING), there.get(name, _NOTHING)
        if wanted != found:
            yield f"{name} is {found!r} where {wanted!r} is expected"


def _refuse(traces: list[str]) -> None:
    if traces:
        more = f"; and {len(traces) - 5} more" if len(traces) > 5 else ""
        raise AssertionError(f"something was left on the model: {'; '.join(traces[:5])}{more}")
