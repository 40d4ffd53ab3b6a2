from __future__ import annotations

import gc
import math
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.overrides import _get_current_function_mode_stack

from kamui.errors import AttentionError, NeverFiredWarning, PointError
from kamui.hooks import HookManager
from kamui.model import ModelConfig, Transformer

B, H, S, D = 2, 4, 5, 8


class Attend(nn.Module):
    """One call of the fused kernel."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.scale = nn.Identity()  # a child, as an attention module has

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, **self.options)


def inputs(key_heads: int = H, keys: int = S) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(B, H, S, D), torch.randn(B, key_heads, keys, D), torch.randn(B, key_heads, keys, D)


def explicit(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    score_edit: Any = lambda scores: scores,
    weight_edit: Any = lambda weights: weights,
) -> tuple[Tensor, Tensor, Tensor]:
    """Eager attention, loop by loop: (scores, weights, z)."""
    groups = q.shape[1] // k.shape[1]
    k, v = (torch.stack([part[:, head // groups] for head in range(q.shape[1])], 1) for part in (k, v))
    scores = score_edit(
        torch.einsum("bhqd,bhkd->bhqk", q, k) * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    )
    allowed = torch.ones_like(scores, dtype=torch.bool)
    bias = torch.zeros_like(scores)
    if is_causal:
        allowed = torch.tensor([[key <= query for key in range(k.shape[2])] for query in range(q.shape[2])])
        allowed = allowed.expand_as(scores)
    if attn_mask is not None and attn_mask.dtype is torch.bool:
        allowed = attn_mask.expand_as(scores)
    elif attn_mask is not None:
        bias = attn_mask.expand_as(scores)
        allowed = bias > -torch.inf
    exponents = (scores + bias.masked_fill(~allowed, 0.0)).exp() * allowed
    weights = exponents / exponents.sum(-1, keepdim=True).clamp(min=1e-30)
    weights = weight_edit(weights)
    return scores, weights, weights @ v


def bool_mask() -> Tensor:
    mask = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(5)) < 0.6
    mask[..., 0] = True
    return mask


def float_mask(empty_row: bool = False) -> Tensor:
    mask = torch.zeros(B, 1, S, S).masked_fill(~bool_mask(), -torch.inf) + 0.3
    if empty_row:
        mask[0, :, 2] = -torch.inf
    return mask


def mask_with_an_empty_row() -> Tensor:
    mask = bool_mask()
    mask[0, :, 2] = False
    return mask


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.2},
    "causal": {"is_causal": True},
    "bool mask": {"attn_mask": bool_mask()},
    "float mask": {"attn_mask": float_mask()},
    "bool mask, empty row": {"attn_mask": mask_with_an_empty_row()},
    "float mask, empty row": {"attn_mask": float_mask(empty_row=True)},
    "grouped queries": {"enable_gqa": True, "is_causal": True},
}


def case_inputs(case: str) -> tuple[Tensor, Tensor, Tensor]:
    return inputs(key_heads=2 if "grouped" in case else H)


@pytest.mark.parametrize("case", CASES)
def test_observed_internals_are_those_of_explicit_attention(case: str) -> None:
    options, (q, k, v) = CASES[case], case_inputs(case)
    attend = Attend(**options)
    bare = attend(q, k, v)
    scores, weights, z = explicit(q, k, v, **options)
    with HookManager(attend) as hooks:
        hooks.use("cache", at=["q", "k", "v", "pre_softmax", "weights", "z"])
        assert torch.equal(attend(q, k, v), bare)
        for io, expected in {"q": q, "k": k, "v": v, "z": bare}.items():
            assert torch.equal(hooks.get(io), expected)
        torch.testing.assert_close(hooks.get("pre_softmax"), scores)
        torch.testing.assert_close(hooks.get("weights"), weights)
        torch.testing.assert_close(hooks.get("z"), z)
        assert not hooks.get("pre_softmax").isinf().any()


def halve(value: Tensor) -> Tensor:
    return value * 0.5


@pytest.mark.parametrize("case", CASES)
def test_edited_weights_give_what_explicit_attention_gives_with_gradients(case: str) -> None:
    options, values = CASES[case], [part.requires_grad_() for part in case_inputs(case)]
    _, _, expected = explicit(*values, **options, weight_edit=halve)
    wanted = torch.autograd.grad(expected.square().sum(), values)
    attend = Attend(**options)
    with HookManager(attend) as hooks:
        hooks.use(halve, at="weights")
        result = attend(*values)
        found = torch.autograd.grad(result.square().sum(), values)
    torch.testing.assert_close(result, expected)
    assert all(gradient.isfinite().all() for gradient in found)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_edited_scores_are_masked_afterwards(case: str) -> None:
    options, values = CASES[case], case_inputs(case)
    _, _, expected = explicit(*values, **options, score_edit=halve)
    attend = Attend(**options)
    with HookManager(attend) as hooks:
        hooks.use(halve, at="pre_softmax")
        torch.testing.assert_close(attend(*values), expected)


@pytest.mark.parametrize("io", ["q", "k", "v"])
def test_edited_queries_keys_and_values_enter_the_fused_kernel(io: str) -> None:
    values = dict(zip("qkv", inputs(), strict=True))
    attend = Attend(is_causal=True)
    expected = attend(**{**values, io: values[io] * 0.5})
    with HookManager(attend) as hooks:
        hooks.use(halve, at=io)
        assert torch.equal(attend(**values), expected)


def test_an_edit_of_z_replaces_what_the_kernel_gave() -> None:
    q, k, v = inputs()
    attend = Attend()
    bare = attend(q, k, v)
    with HookManager(attend) as hooks:
        hooks.use(halve, at="z")
        assert torch.equal(attend(q, k, v), bare * 0.5)


def test_causal_attention_is_aligned_at_the_top_left_with_more_keys_than_queries() -> None:
    q, k, v = inputs(keys=9)
    attend = Attend(is_causal=True)
    with HookManager(attend) as hooks:
        hooks.use("cache", at="weights")
        hooks.use(lambda value: value.clone(), at="weights")
        torch.testing.assert_close(attend(q, k, v), F.scaled_dot_product_attention(q, k, v, is_causal=True))
        weights = hooks.get("weights")
    assert weights.shape == (B, H, S, 9)
    assert torch.equal(weights != 0, torch.ones(S, 9).tril().bool().expand(B, H, S, 9))


@pytest.mark.parametrize("bias", [causal_upper_left(S, 9), causal_lower_right(S, 9)])
def test_a_causal_bias_is_the_mask_that_it_stands_for(bias: Tensor) -> None:
    q, k, v = inputs(keys=9)
    attend = Attend(attn_mask=bias)
    bare = attend(q, k, v)
    with HookManager(attend) as hooks:
        hooks.use("cache", at="weights")
        assert torch.equal(attend(q, k, v), bare)
        hooks.use(lambda value: value.clone(), at="weights")
        torch.testing.assert_close(attend(q, k, v), bare)


def test_a_row_without_any_allowed_key_is_zero_as_in_the_kernel() -> None:
    q, k, v = inputs()
    attend = Attend(attn_mask=mask_with_an_empty_row())
    bare = attend(q, k, v)
    assert (bare[0, :, 2] == 0).all()
    with HookManager(attend) as hooks:
        hooks.use(lambda value: value.clone(), at="weights")
        torch.testing.assert_close(attend(q, k, v), bare)


def test_dropout_stays_what_it_was_while_weights_are_observed() -> None:
    q, k, v = inputs()
    attend = Attend(dropout_p=0.5)
    torch.manual_seed(11)
    bare = attend(q, k, v)
    with HookManager(attend) as hooks:
        hooks.use("cache", at=["weights", "pre_softmax"])
        torch.manual_seed(11)
        assert torch.equal(attend(q, k, v), bare)
        torch.testing.assert_close(hooks.get("weights").sum(-1), torch.ones(B, H, S))


def test_dropout_acts_on_edited_weights() -> None:
    q, k, _ = inputs()
    v = torch.eye(S, D).expand(B, H, S, D)
    attend = Attend(dropout_p=0.5)
    with HookManager(attend) as hooks:
        hooks.use(lambda value: torch.ones_like(value), at="weights")
        kept = attend(q, k, v)[..., :S]
    assert set(kept.unique().tolist()) == {0.0, 2.0}


def test_bf16_agrees_to_its_precision() -> None:
    q, k, v = (part.bfloat16() for part in inputs())
    attend = Attend(is_causal=True)
    with HookManager(attend) as hooks:
        hooks.use(lambda value: value.clone(), at="weights")
        result = attend(q, k, v)
    torch.testing.assert_close(result, F.scaled_dot_product_attention(q, k, v, is_causal=True), atol=1e-2, rtol=1e-2)


def test_a_module_that_attends_twice_is_told_so() -> None:
    class Twice(Attend):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return super().forward(q, k, super().forward(q, k, v))

    attend = Twice()
    with HookManager(attend) as hooks:
        hooks.use("cache", at="weights")
        with pytest.raises(
            AttentionError, match="point 'weights' is not one value: its module computes attention more"
        ):
            attend(*inputs())
    assert _get_current_function_mode_stack() == []


def test_the_innermost_attention_module_owns_its_attention() -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Attend()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(self.inner(q, k, v), k, v)

    outer = Outer()
    q, k, v = inputs()
    bare, inner = outer(q, k, v), outer.inner(q, k, v)
    with HookManager(outer) as hooks:
        hooks.use("cache", at=["q", "inner.q"])
        assert torch.equal(outer(q, k, v), bare)
        assert torch.equal(hooks.get("inner.q"), q)
        assert torch.equal(hooks.get("q"), inner)


def test_attention_points_of_a_module_that_attends_otherwise_are_named_at_the_end() -> None:
    class Sigmoid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.child = nn.Identity()

        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return (q @ k.mT).sigmoid() @ v

    def run(attend: Sigmoid) -> None:
        with HookManager(attend) as hooks:
            hooks.use("cache", at="weights")
            attend(*inputs())

    with pytest.warns(NeverFiredWarning, match=r"never fired: 'weights' \(cache\)"):
        run(Sigmoid())


def test_a_selector_inside_attention_is_refused() -> None:
    attend = Attend()
    with HookManager(attend) as hooks, pytest.raises((AttentionError, PointError), match=r"weights\[0\]"):
        hooks.use("cache", at="weights[0]")


@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_no_mode_stays_after_an_interrupt(
    model: Transformer, token_ids: Tensor, interrupt: type[BaseException]
) -> None:
    bare = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use("cache", at="blocks.*.attn.weights")
        handle = model.blocks[1].attn.out.register_forward_hook(lambda *_: (_ for _ in ()).throw(interrupt()))
        with pytest.raises(interrupt):
            model(token_ids)
        handle.remove()
        assert torch.equal(model(token_ids), bare)
        assert len(_get_current_function_mode_stack()) == 0
        assert hooks.report().finished == 1
        assert hooks.report().dropped == 1

    def interrupted_by_a_callback() -> None:
        with HookManager(model) as hooks:
            hooks.use("cache", at="blocks.*.attn.weights")
            hooks.use(lambda value: (_ for _ in ()).throw(interrupt()), at="blocks.1.attn.weights")
            model(token_ids)

    with pytest.raises(interrupt):
        interrupted_by_a_callback()
    assert len(_get_current_function_mode_stack()) == 0
    assert torch.equal(model(token_ids), bare)


def test_modes_of_others_stay_in_their_order(model: Transformer, token_ids: Tensor) -> None:
    class Counting(torch.overrides.TorchFunctionMode):
        calls = 0

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.calls += func is F.scaled_dot_product_attention
            return func(*args, **(kwargs or {}))

    with HookManager(model) as hooks, Counting() as counting:
        hooks.use("cache", at="blocks.0.attn.weights")
        model(token_ids)
        assert counting.calls == 2
        assert _get_current_function_mode_stack() == [counting]


def test_value_heads_of_grouped_queries_serve_their_query_heads() -> None:
    q, k, v = inputs(key_heads=2)
    attend = Attend(enable_gqa=True)
    bare = attend(q, k, v)

    def without_the_first(value: Tensor) -> None:
        value[:, 0] = 0

    with HookManager(attend) as hooks:
        hooks.use("cache", at="v")
        hooks.use(without_the_first, at="v")
        edited = attend(q, k, v)
        assert hooks.get("v").shape == (B, 2, S, D)
    changed = [(edited[:, head] != bare[:, head]).any().item() for head in range(H)]
    assert changed == [True, True, False, False]


def test_what_attention_held_goes_without_the_cyclic_collector() -> None:
    model = Transformer(ModelConfig(n_layers=1, d_model=8, n_heads=2, d_ff=16, vocab_size=8, context_length=8)).eval()
    alive = weakref.ref(model)
    gc.collect()
    gc.disable()
    try:
        with HookManager(model) as hooks:
            hooks.attach("blocks.0.attn", "weights")
            model(torch.tensor([[1, 2, 3]]))
        del hooks, model
        assert alive() is None
    finally:
        gc.enable()
