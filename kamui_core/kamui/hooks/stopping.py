"""Early stop: a forward pass ends as soon as everything that a scope listens to has fired.

The rest of the model is left by an exception, so that hooks which are always called still clean up. It ends in the
`run` that asked for it.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from torch import nn

from kamui.errors import ScopeError
from kamui.hooks.points import GRADIENT_PREFIX

if TYPE_CHECKING:
    from kamui.hooks.chain import Listener
    from kamui.hooks.passes import Entry
    from kamui.hooks.places import Place
    from kamui.hooks.ports import Port

_CACHE_NAMES: Final = ("past_key_values", "past_key_value", "layer_past", "cache", "cache_params")
_Key = tuple[nn.Module, str, tuple[int | str, ...], int | None]


class StopForward(Exception):  # noqa: N818 - it is no error
    """Leaves the model in the middle of a forward pass.

    Args:
        outermost: The call that the pass began with.
    """

    def __init__(self, outermost: Entry) -> None:
        super().__init__("an early stop of hooks.run(..., stop=True) is on its way out of the model")
        self.outermost = outermost


class Stop:
    """What has yet to fire before a forward pass may stop.

    A point that is not bound to one call of its module has fired with the first call.
    """

    def __init__(self, listeners: Iterable[Listener]) -> None:
        self._awaited = {_key_of_place(listener.place) for listener in listeners}

    def reached(self, ports: Iterable[Port], entry: Entry) -> bool:
        """Take account of ports that this call has served, and tell whether nothing is left to wait for."""
        for port in ports:
            if port.hears(entry):
                self._awaited.discard((entry.module, port.io, port.selector, port.only_call))
        return not self._awaited


def is_stopping(entry: Entry) -> bool:
    """Tell, in a call that is left by an exception, whether that is an early stop of its own forward pass."""
    error = sys.exception()
    return isinstance(error, StopForward) and error.outermost.forward_pass is entry.forward_pass


def check_stop(model: nn.Module, listeners: Iterable[Listener], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Check that a forward pass may be left in its middle.

    Raises:
        ScopeError: Nothing is listened to, or leaving would do damage; the message says what.
    """
    points = [str(listener.point) for listener in listeners]
    if not points:
        raise ScopeError("run(..., stop=True) has nothing to stop after: no point is listened to; attach one first")
    gradients = [point for point in points if point.rpartition(".")[2].startswith(GRADIENT_PREFIX)]
    if gradients:
        raise ScopeError(
            f"run(..., stop=True) never reaches point {gradients[0]!r}: without an output there is no backward"
        )
    cache = next(_caches(args, kwargs), None)
    if cache is not None:
        raise ScopeError(
            f"run(..., stop=True) got a cache ({cache}) and would leave it half filled; run without one, "
            f"or with stop=False"
        )
    if any(_is_sharded(module) for module in model.modules()):
        raise ScopeError(
            f"run(..., stop=True) would leave the other processes waiting: {type(model).__name__} is sharded by FSDP; "
            f"run with stop=False"
        )


def _key_of_place(place: Place) -> _Key:
    return (place.module, place.io, place.selector, place.call)


def _caches(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[str]:
    if kwargs.get("use_cache") is True:
        yield "use_cache=True"
    for name, value in itertools.chain(enumerate(args), kwargs.items()):
        if hasattr(value, "get_seq_length") or (name in _CACHE_NAMES and value is not None):
            yield f"argument {name!r}: {type(value).__name__}"


def _is_sharded(module: nn.Module) -> bool:
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule | fsdp.FullyShardedDataParallel)
