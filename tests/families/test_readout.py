"""The residual stream after the last block, read out, is what the model itself gives."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from families.zoo import FAMILIES, make
from kamui import HookManager
from kamui.errors import UnsupportedModelError
from kamui.hooks import inspect

WITHOUT_HEAD = {"clip", "clip_text", "clip_vision"}
WITH_HEAD = sorted(set(FAMILIES) - WITHOUT_HEAD)


def last_block(name: str) -> str:
    return "decoder.blocks.2.output" if FAMILIES[name].kind in ("seq2seq", "audio") else "blocks.2.output"


@pytest.mark.parametrize("name", WITH_HEAD)
def test_the_lens_at_the_last_layer_is_the_model(name: str) -> None:
    model, inputs = make(name)
    with torch.no_grad(), HookManager(model) as hooks:
        lens = hooks.use("logit_lens", at=last_block(name))
        logits = model(**inputs).logits
        seen = lens.logits(0)  # (B, S, V)
    if name == "vit":  # it classifies from its first position
        seen = seen[:, 0]
    torch.testing.assert_close(seen, logits, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "cohere", "bert", "t5", "albert"])
def test_reading_out_any_shape_gives_its_logits(name: str) -> None:
    model, _ = make(name)
    architecture = HookManager(model).architecture
    residual = torch.randn(3, 2, 5, 32)
    with torch.no_grad():
        every = architecture.readout(model, residual)  # (3, 2, 5, V)
        assert every.shape == (3, 2, 5, model.config.vocab_size)
        torch.testing.assert_close(architecture.readout(model, residual[1, 0, 2]), every[1, 0, 2])


@pytest.mark.parametrize("name", ["gpt2", "gemma2"])
def test_gradients_flow_through_the_readout(name: str) -> None:
    model, _ = make(name)
    residual = torch.randn(2, 32, requires_grad=True)
    HookManager(model).architecture.readout(model, residual).sum().backward()
    assert residual.grad is not None
    assert residual.grad.abs().sum() > 0


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "bert"])
def test_reading_out_leaves_nothing_on_the_model(name: str) -> None:
    model, inputs = make(name)
    with torch.no_grad():
        before = model(**inputs).logits
        HookManager(model).architecture.readout(model, torch.randn(2, 32))
        assert torch.equal(model(**inputs).logits, before)
    assert inspect(model) == []


def test_reading_out_in_one_thread_does_not_reach_another() -> None:
    model, inputs = make("gemma2")
    architecture = HookManager(model).architecture
    with torch.no_grad():
        expected = model(**inputs).logits
    stop = threading.Event()
    failures: list[Tensor] = []

    def run_model() -> None:
        with torch.no_grad():
            while not stop.is_set():
                logits = model(**inputs).logits
                if not torch.equal(logits, expected):
                    failures.append(logits)

    thread = threading.Thread(target=run_model)
    thread.start()
    try:
        with torch.no_grad():
            for _ in range(30):
                architecture.readout(model, torch.randn(4, 32))
    finally:
        stop.set()
        thread.join()
    assert failures == []


def test_a_compiled_model_is_read_out_too() -> None:
    model, _ = make("gemma2")
    residual = torch.randn(1, 32)
    with torch.no_grad():
        expected = HookManager(model).architecture.readout(model, residual)
        model.compile(backend="eager")
        model(torch.zeros(1, 1, dtype=torch.long))
        with HookManager(model) as hooks:
            torch.testing.assert_close(hooks.architecture.readout(model, residual), expected)


def test_scopes_that_are_open_do_not_see_the_readout() -> None:
    model, inputs = make("gemma2")
    with torch.no_grad(), HookManager(model) as hooks:
        hooks.attach("blocks.*")
        model(**inputs)
        hooks.architecture.readout(model, torch.randn(4, 32))
    assert hooks.get("blocks.0.output", forward="all").shape == (2, 8, 32)


@pytest.mark.parametrize("name", sorted(WITHOUT_HEAD))
def test_a_model_without_head_says_so(name: str) -> None:
    model, _ = make(name)
    with pytest.raises(UnsupportedModelError, match=r"gives no logits .* load it with its language-model head"):
        HookManager(model).architecture.readout(model, torch.randn(2, 32))
