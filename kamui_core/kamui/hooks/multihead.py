"""`nn.MultiheadAttention`: one call to a mode, whose body is plain torch."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import FunctionType
from typing import Any

import torch.nn.functional as F
from torch import Tensor


@cache
def open_body() -> Callable[..., Any]:
    """Return `multi_head_attention_forward` without its question whether a mode wants to answer for it.

    A mode that answered has been asked once already; run under it, this body shows each of its steps.
    """
    whole = F.multi_head_attention_forward
    body = FunctionType(
        whole.__code__,
        {**whole.__globals__, "has_torch_function": lambda tensors: False},
        whole.__name__,
        whole.__defaults__,
        whole.__closure__,
    )
    body.__kwdefaults__ = whole.__kwdefaults__
    return body


def batch_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """Return B of a call: the queries come as (S, B, D), or (S, D)."""
    query: Tensor = args[0] if args else kwargs["query"]
    return query.shape[1] if query.dim() == 3 else 1
