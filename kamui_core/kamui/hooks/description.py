"""Every addressable point of a model with its shape and dtype, found without real computation.

A deep copy made of fake tensors, which have shapes and no data, is run once. The model itself is neither run nor
touched: run on it, fake tensors would stay in buffers.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._pytree import tree_map_only

from kamui.hooks.attention import AttentionMode
from kamui.hooks.chain import Listener
from kamui.hooks.context import suspended
from kamui.hooks.naming import is_container, map_of
from kamui.hooks.passes import ForwardPass, PassLog
from kamui.hooks.places import Locator, Place
from kamui.hooks.points import ATTENTION_IOS, HookPoint
from kamui.hooks.ports import Port
from kamui.hooks.values import argument_path, main_path, take

Found = dict[tuple[nn.Module, str], Tensor]

_NO_EXAMPLE = "no example was given to run the model with"


@dataclasses.dataclass(frozen=True)
class PointDescription:
    """One addressable point.

    Attributes:
        point: The point.
        shape: The shape of its value, or None where it is not known.
        dtype: The dtype of its value, or None where it is not known.
        reason: Why shape and dtype are not known; empty where they are.
    """

    point: HookPoint
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    reason: str = ""


def describe(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[PointDescription]:
    """Return every addressable point: the canonical ones in firing order, then the others by module path."""
    names = map_of(model)
    points = dict.fromkeys([*names.canonical_points, *names.points])
    if not args and not kwargs:
        return [PointDescription(point, None, None, _NO_EXAMPLE) for point in points]
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        fake = _without_hooks(copy.deepcopy(model))
    found: Found = {}
    _watch(fake, set(names.architecture.attentions if names.architecture else ()), found)
    reason = _run(fake, mode, args, kwargs)
    locator = Locator(fake)
    return [_description(point, locator.place(point), found, reason) for point in points]


def _without_hooks(fake: nn.Module) -> nn.Module:
    for module in fake.modules():
        for name, table in vars(module).items():
            if name.endswith("_hooks") and isinstance(table, dict):
                table.clear()
    return fake


def _watch(fake: nn.Module, attentions: set[str], found: Found) -> None:
    for path, module in fake.named_modules():
        if is_container(module):
            continue
        module.register_forward_pre_hook(_input_watcher(found), with_kwargs=True)
        module.register_forward_hook(_output_watcher(found))
        if path in attentions:
            modes: list[AttentionMode] = []
            module.register_forward_pre_hook(_mode_pusher(found, modes))
            module.register_forward_hook(_mode_remover(modes), always_call=True)


def _input_watcher(found: Found) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path = argument_path(module, args, kwargs, ())
        if path is not None:
            _note(found, module, "input", take((args, kwargs), path))

    return watch


def _output_watcher(found: Found) -> Callable[..., None]:
    def watch(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        path = main_path(output)
        if path is not None:
            _note(found, module, "output", take(output, path))

    return watch


def _mode_pusher(found: Found, modes: list[AttentionMode]) -> Callable[..., None]:
    def push(module: nn.Module, args: tuple[Any, ...]) -> None:
        entry = ForwardPass(PassLog(), 0, recomputing=False).enter(module)
        modes.append(AttentionMode.push([(_shape_port(found, module, io), entry) for io in ATTENTION_IOS]))

    return push


def _mode_remover(modes: list[AttentionMode]) -> Callable[..., None]:
    def remove(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        modes.pop().remove()

    return remove


def _shape_port(found: Found, module: nn.Module, io: str) -> Port:
    port = Port(io, (), None)
    port.add(
        Listener(
            HookPoint(io),
            "describe",
            lambda value: _note(found, module, io, value),
            {"value"},
            priority=0,
            place=Place(module, io),
            strict=False,
            since=0,
        )
    )
    return port


def _note(found: Found, module: nn.Module, io: str, value: object) -> None:
    if isinstance(value, Tensor):
        found.setdefault((module, io), value)


def _run(fake: nn.Module, mode: FakeTensorMode, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """Run the copy; return why it ended early, or an empty string."""
    with mode, suspended(), torch.no_grad():
        args, kwargs = tree_map_only(Tensor, mode.from_tensor, (args, kwargs))
        try:
            fake(*args, **kwargs)
        except Exception as error:
            return f"the model could not be run without real data: {type(error).__name__}: {error}"
    return ""


def _description(point: HookPoint, where: Place, found: Found, reason: str) -> PointDescription:
    value = found.get((where.module, where.io))
    if value is None:
        return PointDescription(point, None, None, reason or "not reached by this example, or no tensor passes there")
    return PointDescription(point, tuple(value.shape), value.dtype)
