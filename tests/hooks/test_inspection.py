from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kamui.hooks import HookManager, inspect


def mine(*_: Any) -> None: ...


def test_every_hook_is_listed_with_its_owner_in_the_order_of_running() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    net[0].register_forward_hook(mine)
    net[0].register_full_backward_hook(mine)
    net[0].register_full_backward_pre_hook(mine)
    net[1].register_forward_pre_hook(torch.nn.utils.parametrize.cached)
    with HookManager(net) as hooks:
        hooks.attach("0")
        listed = [(hook.module, hook.kind, hook.order, hook.owner) for hook in inspect(net)]
    here = __name__.partition(".")[0]
    assert listed == [
        ("", "forward_pre", 0, "kamui"),
        ("", "forward", 0, "kamui"),
        ("0", "forward_pre", 0, "kamui"),
        ("0", "forward", 0, "kamui"),
        ("0", "forward", 1, here),
        ("0", "backward_pre", 0, here),
        ("0", "backward", 0, here),
        ("1", "forward_pre", 0, "torch"),
    ]
    assert [hook.owner for hook in inspect(net)] == [here, here, here, "torch"]
    assert str(inspect(net)[0]) == f"0 forward[0] {here}: mine"


def test_a_module_has_two_hooks_however_many_listen() -> None:
    net = nn.Sequential(nn.Linear(2, 2))

    def keep(value: Tensor) -> None: ...

    with HookManager(net) as outer, HookManager(net) as inner:
        for scope in (outer, inner):
            for point in ("0.output", "0.input", "output", "input"):
                scope.use(keep, at=point)
        assert [(hook.module, hook.kind, hook.owner) for hook in inspect(net)] == [
            (module, kind, "kamui") for module in ("", "0") for kind in ("forward_pre", "forward")
        ]
