"""`patching`: what replaces an activation, beside plain torch hooks that replace the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kamui.errors import HeadError, NoEffectWarning, OptionError, ReplacementError
from kamui.hooks import HookManager
from kamui.model import ModelConfig, Transformer
from kamui.testing import leaves_no_trace


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    sizes = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=32, vocab_size=16, context_length=32)
    return Transformer(sizes).eval()


@pytest.fixture
def token_ids() -> Tensor:
    return torch.arange(12).view(2, 6)


@pytest.fixture
def tiny() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh())


def with_hook(model: nn.Module, path: str, edit: Callable[[Tensor], Tensor], *args: Any) -> Tensor:
    handle = model.get_submodule(path).register_forward_hook(lambda module, inputs, output: edit(output.clone()))
    output: Tensor = model(*args)
    handle.remove()
    return output


def patched(model: nn.Module, at: str, *args: Any, **options: Any) -> Tensor:
    with HookManager(model) as hooks:
        hooks.use("patching", at=at, **options)
        output: Tensor = model(*args)
    return output


def captured(model: nn.Module, at: str, *args: Any, **options: Any) -> Tensor:
    with HookManager(model) as hooks:
        hooks.use("cache", at=at, **options)
        model(*args)
    return hooks.get(at)


def test_an_activation_of_another_run_takes_the_place(model: Transformer, token_ids: Tensor) -> None:
    clean = captured(model, "blocks.0.output", token_ids.flip(0))
    expected = with_hook(model, "blocks.0", lambda value: clean.clone(), token_ids)
    assert torch.equal(patched(model, "blocks.0.output", token_ids, value=clean), expected)
    with HookManager(model) as hooks:
        hooks.attach("blocks.0", replace_with=clean)
        assert torch.equal(model(token_ids), expected)


def test_it_leaves_no_trace(model: Transformer, token_ids: Tensor) -> None:
    twin_output = model(token_ids)
    with leaves_no_trace(model) as run:
        run(token_ids)
        with HookManager(model) as hooks:
            hooks.use("patching", at="blocks.*.attn.z", value=lambda value: value * 0, heads=0)
            assert not torch.equal(run(token_ids), twin_output)
    assert torch.equal(model(token_ids), twin_output)


def test_an_inference_tensor_can_be_the_replacement(model: Transformer, token_ids: Tensor) -> None:
    with torch.inference_mode():
        clean = captured(model, "blocks.0.output", token_ids.flip(0))
        under_inference = patched(model, "blocks.0.output", token_ids, value=clean)
    assert torch.equal(patched(model, "blocks.0.output", token_ids, value=clean), under_inference)


@pytest.mark.parametrize("writes", [True, False])
def test_a_function_may_return_a_tensor_or_write_to_its_copy(
    model: Transformer, token_ids: Tensor, *, writes: bool
) -> None:
    def write(value: Tensor) -> None:
        value[:, 2] = 0.0

    def zeroed(value: Tensor) -> Tensor:
        value[:, 2] = 0.0
        return value

    expected = with_hook(model, "blocks.0", zeroed, token_ids)
    assert torch.equal(patched(model, "blocks.0.output", token_ids, value=write if writes else zeroed), expected)


def test_a_function_may_take_the_point_and_the_call(model: Transformer, token_ids: Tensor) -> None:
    seen = []

    def look(value: Tensor, point: str, call: Any) -> None:
        seen.append((point, call.forward, tuple(value.shape)))

    told = r"replaced nothing in 2 call\(s\) at .*did it forget to return the new value"
    with pytest.warns(NoEffectWarning, match=told):
        output = patched(model, "blocks.*.output", token_ids, value=look)
    assert seen == [(f"blocks.{layer}.output", 0, (2, 6, 16)) for layer in range(2)]
    assert torch.equal(output, model(token_ids))


def test_a_view_made_by_split_can_be_edited_with_gradients() -> None:
    class Split(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.pick = nn.Linear(4, 12), nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).split(4, dim=-1)
            product: Tensor = (self.pick(q) * k * v).sum()
            return product

    def erase(value: Tensor) -> None:
        value[:, 0] = 0.0

    net = Split()
    patched(net, "pick.output", torch.randn(2, 4), value=erase).backward()  # type: ignore[no-untyped-call]
    gradient = net.qkv.weight.grad
    assert gradient is not None
    assert gradient[0].abs().sum() == 0
    assert gradient[1].abs().sum() > 0


def test_gradients_reach_the_replacement_alone(model: Transformer, token_ids: Tensor) -> None:
    clean = captured(model, "blocks.0.output", token_ids.flip(0)).requires_grad_()
    patched(model, "blocks.0.output", token_ids, value=clean).sum().backward()  # type: ignore[no-untyped-call]
    assert clean.grad is not None
    assert model.blocks[0].ffn.up.weight.grad is None
    assert model.blocks[1].ffn.up.weight.grad is not None


@pytest.mark.parametrize("positions", [None, 0])
def test_a_module_that_works_in_place_does_not_write_to_the_replacement(positions: int | None) -> None:
    net = nn.Sequential(nn.Embedding(9, 4), nn.ReLU(inplace=True))
    stored = torch.full((1, 3, 4), -1.0)
    with torch.no_grad():
        for value in (stored, lambda value: stored):
            patched(net, "0.output", torch.tensor([[1, 2, 3]]), value=value, positions=positions)
    assert (stored == -1.0).all()


@pytest.mark.parametrize(
    ("positions", "columns"), [(2, [2]), (-1, [5]), ([4, 1], [1, 4]), (slice(1, 4), [1, 2, 3]), ("prompt", range(6))]
)
@pytest.mark.parametrize("part", [True, False])
def test_positions_choose_what_is_replaced(
    model: Transformer, token_ids: Tensor, positions: Any, columns: Any, *, part: bool
) -> None:
    clean = captured(model, "blocks.0.output", token_ids.flip(0))

    def put(value: Tensor) -> Tensor:
        value[:, list(columns)] = clean[:, list(columns)]
        return value

    expected = with_hook(model, "blocks.0", put, token_ids)
    replacement = clean[:, list(columns)] if part else clean
    assert torch.equal(patched(model, "blocks.0.output", token_ids, value=replacement, positions=positions), expected)


def test_every_row_may_have_its_own_position(model: Transformer, token_ids: Tensor) -> None:
    def put(value: Tensor) -> Tensor:
        value[0, 4] = 0.0
        value[1, 2] = 0.0
        return value

    expected = with_hook(model, "blocks.0", put, token_ids)
    for zeros in (torch.zeros(2, 6, 16), torch.zeros(2, 1, 16)):
        output = patched(model, "blocks.0.output", token_ids, value=zeros, positions=torch.tensor([4, 2]))
        assert torch.equal(output, expected)


def test_a_position_of_the_prompt_is_replaced_in_the_prompt_alone(model: Transformer) -> None:
    prompt = torch.tensor([[5, 6, 7, 8]])
    zeros = torch.zeros(1, 1, 16)
    with HookManager(model) as hooks:
        hooks.use("patching", at="blocks.0.output", value=zeros, positions=2)
        hooks.attach("blocks.0")
        generated = model.generate(prompt, 3)
        values = hooks.get("blocks.0.output", forward="all")
    assert generated.shape == (1, 7)
    assert (values[:, 2] == 0).all()
    assert (values[:, [0, 1, 3, 4, 5]] != 0).all()


@pytest.mark.parametrize("head", [0, 1])
def test_zeroing_a_head_is_zeroing_its_slice_before_the_output_projection(
    model: Transformer, token_ids: Tensor, head: int
) -> None:
    def without_head(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        joined = args[0].clone()  # (B, S, D)
        joined[..., head * 8 : (head + 1) * 8] = 0.0
        return (joined,)

    handle = model.blocks[0].attn.out.register_forward_pre_hook(without_head)
    expected = model(token_ids)
    handle.remove()
    assert not torch.equal(expected, model(token_ids))
    for zeros in (torch.zeros(2, 2, 6, 8), torch.zeros(2, 1, 6, 8)):
        output = patched(model, "blocks.0.attn.z", token_ids, value=zeros, heads=head)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


def test_heads_and_positions_choose_together(model: Transformer, token_ids: Tensor) -> None:
    def without_part(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        joined = args[0].clone()  # (B, S, D)
        joined[:, 3, 8:] = 0.0
        return (joined,)

    handle = model.blocks[1].attn.out.register_forward_pre_hook(without_part)
    expected = model(token_ids)
    handle.remove()
    output = patched(model, "blocks.1.attn.z", token_ids, value=torch.zeros(2, 1, 1, 8), heads=-1, positions=3)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("io", ["q", "k", "v", "pre_softmax", "weights", "z"])
def test_replacing_a_value_by_itself_changes_nothing(model: Transformer, token_ids: Tensor, io: str) -> None:
    at = f"blocks.1.attn.{io}"
    same = captured(model, at, token_ids)
    output = patched(model, at, token_ids, value=same)
    torch.testing.assert_close(output, model(token_ids), rtol=0, atol=1e-6)


def test_what_cache_chose_fits_what_patching_chooses(model: Transformer, token_ids: Tensor) -> None:
    chosen: dict[str, Any] = {"heads": [1, 0], "positions": [5, 2]}
    part = captured(model, "blocks.0.attn.z", token_ids, **chosen)
    output = patched(model, "blocks.0.attn.z", token_ids, value=part, **chosen)
    torch.testing.assert_close(output, model(token_ids), rtol=0, atol=1e-6)


def test_one_row_is_not_repeated_unless_that_is_asked_for(tiny: nn.Sequential) -> None:
    x, saved = torch.randn(3, 5, 4), torch.randn(1, 5, 4)
    message = (
        r"intervention 'patching' cannot replace the value at point '0\.output': shape \(3, 5, 4\) is expected, the "
        r"replacement has \(1, 5, 4\); broadcast=True"
    )
    with pytest.raises(ReplacementError, match=message):
        patched(tiny, "0.output", x, value=saved)
    output = patched(tiny, "0.output", x, value=saved, broadcast=True)
    assert torch.equal(output, saved.tanh().expand(3, 5, 4))


def test_a_vector_is_repeated_at_the_chosen_positions(model: Transformer, token_ids: Tensor) -> None:
    vector = torch.randn(16)

    def put(value: Tensor) -> Tensor:
        value[:, [1, 3]] = vector
        return value

    expected = with_hook(model, "blocks.0", put, token_ids)
    options: dict[str, Any] = {"positions": [1, 3], "broadcast": True}
    for value in (vector, vector.expand(1, 2, 16)):
        assert torch.equal(patched(model, "blocks.0.output", token_ids, value=value, **options), expected)


@pytest.mark.parametrize(
    ("value", "options", "message"),
    [
        (torch.zeros(3, 5), {"broadcast": True}, r"shape \(3, 5, 4\) is expected, the replacement has \(3, 5\)\n"),
        (torch.zeros(3, 2, 4), {"positions": 1}, r"shape \(3, 1, 4\) or \(3, 5, 4\) is expected, .* has \(3, 2, 4\)"),
        (torch.zeros(3, 5, 4).double(), {}, r"'0\.output': dtype torch\.float32 is expected, .*torch\.float64"),
        (torch.zeros(3, 5, 4, device="meta"), {}, r"'0\.output': device cpu is expected, the replacement has meta"),
        (lambda value: 3, {}, r"its function returned a int, not a tensor of shape \(3, 5, 4\)"),
    ],
)
def test_what_does_not_fit_is_refused(tiny: nn.Sequential, value: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ReplacementError, match=message):
        patched(tiny, "0.output", torch.randn(3, 5, 4), value=value, **options)


def test_heads_that_are_not_there_are_refused(model: Transformer, token_ids: Tensor) -> None:
    with pytest.raises(HeadError, match=r"'blocks\.0\.attn\.z' has 2 heads, numbered from 0; there is no head -3"):
        patched(model, "blocks.0.attn.z", token_ids, value=lambda value: value, heads=-3)


def test_a_value_is_a_tensor_or_a_function(model: Transformer) -> None:
    with HookManager(model) as hooks, pytest.raises(OptionError, match="option 'value' of intervention 'patching'"):
        hooks.use("patching", at="blocks.0.output", value="zero")
