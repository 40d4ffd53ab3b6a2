"""Steering, against the same edits made with torch hooks by hand."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import kamui
from kamui.errors import (
    NeverFiredWarning,
    NotCapturedError,
    OptionError,
    PositionError,
    ReplacementError,
    ScopeClosedError,
    UnknownPointError,
    UnsupportedModelError,
)
from kamui.hooks import HookManager, Positions
from kamui.model import ModelConfig, Transformer
from kamui.testing import leaves_no_trace
from kamui_steering import Steering

WIDTH = 16


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(n_layers=2, d_model=WIDTH, n_heads=2, d_ff=32, vocab_size=16, context_length=32)
    return Transformer(config).eval()


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(0, 16, (2, 7), generator=torch.Generator().manual_seed(1))  # (B, S)


@pytest.fixture
def vector() -> Tensor:
    return torch.randn(WIDTH, generator=torch.Generator().manual_seed(2))


@contextmanager
def by_hand(module: nn.Module, edit: Callable[[Tensor], Tensor]) -> Iterator[None]:
    handle = module.register_forward_hook(lambda module, args, output: edit(output))
    try:
        yield
    finally:
        handle.remove()


def steer(hooks: HookManager, **options: Any) -> Steering:
    steering = hooks.use("steering", **options)
    assert isinstance(steering, Steering)
    return steering


def small_linear() -> nn.Linear:
    linear = nn.Linear(2, 2, bias=False)
    linear.weight.data = torch.tensor([[2.0, 0.0], [1.0, -1.0]])
    return linear


def at_tokens(*columns: int) -> Tensor:
    mask = torch.zeros(7, 1, dtype=torch.bool)
    mask[list(columns)] = True
    return mask


# What is added, and where.


@pytest.mark.parametrize("inputs", [[1.0, 2.0], [[1.0, 2.0]]], ids=["one input", "a batch"])
def test_worked_example_on_a_model_that_is_one_linear(inputs: Any) -> None:
    linear, given = small_linear(), torch.tensor(inputs)
    with HookManager(linear) as hooks:
        hooks.use("steering", at="output", alpha=0.5, vector=torch.tensor([4.0, 2.0]))
        assert linear(given).flatten().tolist() == [4.0, 0.0]
    assert linear(given).flatten().tolist() == [2.0, -1.0]


def test_an_inner_module_is_steered_by_its_path() -> None:
    net = nn.Sequential(small_linear(), nn.ReLU())
    with HookManager(net):
        kamui.use("steering", at="0.output", alpha=0.5, vector=torch.tensor([4, 2]))
        assert net(torch.tensor([[1.0, 2.0]])).tolist() == [[4.0, 0.0]]


def test_it_adds_what_a_torch_hook_adds(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    with by_hand(model.blocks[0], lambda output: output + 3 * vector):
        expected = model(token_ids)
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        hooks.use("steering", at="blocks.0.output", alpha=3, vector=vector)
        assert torch.equal(run(token_ids), expected)


def test_the_default_point_is_the_output_of_the_middle_block(
    model: Transformer, token_ids: Tensor, vector: Tensor
) -> None:
    with by_hand(model.blocks[1], lambda output: output + vector):
        expected = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use("steering", vector=vector)
        assert torch.equal(model(token_ids), expected)
        assert [row.point for row in hooks.report().rows] == ["blocks.1.output"]


def test_alpha_may_change_between_forward_passes(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    with by_hand(model.blocks[1], lambda output: output - 2 * vector):
        expected = model(token_ids)
    with HookManager(model) as hooks:
        steering = steer(hooks, vector=vector)
        model(token_ids)
        steering.alpha = -2
        assert torch.equal(model(token_ids), expected)


def test_each_point_may_have_its_own_vector(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    with (
        by_hand(model.blocks[0], lambda output: output + vector),
        by_hand(model.blocks[1], lambda output: output - vector),
    ):
        expected = model(token_ids)
    vectors = {"blocks.0.output": vector, "blocks.1.output": -vector}
    for at in (None, "blocks.*.output"):
        with HookManager(model) as hooks:
            hooks.use("steering", vector=vectors, at=at)
            assert torch.equal(model(token_ids), expected)


def test_two_steerings_at_one_point_add_up(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    with by_hand(model.blocks[1], lambda output: output + vector + vector):
        expected = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use("steering", vector=vector)
        hooks.use("steering", vector=vector)
        assert torch.equal(model(token_ids), expected)
        assert [(row.calls, row.changed) for row in hooks.report().rows] == [(1, 1), (1, 1)]


def test_nested_scopes_steer_twice_inside_and_once_after(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    with by_hand(model.blocks[1], lambda output: output + vector):
        once = model(token_ids)
    with by_hand(model.blocks[1], lambda output: output + vector + vector):
        twice = model(token_ids)
    with leaves_no_trace(model) as run, HookManager(model) as outer:
        outer.use("steering", vector=vector)
        with HookManager(model) as inner:
            inner.use("steering", vector=vector)
            assert torch.equal(run(token_ids), twice)
        assert torch.equal(run(token_ids), once)


def test_the_activation_keeps_its_dtype() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).to(torch.bfloat16)
    given, vector = torch.randn(2, 4).bfloat16(), torch.randn(4)
    bare = net[0](given)
    with HookManager(net) as hooks:
        hooks.use("steering", at="0.output", alpha=0.3, vector=vector)
        hooks.attach("0")
        assert net(given).dtype is torch.bfloat16
        assert torch.equal(hooks.get("0.output"), bare + (0.3 * vector).to(torch.bfloat16))


def test_a_square_value_is_steered_along_its_last_axis() -> None:
    identity, vector = nn.Identity(), torch.tensor([1.0, 2.0, 3.0])
    with HookManager(identity) as hooks:
        hooks.use("steering", at="output", vector=vector)
        assert torch.equal(identity(torch.zeros(1, 3, 3)), vector.expand(1, 3, 3))


def test_gradients_reach_the_vector_and_the_model(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    trained = vector.clone().requires_grad_()
    with HookManager(model) as hooks:
        hooks.use("steering", vector=trained, alpha=2.0)
        gradient, weight_gradient = torch.autograd.grad(
            model(token_ids).sum(), [trained, model.blocks[0].ffn.up.weight]
        )
    twin = vector.clone().requires_grad_()
    with by_hand(model.blocks[1], lambda output: output + 2.0 * twin):
        expected = torch.autograd.grad(model(token_ids).sum(), [twin, model.blocks[0].ffn.up.weight])
    torch.testing.assert_close([gradient, weight_gradient], list(expected))


# Positions.


@pytest.mark.parametrize(
    ("positions", "columns"),
    [(3, [3]), (-1, [6]), ([0, 2], [0, 2]), (slice(2, None, 2), [2, 4, 6]), ("prompt", range(7)), ("last", [6])],
)
def test_only_the_positions_asked_for_are_steered(
    model: Transformer, token_ids: Tensor, vector: Tensor, positions: Positions, columns: list[int]
) -> None:
    mask = at_tokens(*columns)
    with by_hand(model.blocks[1], lambda output: torch.where(mask, output + vector, output)):
        expected = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use("steering", vector=vector, positions=positions)
        assert torch.equal(model(token_ids), expected)


def test_each_row_may_have_its_own_position(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    mask = torch.stack([at_tokens(1), at_tokens(6)])  # (B, S, 1)
    with by_hand(model.blocks[1], lambda output: torch.where(mask, output + vector, output)):
        expected = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use("steering", vector=vector, positions=torch.tensor([1, -1]))
        assert torch.equal(model(token_ids), expected)


@pytest.mark.parametrize("positions", [None, 3, -1, "prompt", "generated", "last"])
def test_generation_is_the_same_with_and_without_a_cache(
    model: Transformer, token_ids: Tensor, vector: Tensor, positions: Positions
) -> None:
    bare = model.generate(token_ids, 8)
    told = []
    with leaves_no_trace(model) as run:
        for use_cache in (True, False):
            with HookManager(model) as hooks:
                hooks.use("steering", vector=vector, alpha=5.0, positions=positions, at="blocks.0.output")
                told.append(run.apply(lambda model, cached=use_cache: model.generate(token_ids, 8, use_cache=cached)))
    assert torch.equal(told[0], told[1])
    if positions is None:
        assert not torch.equal(told[0], bare)


def test_a_call_without_the_position_is_not_counted_as_changed(
    model: Transformer, token_ids: Tensor, vector: Tensor
) -> None:
    bare = model(token_ids)
    told = "the positions asked for were in no call of these points: 'blocks.1.output' .steering."
    with pytest.warns(NeverFiredWarning, match=told), HookManager(model) as hooks:  # noqa: PT031  told at the end
        hooks.use("steering", vector=vector, positions=20)
        assert torch.equal(model(token_ids), bare)
        assert [(row.calls, row.changed, row.missed) for row in hooks.report().rows] == [(1, 0, 1)]


def test_positions_on_a_value_without_a_sequence_are_refused() -> None:
    linear = small_linear()
    with HookManager(linear) as hooks:
        hooks.use("steering", at="output", vector=torch.ones(2), positions=0)
        with pytest.raises(PositionError, match="positions 0 cannot be found at point 'output'"):
            linear(torch.ones(1, 2))


# Fitting.


def by_hand_at(module: nn.Module, run: Callable[[], Any]) -> Tensor:
    seen: list[Tensor] = []
    handle = module.register_forward_hook(lambda module, args, output: seen.append(output.detach()))
    run()
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("over", ["last", "mean"])
def test_fit_takes_the_difference_of_means(model: Transformer, token_ids: Tensor, over: Any) -> None:
    others = torch.randint(0, 16, (3, 5))
    means = [
        (values[:, -1] if over == "last" else values.mean(1)).mean(0)
        for ids in (token_ids, others)
        for values in [by_hand_at(model.blocks[1], lambda ids=ids: model(ids))]
    ]
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        steering = steer(hooks, alpha=0.5)
        assert steering.fit(token_ids, others, over=over) is steering
        assert isinstance(steering.vector, Tensor)
        assert not steering.vector.requires_grad
        torch.testing.assert_close(steering.vector, means[0] - means[1])
        assert hooks.report().finished == 0
        steered = run(token_ids)
    with by_hand(model.blocks[1], lambda output: output + 0.5 * steering.vector):
        assert torch.equal(model(token_ids), steered)


def test_fit_takes_sequences_of_different_lengths(model: Transformer) -> None:
    sides = [[torch.tensor([1, 2, 3]), torch.tensor([[4, 5]])], [torch.tensor([6])]]
    means = [
        torch.stack([by_hand_at(model.blocks[1], lambda ids=ids: model(ids.view(1, -1)))[0, -1] for ids in side]).mean(
            0
        )
        for side in sides
    ]
    with HookManager(model) as hooks:
        steering = steer(hooks).fit(*sides)
    torch.testing.assert_close(steering.vector, means[0] - means[1])


class Masked(nn.Module):
    """A model that takes its arguments by keyword, as those of transformers do."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.inner = model

    def forward(self, *, input_ids: Tensor, attention_mask: Tensor | None = None) -> Any:
        return self.inner(input_ids)


@pytest.mark.parametrize("mask", [[1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], ids=["right padding", "left padding"])
@pytest.mark.parametrize("over", ["last", "mean"])
def test_fit_leaves_padding_out(model: Transformer, mask: list[int], over: Any) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    values = by_hand_at(model.blocks[0], lambda: model(ids))[0]  # (S, D)
    real = values[torch.tensor(mask, dtype=torch.bool)]
    expected = real[-1] if over == "last" else real.mean(0)
    other = by_hand_at(model.blocks[0], lambda: model(ids[:, :1]))[0, 0]
    outer = Masked(model)
    with HookManager(outer) as hooks:
        steering = steer(hooks, at="inner.blocks.0.output")
        steering.fit({"input_ids": ids, "attention_mask": torch.tensor([mask])}, [{"input_ids": ids[:, :1]}], over=over)
    torch.testing.assert_close(steering.vector, expected - other)


def test_fit_on_inputs_without_a_sequence_counts_each_row() -> None:
    linear = small_linear()
    towards, away = torch.randn(3, 2), torch.randn(2)
    with HookManager(linear) as hooks:
        steering = steer(hooks, at="output")
        steering.fit(towards, [away])
    torch.testing.assert_close(steering.vector, (linear(towards).mean(0) - linear(away)).detach())


def test_fit_at_several_points_gives_each_its_vector(model: Transformer, token_ids: Tensor) -> None:
    expected = {
        f"blocks.{layer}.output": by_hand_at(block, lambda: model(token_ids))[0, -1]
        - by_hand_at(block, lambda: model(token_ids))[1, -1]
        for layer, block in enumerate(model.blocks)
    }
    with HookManager(model) as hooks:
        steering = steer(hooks, at="blocks.*.output").fit(token_ids[:1], token_ids[1:])
    assert list(steering.vector) == list(expected)
    torch.testing.assert_close(steering.vector, expected)


def test_fit_sees_the_model_without_any_intervention(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    with HookManager(model) as hooks:
        first = steer(hooks).fit(token_ids[:1], token_ids[1:]).vector
    with HookManager(model) as hooks:
        hooks.use("steering", vector=vector, alpha=100.0, at="blocks.0.output", positions=0)
        hooks.attach("blocks.0")
        again = steer(hooks, vector=vector, alpha=9.0).fit(token_ids[:1], token_ids[1:])
        assert torch.equal(again.vector, first)
        with pytest.raises(NotCapturedError):
            hooks.get("blocks.0.output")
        model(token_ids)


def test_fit_leaves_mode_and_gradients_alone(model: Transformer, token_ids: Tensor) -> None:
    model.train()
    with HookManager(model) as hooks, torch.inference_mode():
        steering = steer(hooks).fit(token_ids, token_ids[:1])
        assert torch.is_inference_mode_enabled()
    assert model.training
    assert not steering.vector.is_inference()
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_a_failing_fit_keeps_the_vector(model: Transformer, token_ids: Tensor, vector: Tensor) -> None:
    with leaves_no_trace(model), HookManager(model) as hooks:
        steering = steer(hooks, vector=vector)
        with pytest.raises(ValueError, match="token_ids"):
            steering.fit(token_ids, torch.full((1, 2), 99))
        assert steering.vector is vector


@pytest.mark.parametrize(
    ("positive", "message"),
    [
        ([], "fit needs positive inputs: token ids, keyword arguments or a sequence of them, not none"),
        ("text", "fit needs positive inputs: token ids, keyword arguments or a sequence of them, not 'text'"),
        (["text"], "fit takes tensors or mappings of keyword arguments as positive inputs, not a str"),
        (
            torch.ones(0, 3),
            "fit takes tensors or mappings of keyword arguments as positive inputs, not an empty tensor",
        ),
    ],
)
def test_fit_refuses_what_is_no_input(model: Transformer, token_ids: Tensor, positive: Any, message: str) -> None:
    with HookManager(model) as hooks:
        steering = steer(hooks)
        with pytest.raises(OptionError, match=f"^{message}$"):
            steering.fit(positive, token_ids)


def test_fit_refuses_another_word_for_over(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        steering = steer(hooks)
        with pytest.raises(OptionError, match="fit takes over='last' or over='mean', not 'first'"):
            steering.fit(token_ids, token_ids, over="first")


def test_fit_says_when_the_point_is_not_reached() -> None:
    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Identity(), nn.Identity()

        def forward(self, x: Tensor) -> Any:
            return self.used(x)

    with HookManager(Lazy()) as hooks:
        steering = steer(hooks, at="unused.output")
        with pytest.raises(
            NotCapturedError, match=r"no vector can be fitted at point 'unused.output': the inputs never"
        ):
            steering.fit(torch.ones(1, 2), torch.ones(1, 2))


def test_fit_refuses_a_width_that_depends_on_the_input() -> None:
    identity = nn.Identity()
    with HookManager(identity) as hooks:
        steering = steer(hooks, at="output")
        with pytest.raises(ReplacementError, match=r"at point 'output': its width differs between inputs \(\[2, 3\]\)"):
            steering.fit([torch.ones(1, 2), torch.ones(1, 3)], torch.ones(1, 2))


def test_fit_needs_an_open_scope(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        steering = steer(hooks)
    with pytest.raises(ScopeClosedError, match="intervention 'steering' can be fitted only while it is in use"):
        steering.fit(token_ids, token_ids)


# Vectors on disk.


def test_a_saved_vector_is_read_again(model: Transformer, token_ids: Tensor, tmp_path: Path) -> None:
    path = tmp_path / "vector.safetensors"
    with HookManager(model) as hooks:
        steering = steer(hooks).fit(token_ids[:1], token_ids[1:])
        steering.save(path)
        expected = model(token_ids)
    assert list(load_file(path)) == ["vector"]
    with HookManager(model) as hooks:
        hooks.use("steering", vector=str(path))
        assert torch.equal(model(token_ids), expected)


def test_saved_vectors_of_several_points_are_read_again(
    model: Transformer, token_ids: Tensor, vector: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "vectors.safetensors"
    with HookManager(model) as hooks:
        steering = steer(hooks, vector={"blocks.0.output": vector, "blocks.1.output": vector})
        steering.save(path)
        expected = model(token_ids)
    assert sorted(load_file(path)) == ["blocks.0.output", "blocks.1.output"]
    with HookManager(model) as hooks:
        hooks.use("steering", vector=path)
        assert torch.equal(model(token_ids), expected)


def test_a_file_with_vectors_of_many_points_serves_the_one_asked_for(
    model: Transformer, token_ids: Tensor, vector: Tensor, tmp_path: Path
) -> None:
    path = tmp_path / "vectors.safetensors"
    save_file({"blocks.0.output": vector, "blocks.1.output": 2 * vector}, path)
    with by_hand(model.blocks[0], lambda output: output + vector):
        expected = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use("steering", vector=path, at="blocks.0.output")
        assert torch.equal(model(token_ids), expected)


@pytest.mark.parametrize(
    ("key", "at", "layer"),
    [
        ("anything", None, 1),
        ("anything", "blocks.0.output", 0),
        ("blocks.0.output", None, 0),
        ("blocks.0.output", "blocks.1.output", 1),
    ],
)
def test_the_only_tensor_of_a_file_is_the_vector(
    model: Transformer, token_ids: Tensor, vector: Tensor, tmp_path: Path, key: str, at: str | None, layer: int
) -> None:
    path = tmp_path / "vector.safetensors"
    save_file({key: vector}, path)
    with by_hand(model.blocks[layer], lambda output: output + vector):
        expected = model(token_ids)
    with HookManager(model) as hooks:
        hooks.use("steering", vector=path, at=at)
        assert torch.equal(model(token_ids), expected)


def test_a_file_of_other_tensors_is_refused_with_what_it_holds(model: Transformer, tmp_path: Path) -> None:
    path = tmp_path / "adapter.safetensors"
    save_file({"a.weight": torch.ones(2), "b.weight": torch.ones(2)}, path)
    with (
        HookManager(model) as hooks,
        pytest.raises(OptionError, match=r"adapter.safetensors', which holds 'a.weight', 'b.weight'; expected one"),
    ):
        hooks.use("steering", vector=path)


def test_a_file_without_the_point_is_refused_with_what_it_holds(model: Transformer, tmp_path: Path) -> None:
    path = tmp_path / "vectors.safetensors"
    save_file({"blocks.0.output": torch.ones(2), "embed.output": torch.ones(2)}, path)
    with (
        HookManager(model) as hooks,
        pytest.raises(
            OptionError, match=r"no vector for point 'blocks.1.output' in '.*vectors.safetensors'; there are"
        ),
    ):
        hooks.use("steering", vector=path, at="blocks.1.output")


def test_a_file_for_another_model_is_named(model: Transformer, tmp_path: Path) -> None:
    path = tmp_path / "vectors.safetensors"
    save_file({"blocks.0.output": torch.ones(2), "blocks.9.output": torch.ones(2)}, path)
    with HookManager(model) as hooks, pytest.raises(UnknownPointError, match=r"'blocks.9.output'") as caught:
        hooks.use("steering", vector=path)
    assert any("vectors.safetensors" in note for note in caught.value.__notes__)


def test_a_pickle_is_never_opened(model: Transformer, tmp_path: Path) -> None:
    path = tmp_path / "vector.pt"
    path.write_bytes(pickle.dumps({"vector": [1.0]}))
    with (
        HookManager(model) as hooks,
        pytest.raises(OptionError, match=r"vector.pt': it is no safetensors file that can be read; write one with"),
    ):
        hooks.use("steering", vector=path)


def test_a_missing_file_is_named(model: Transformer, tmp_path: Path) -> None:
    with (
        HookManager(model) as hooks,
        pytest.raises(OptionError, match=r"cannot read its vector from '.*nowhere.safetensors': there is no such file"),
    ):
        hooks.use("steering", vector=tmp_path / "nowhere.safetensors")


def test_there_is_nothing_to_save_without_a_vector(model: Transformer, tmp_path: Path) -> None:
    with HookManager(model) as hooks:
        steering = steer(hooks)
        with pytest.raises(OptionError, match="intervention 'steering' has no vector to save; pass vector=, or call"):
            steering.save(tmp_path / "x.safetensors")


# What is refused.


def test_a_forward_pass_without_a_vector_says_what_to_do(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model), HookManager(model) as hooks:
        hooks.use("steering")
        with pytest.raises(OptionError, match=r"^intervention 'steering' has no vector; pass vector=, or call fit\("):
            model(token_ids)


def test_a_vector_of_another_width_is_refused(model: Transformer, token_ids: Tensor) -> None:
    message = (
        r"^intervention 'steering' has a vector of width 5 for point 'blocks.1.output', whose value has width 16 "
        r"\(shape \(2, 7, 16\)\); give a vector of shape \(16,\)"
    )
    with HookManager(model) as hooks:
        hooks.use("steering", vector=torch.ones(5))
        with pytest.raises(ReplacementError, match=message):
            model(token_ids)


@pytest.mark.parametrize(("shape", "told"), [((7, WIDTH), r"\(7, 16\)"), ((), r"\(\)")])
def test_a_vector_of_other_dimensions_is_refused_at_once(model: Transformer, shape: tuple[int, ...], told: str) -> None:
    with (
        HookManager(model) as hooks,
        pytest.raises(OptionError, match=rf"takes a vector \(D,\) at point 'blocks.1.output', not one of shape {told}"),
    ):
        hooks.use("steering", vector=torch.ones(shape))


def test_a_list_is_no_vector(model: Transformer) -> None:
    with HookManager(model) as hooks, pytest.raises(OptionError, match="option 'vector' of intervention 'steering'"):
        hooks.use("steering", vector=[1.0, 2.0])


def test_whole_numbers_are_not_steered(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.use("steering", at="embed.tokens.input", vector=torch.ones(7))
        with pytest.raises(
            ReplacementError, match=r"cannot steer point 'embed.tokens.input': its value is of torch.int"
        ):
            model(token_ids)


def test_without_an_architecture_the_point_has_to_be_given() -> None:
    with (
        HookManager(small_linear()) as hooks,
        pytest.raises(UnsupportedModelError, match=r"recognises 'Linear'; say where with at='<module path>.output'"),
    ):
        hooks.use("steering", vector=torch.ones(2))


def test_no_points_are_refused(model: Transformer, vector: Tensor) -> None:
    with (
        HookManager(model) as hooks,
        pytest.raises(OptionError, match=r"intervention 'steering' has nothing to steer with at=\[\]; name a point"),
    ):
        hooks.use("steering", vector=vector, at=[])
