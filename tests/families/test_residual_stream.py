"""The residual stream of every family, against what transformers itself says of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from families.zoo import FAMILIES, make
from kamui import HookManager
from kamui.testing import leaves_no_trace

STACKS = {"seq2seq": ("encoder.", "decoder."), "audio": ("encoder.", "decoder.")}
TOWERS = {"clip": ("text_model.", "vision_model.")}
NORM_INSIDE = {"gemma2", "gemma3", "olmo2"}  # what attention gives is normed before it is added
POST_NORM = {"opt_350m", "bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "bart"}


def stacks_of(name: str) -> tuple[str, ...]:
    return TOWERS.get(name) or STACKS.get(FAMILIES[name].kind, ("",))


def hidden_states(name: str, prefix: str, output: Any) -> tuple[Tensor, ...]:
    if name == "clip":
        part = output.text_model_output if prefix == "text_model." else output.vision_model_output
        return tuple(part.hidden_states)
    key = {"encoder.": "encoder_hidden_states", "decoder.": "decoder_hidden_states"}.get(prefix, "hidden_states")
    return tuple(output[key])


@pytest.fixture(params=FAMILIES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_the_stream_is_what_transformers_calls_hidden_states(name: str) -> None:
    model, inputs = make(name)
    with torch.no_grad(), HookManager(model) as hooks:
        for prefix in stacks_of(name):
            hooks.attach(f"{prefix}embed")
            hooks.attach(f"{prefix}blocks.*")
        output = model(**inputs, output_hidden_states=True)
    for prefix in stacks_of(name):
        states = hidden_states(name, prefix, output)
        assert torch.equal(hooks.get(f"{prefix}embed.output"), states[0])
        for layer in (0, 1):
            assert torch.equal(hooks.get(f"{prefix}blocks.{layer}.output"), states[layer + 1])
        last = hooks.get(f"{prefix}blocks.2.output")
        if not torch.equal(last, states[3]):  # then transformers gives it after what follows the last block
            after = "model.decoder.project_out" if name == "opt_350m" else f"{prefix}final_ln"
            with torch.no_grad():
                assert torch.equal(hooks.module(after)(last), states[3])


def test_observing_everything_changes_no_bit(name: str) -> None:
    model, inputs = make(name)
    with torch.no_grad():
        plain = model(**inputs)
        with HookManager(model) as hooks:
            for prefix in stacks_of(name):
                for part in ("embed.output", "blocks.*.output", "blocks.*.attn.output", "blocks.*.ffn.output"):
                    hooks.attach(*f"{prefix}{part}".rsplit(".", 1))
            watched = model(**inputs)
    assert torch.equal(first(plain), first(watched))
    assert len(hooks.get_all()) == 10 * len(stacks_of(name))


@pytest.mark.parametrize("part", ["embed.output", "blocks.1.output", "blocks.1.attn.output", "blocks.1.ffn.output"])
def test_what_is_replaced_takes_effect(name: str, part: str) -> None:
    model, inputs = make(name)
    prefix = stacks_of(name)[-1]
    with torch.no_grad():
        plain = model(**inputs)
        with HookManager(model) as hooks:
            hooks.use(lambda value: value.flip(-1), at=f"{prefix}{part}")
            edited = model(**inputs)
    assert not torch.allclose(first(plain), first(edited), atol=1e-4)


def test_a_replaced_block_hands_on_just_what_it_was_given(name: str) -> None:
    model, inputs = make(name)
    prefix = stacks_of(name)[-1]
    with torch.no_grad(), HookManager(model) as hooks:
        hooks.use(lambda value: value.flip(-1), at=f"{prefix}blocks.1.output")
        hooks.attach(f"{prefix}blocks.1", raw=True)
        hooks.attach(f"{prefix}blocks.2", "input")
        model(**inputs)
    assert torch.equal(hooks.get(f"{prefix}blocks.2.input"), hooks.get(f"{prefix}blocks.1.output").flip(-1))


def test_attention_and_feed_forward_are_what_a_block_adds(name: str) -> None:
    if name in NORM_INSIDE:
        pytest.skip("this family norms each part before it is added")
    model, inputs = make(name)
    for prefix in stacks_of(name):
        block = f"{prefix}blocks.1"
        cross = prefix == "decoder."
        with torch.no_grad(), HookManager(model) as hooks:
            hooks.attach(block, "input")
            hooks.attach(block)
            for part in ("attn", "ffn", *(["cross_attn"] if cross else [])):
                hooks.attach(f"{block}.{part}")
            model(**inputs)
        parts = [hooks.get(f"{block}.{part}.output") for part in ("attn", *(["cross_attn"] if cross else []), "ffn")]
        expected = added(name, hooks, block, parts)
        torch.testing.assert_close(hooks.get(f"{block}.output"), expected, atol=1e-5, rtol=1e-5)


def added(name: str, hooks: HookManager, block: str, parts: list[Tensor]) -> Tensor:
    factor = hooks.model.config.residual_multiplier if name == "granite" else 1.0
    stream = hooks.get(f"{block}.input")
    norms = [module for module in hooks.module(block).modules() if isinstance(module, nn.LayerNorm)]
    if name == "albert":
        norms.reverse()
    for index, part in enumerate(parts):
        stream = stream + factor * part.reshape(stream.shape)  # OPT runs its feed-forward on (B * S, D)
        if name in POST_NORM:
            stream = norms[index](stream).detach()
    return stream


def test_steering_and_watching_leave_no_trace(name: str) -> None:
    model, inputs = make(name)
    prefix = stacks_of(name)[-1]
    with torch.no_grad(), leaves_no_trace(model) as run, HookManager(model) as hooks:
        hooks.attach(f"{prefix}blocks.*")
        hooks.use("steering", vector=torch.ones(32), at=f"{prefix}blocks.-1.output")
        run(**inputs)


def test_steering_adds_its_vector(name: str) -> None:
    model, inputs = make(name)
    prefix = stacks_of(name)[-1]
    vector = torch.randn(32)
    with torch.no_grad(), HookManager(model) as hooks:
        hooks.attach(f"{prefix}blocks.1", raw=True)
        hooks.use("steering", vector=vector, alpha=2.0, at=f"{prefix}blocks.1.output")
        hooks.attach(f"{prefix}blocks.2", "input")
        model(**inputs)
    torch.testing.assert_close(
        hooks.get(f"{prefix}blocks.2.input"), hooks.get(f"{prefix}blocks.1.output") + 2.0 * vector
    )


def first(output: Any) -> Tensor:
    for key in ("logits", "last_hidden_state", "logits_per_image"):
        if key in output:
            return output[key]
    raise KeyError(list(output))
