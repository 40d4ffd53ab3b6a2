from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

from kamui.errors import ScopeError
from kamui.hooks import HookManager
from kamui.model import Transformer
from kamui.testing import leaves_no_trace


def test_generate_is_the_models_own_again_after_the_last_scope(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model):
        first, second = HookManager(model), HookManager(model)
        first.__enter__()
        second.__enter__()
        assert "generate" in vars(model)
        assert model.generate.__name__ == "generate"
        first.__exit__(None, None, None)
        assert "generate" in vars(model)
        assert model.generate(token_ids, max_new_tokens=1).shape == (2, 8)
        second.__exit__(None, None, None)
        assert "generate" not in vars(model)


def test_a_generate_of_the_instances_own_comes_back(model: Transformer, token_ids: Tensor) -> None:
    def generate(*args: Any) -> str:
        return "mine"

    model.generate = generate  # type: ignore[method-assign, assignment]
    with leaves_no_trace(model), HookManager(model):
        assert model.generate(token_ids) == "mine"
        assert copy.deepcopy(model).generate(token_ids) == "mine"
    assert model.generate is generate


def test_a_generate_that_was_set_inside_the_scope_stays(model: Transformer, token_ids: Tensor) -> None:
    def generate(*args: Any) -> str:
        return "mine"

    with HookManager(model):
        model.generate = generate  # type: ignore[method-assign, assignment]
    assert model.generate is generate


def test_an_error_in_generate_passes_and_leaves_nothing(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model), HookManager(model) as hooks:
        hooks.attach("blocks.0")
        with pytest.raises(ValueError, match="max_new_tokens is -1"):
            model.generate(token_ids, -1)
        assert model.generate(token_ids, 2).shape == (2, 9)
        assert hooks.get("blocks.0.output", forward="all").shape == (2, 8, 16)


def test_a_model_with_a_shadowed_generate_cannot_be_pickled_but_its_state_can(model: Transformer) -> None:
    with HookManager(model):
        with pytest.raises(ScopeError, match=r"leave the scope first, or save its state_dict\(\)"):
            pickle.dumps(model)
        assert pickle.dumps({name: value.sum() for name, value in model.state_dict().items()})


def test_a_deep_copy_generates_with_its_own_weights(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model):
        twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert (model.generate(token_ids, 3)[:, 7:] == 0).all()
    assert not (twin.generate(token_ids, 3)[:, 7:] == 0).all()
