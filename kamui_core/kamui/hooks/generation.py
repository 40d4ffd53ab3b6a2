"""Generation: which passes belong to one call of `model.generate`, so that the first of them is the prompt.

While scopes are open on a model its `generate` is shadowed on the instance, once for all of them.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NoReturn
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from kamui.errors import ScopeError
from kamui.hooks.sequence import Given, encoder_of

if TYPE_CHECKING:
    from kamui.hooks.sequence import Prompts

_ABSENT: Final = object()


class GenerateShadow:
    """Stands before the `generate` of one model and tells each scope's prompts when a generation begins."""

    def __init__(self, model: nn.Module, generate: Callable[..., Any]) -> None:
        functools.update_wrapper(self, generate, updated=())
        self.listeners: dict[object, Callable[[], Prompts]] = {}
        self._generate = generate
        self._own = model.__dict__.get("generate", _ABSENT)
        self._model_id = id(model)
        self._decodes_another = encoder_of(model) is not None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Generate, as the model's own method does."""
        given = Given() if self._decodes_another else _given(args, kwargs)
        with ExitStack() as stack:
            for prompts in list(self.listeners.values()):
                stack.enter_context(prompts().generation(given))
            return self._generate(*args, **kwargs)

    def restore(self, model: nn.Module) -> None:
        """Put back what was on the instance before."""
        if model.__dict__.get("generate") is not self:
            return
        if self._own is _ABSENT:
            del model.__dict__["generate"]
        else:
            model.__dict__["generate"] = self._own

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if self._own is not _ABSENT:
            return copy.deepcopy(self._own, memo)
        model = memo[self._model_id]
        return functools.partial(type(model).generate, model)

    def __reduce__(self) -> NoReturn:
        raise ScopeError(
            "a model cannot be pickled while a HookManager scope is open on it; leave the scope first, or save "
            "its state_dict()"
        )


def _given(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Given:
    """Read the prompt from the arguments of `generate`, as far as they tell it."""
    named = (kwargs.get(name) for name in ("input_ids", "inputs", "inputs_embeds"))
    prompt = next((one for one in (*args[:1], *named) if isinstance(one, Tensor) and one.dim() > 1), None)
    mask = kwargs.get("attention_mask")
    if prompt is None or not isinstance(mask, Tensor) or mask.shape != prompt.shape[:2]:
        mask = None
    return Given(0 if prompt is None else prompt.shape[1], mask)


_shadows: WeakKeyDictionary[nn.Module, GenerateShadow] = WeakKeyDictionary()
_lock = threading.RLock()


def shadow_generate(model: nn.Module, scope: object, prompts: Callable[[], Prompts]) -> None:
    """Tell `prompts` of each generation of `model` from now on; a model without `generate` is left alone."""
    with _lock:
        shadow = _shadows.get(model)
        if shadow is None:
            generate = getattr(model, "generate", None)
            if not callable(generate):
                return
            shadow = _shadows[model] = model.__dict__["generate"] = GenerateShadow(model, generate)
        shadow.listeners = {**shadow.listeners, scope: prompts}


def unshadow_generate(model: nn.Module, scope: object) -> None:
    """Stop telling `scope`; the model's own `generate` comes back with the last one."""
    with _lock:
        shadow = _shadows.get(model)
        if shadow is None:
            return
        shadow.listeners = {other: tell for other, tell in shadow.listeners.items() if other is not scope}
        if not shadow.listeners:
            shadow.restore(model)
            del _shadows[model]
