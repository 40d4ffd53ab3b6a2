from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.overrides import _get_current_function_mode_stack

from kamui.errors import AttentionError
from kamui.hooks import HookManager

IOS = ("q", "k", "v", "pre_softmax", "weights", "z")
B, H, S, DH = 2, 4, 5, 3
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Module(nn.Module):
    """A module that computes attention as a function says."""

    def __init__(self, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.child = nn.Identity()

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attention(q, k, v)


def inputs(key_heads: int = H) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(7)
    shapes = ((B, H, S, DH), (B, key_heads, S, DH), (B, key_heads, S, DH))
    q, k, v = (torch.randn(shape, generator=random) for shape in shapes)
    return q, k, v


ALLOWED = torch.ones(S, S, dtype=torch.bool).tril()
FORBIDDING = torch.zeros(S, S).masked_fill(~ALLOWED, torch.finfo(torch.float32).min)
BIAS = torch.randn(1, H, S, S, generator=torch.Generator().manual_seed(8))


def with_masked_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).masked_fill(~ALLOWED, -torch.inf).softmax(-1) @ v


def with_masked_fill_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.matmul(q, k.transpose(2, 3))
    scores.masked_fill_(~ALLOWED, -torch.inf)
    return torch.matmul(torch.softmax(scores, -1), v)


def with_item_assignment(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores[:, :, ~ALLOWED] = -torch.inf
    return scores.softmax(-1) @ v


def with_where_and_padding(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.where(ALLOWED, q @ k.mT, torch.finfo(q.dtype).min)
    return nn.functional.softmax(scores + torch.zeros(B, 1, 1, S), dim=-1) @ v


def with_addition_in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT
    scores += FORBIDDING
    weights = scores.softmax(-1)
    weights = nn.functional.dropout(weights, 0.5, training=False)
    return weights @ v


def with_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.permute(2, 0, 1, 3) for part in (q, k, v))  # (S, B, H, Dh)
    scores = torch.einsum("ibnd,jbnd->bnij", q, k) - 1e30 * (~ALLOWED).float()
    return torch.einsum("bnij,jbnd->ibnd", scores.softmax(3), v).permute(1, 2, 0, 3)


def with_joined_batch_and_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.reshape(B * H, S, DH) for part in (q, k, v))
    scores = torch.baddbmm(FORBIDDING, q, k.transpose(1, 2))
    return torch.bmm(scores.softmax(-1), v).view(B, H, S, DH)


def with_sinks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.mT + FORBIDDING
    logits = torch.cat([scores, torch.full((B, H, S, 1), -1e9)], -1)
    logits = logits - logits.max(-1, keepdim=True).values
    return logits.softmax(-1)[..., :-1] @ v


CAUSAL = [
    with_masked_fill,
    with_masked_fill_in_place,
    with_item_assignment,
    with_where_and_padding,
    with_addition_in_place,
    with_einsum,
    with_joined_batch_and_heads,
    with_sinks,
]


def by_hand(q: Tensor, k: Tensor, v: Tensor, edits: dict[str, Any]) -> dict[str, Tensor]:
    """Causal attention with an edit of each quantity on the way."""
    found: dict[str, Tensor] = {}

    def edited(io: str, value: Tensor) -> Tensor:
        found[io] = edits.get(io, lambda value: value)(value)
        return found[io]

    q, k = edited("q", q), edited("k", k)
    scores = edited("pre_softmax", q @ k.mT)
    weights = edited("weights", scores.masked_fill(~ALLOWED, -torch.inf).softmax(-1))
    edited("z", weights @ edited("v", v))
    return found


@pytest.mark.parametrize("attention", CAUSAL)
def test_every_way_to_write_attention_shows_the_same_and_stays_the_same_to_the_bit(attention: Attention) -> None:
    module, given = Module(attention), inputs()
    bare = module(*given)
    for ios in (IOS, *((io,) for io in IOS)):
        with HookManager(module) as hooks:
            hooks.use("cache", at=list(ios))
            assert torch.equal(module(*given), bare)
            for io, expected in by_hand(*given, {}).items():
                if io in ios:
                    torch.testing.assert_close(hooks.get(io), expected)


@pytest.mark.parametrize("io", IOS)
@pytest.mark.parametrize("attention", CAUSAL)
def test_an_edit_flows_on_through_the_modules_own_steps_with_gradients(attention: Attention, io: str) -> None:
    def edit(value: Tensor) -> Tensor:
        return value * torch.linspace(0.2, 2.0, value.shape[-1])

    module, given = Module(attention), [part.requires_grad_() for part in inputs()]
    expected = by_hand(*given, {io: edit})["z"]
    with HookManager(module) as hooks:
        hooks.use(edit, at=io)
        result = module(*given)
    torch.testing.assert_close(result, expected)
    wanted = torch.autograd.grad(expected.square().sum(), given)
    torch.testing.assert_close(torch.autograd.grad(result.square().sum(), given), wanted, atol=1e-5, rtol=1e-4)


def test_a_bias_for_each_head_is_part_of_the_scores_unless_it_holds_the_mask() -> None:
    module, (q, k, v) = Module(lambda q, k, v: (q @ k.mT + BIAS).softmax(-1) @ v), inputs()
    with HookManager(module) as hooks:
        hooks.use("cache", at="pre_softmax")
        module(q, k, v)
        torch.testing.assert_close(hooks.get("pre_softmax"), q @ k.mT + BIAS)
        module.attention = lambda q, k, v: (q @ k.mT + BIAS + FORBIDDING).softmax(-1) @ v
        module(q, k, v)
        torch.testing.assert_close(hooks.get("pre_softmax"), q @ k.mT + BIAS)
        module.attention = lambda q, k, v: (q @ k.mT + (BIAS + FORBIDDING)).softmax(-1) @ v
        module(q, k, v)
        torch.testing.assert_close(hooks.get("pre_softmax"), q @ k.mT)


def repeated_by_expanding(heads: Tensor) -> Tensor:
    return heads[:, :, None].expand(B, 2, 2, S, DH).reshape(B, H, S, DH)


def repeated_by_interleaving(heads: Tensor) -> Tensor:
    return heads.transpose(1, 2).repeat_interleave(2, dim=2).transpose(1, 2)


@pytest.mark.parametrize("repeat", [repeated_by_expanding, repeated_by_interleaving])
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("io", ["k", "v"])
def test_keys_and_values_are_those_before_their_heads_are_repeated(
    repeat: Callable[[Tensor], Tensor], fused: bool, io: str
) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = repeat(k), repeat(v)
        if fused:
            return nn.functional.scaled_dot_product_attention(q, k, v)
        return (q @ k.mT / DH**0.5).softmax(-1) @ v

    module, (q, k, v) = Module(attention), inputs(key_heads=2)
    edited = {"k": k, "v": v} | {io: {"k": k, "v": v}[io] * 0.5}
    expected = attention(q, **edited)
    with HookManager(module) as hooks:
        hooks.use("cache", at=[io])
        hooks.use(lambda value: value * 0.5, at=io)
        torch.testing.assert_close(module(q, k, v), expected)
        assert hooks.get(io).shape == (B, 2, S, DH)


def test_a_softmax_of_a_router_is_no_attention() -> None:
    class Routed(Module):
        def __init__(self) -> None:
            super().__init__(with_masked_fill)
            self.router = nn.Parameter(torch.randn(DH, 6))

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().forward(q, k, v) * (q @ self.router).softmax(-1).amax(-1, keepdim=True)

    module = Routed()
    with HookManager(module) as hooks:
        hooks.use("cache", at="weights")
        module(*inputs())
        assert hooks.get("weights").shape == (B, H, S, S)


@pytest.mark.parametrize("equation", ["bhqd,bhkd->bhd", "bhqd,bhkd->b", "bhqd,bhqd->bhqd"])
def test_a_softmax_of_another_product_is_no_attention(equation: str) -> None:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return with_masked_fill(q, k, v) * torch.einsum(equation, q, k).softmax(-1).mean()

    module = Module(attention)
    with HookManager(module) as hooks:
        hooks.use("cache", at="weights")
        module(*inputs())
        assert hooks.get("weights").shape == (B, H, S, S)


def test_two_softmaxes_of_scores_are_no_single_value() -> None:
    module = Module(lambda q, k, v: with_masked_fill(q, k, v) + with_sinks(q, k, v))
    with HookManager(module) as hooks:
        hooks.use("cache", at="weights")
        with pytest.raises(AttentionError, match="computes attention more than once"):
            module(*inputs())
    assert _get_current_function_mode_stack() == []


@pytest.mark.filterwarnings("ignore")
def test_a_kernel_that_never_forms_the_weights_is_named() -> None:
    module = Module(lambda q, k, v: flex_attention(q, k, v))  # type: ignore[arg-type, return-value]
    q = torch.randn(1, 2, 16, 16)
    with HookManager(module) as hooks:
        hooks.use("cache", at="weights")
        with pytest.raises(AttentionError, match="'flex_attention', which never forms"):
            module(q, q, q)
    assert _get_current_function_mode_stack() == []


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "attn_mask", "key_padding_mask"])
def test_multihead_attention_shows_its_internals(need_weights: bool, batch_first: bool, mask: str) -> None:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
    x = torch.randn(2, 5, 16)
    padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    options: dict[str, Any] = {"need_weights": need_weights, "average_attn_weights": False}
    options |= {"attn_mask": {"attn_mask": ~ALLOWED}, "key_padding_mask": {"key_padding_mask": padding}}.get(mask, {})
    given = x if batch_first else x.transpose(0, 1)
    _, weights = module(given, given, given, **options | {"need_weights": True})
    bare, _ = module(given, given, given, **options)
    with HookManager(module) as hooks:
        hooks.use("cache", at=list(IOS))
        output, _ = module(given, given, given, **options)
        torch.testing.assert_close(output, bare, atol=1e-6, rtol=1e-5)
        found = hooks.get_all()
        assert {io: tuple(found[io].shape) for io in IOS} == {
            io: (2, 4, 5, 5 if io in ("pre_softmax", "weights") else 4) for io in IOS
        }
        torch.testing.assert_close(found["weights"], weights)
        torch.testing.assert_close(found["pre_softmax"], found["q"] @ found["k"].mT * 0.5)
        hooks.use(lambda value: torch.zeros_like(value), at="z")
        zeroed, _ = module(given, given, given, **options)
    torch.testing.assert_close(zeroed, module.out_proj.bias.expand_as(zeroed))


def test_an_encoder_layer_in_eval_leaves_its_fast_path_while_it_is_listened_to() -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad(), HookManager(layer) as hooks:
        bare = layer(x)
        hooks.use("cache", at="self_attn.weights")
        torch.testing.assert_close(layer(x), bare, atol=1e-6, rtol=1e-5)
        assert hooks.get("self_attn.weights").shape == (2, 4, 5, 5)
