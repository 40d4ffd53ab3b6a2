"""An intervention of one's own and an installed one of the same name: what is passed is what is used."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import kamui
from kamui.hooks import HookManager

X = torch.ones(1, 2)


class Steering(kamui.Intervention):
    """Has the name of one that comes along."""

    at: str

    @kamui.hookimpl
    def points(self) -> str:
        return self.at

    @kamui.hookimpl
    def activation(self, value: Tensor) -> Tensor:
        return value + 1


@pytest.mark.parametrize("own_first", [True, False])
def test_a_class_that_is_passed_is_not_hidden_by_an_installed_one_nor_hides_it(own_first: bool) -> None:
    net, vector = nn.Linear(2, 2), torch.tensor([10.0, 20.0])
    bare = net(X)
    with HookManager(net) as hooks:
        if own_first:
            hooks.use(Steering, at="output")
        installed = hooks.use("steering", vector=vector, at="output")
        if not own_first:
            hooks.use(Steering, at="output")
        torch.testing.assert_close(net(X), bare + 1 + vector)
    assert not isinstance(installed, Steering)
