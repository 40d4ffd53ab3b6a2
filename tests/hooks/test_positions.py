from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kamui.errors import PositionError
from kamui.hooks import Call, HookManager, HookPoint, Positions, take_positions, token_mask
from kamui.model import KVCache, Transformer

LEFT_PADDED = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]])
LEFT_MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
RIGHT_PADDED = torch.tensor([[5, 6, 7, 0, 0], [3, 4, 5, 6, 7]])
RIGHT_MASK = LEFT_MASK.flip(1)


@pytest.fixture(scope="module")
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    tokens = {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **tokens)).eval()


class Marks:
    """Writes down which tokens are chosen at a point, call by call."""

    def __init__(self, hooks: HookManager, at: str, positions: Positions) -> None:
        self.chosen: list[list[list[int]]] = []
        self.positions = positions
        hooks.use(self.mark, at=at)

    def mark(self, value: Tensor, point: HookPoint, call: Call) -> None:
        mask = token_mask(self.positions, point, value, call)
        assert mask is not None
        assert mask.dim() == value.dim()
        columns = mask.expand_as(value).flatten(1, -3) if value.dim() > 3 else mask.expand_as(value)
        flat = mask.view(mask.shape[0], -1)
        assert columns.any() == flat.any()
        self.chosen.append([row.nonzero()[:, 0].tolist() for row in flat])


def chosen(
    model: nn.Module, positions: Positions, *calls: dict[str, Any], at: str = "model.layers.0.output"
) -> list[list[list[int]]]:
    with torch.no_grad(), HookManager(model) as hooks:
        marks = Marks(hooks, at, positions)
        for call in calls:
            model(**call)
    return marks.chosen


LEFT = {"input_ids": LEFT_PADDED, "attention_mask": LEFT_MASK}
RIGHT = {"input_ids": RIGHT_PADDED, "attention_mask": RIGHT_MASK}


@pytest.mark.parametrize(
    ("positions", "left", "right"),
    [
        (0, [[2], [0]], [[0], [0]]),
        (-1, [[4], [4]], [[2], [4]]),
        (3, [[], [3]], [[], [3]]),
        ([0, -1], [[2, 4], [0, 4]], [[0, 2], [0, 4]]),
        (slice(1, None), [[3, 4], [1, 2, 3, 4]], [[1, 2], [1, 2, 3, 4]]),
        (slice(None, -1), [[2, 3], [0, 1, 2, 3]], [[0, 1], [0, 1, 2, 3]]),
        (slice(0, None, 2), [[2, 4], [0, 2, 4]], [[0, 2], [0, 2, 4]]),
        (torch.tensor([1, 4]), [[3], [4]], [[1], [4]]),
        (torch.tensor([-1, -5]), [[4], [0]], [[2], [0]]),
        ("prompt", [[2, 3, 4], [0, 1, 2, 3, 4]], [[0, 1, 2], [0, 1, 2, 3, 4]]),
        ("last", [[4], [4]], [[2], [4]]),
        ("generated", [[], []], [[], []]),
    ],
)
def test_positions_count_the_real_tokens_of_each_row(
    llama: LlamaForCausalLM, positions: Positions, left: list[list[int]], right: list[list[int]]
) -> None:
    assert chosen(llama, positions, LEFT) == [left]
    assert chosen(llama, positions, RIGHT) == [right]


def test_arguments_may_come_by_position(llama: LlamaForCausalLM) -> None:
    with torch.no_grad(), HookManager(llama) as hooks:
        marks = Marks(hooks, "model.layers.0.output", -1)
        llama(RIGHT_PADDED, RIGHT_MASK)
    assert marks.chosen == [[[2], [4]]]


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize("keyword", ["cache", "past_key_values"])
def test_cached_steps_know_where_they_are(llama: LlamaForCausalLM, keyword: str) -> None:
    def steps() -> list[dict[str, Any]]:
        cache = DynamicCache(config=llama.config)
        longer = torch.cat([LEFT_MASK, torch.ones(2, 1, dtype=torch.long)], 1)
        return [
            {**LEFT, keyword: cache},
            {"input_ids": torch.tensor([[8], [9]]), "attention_mask": longer, keyword: cache},
        ]

    assert chosen(llama, 3, *steps()) == [[[], [3]], [[0], []]]
    assert chosen(llama, -1, *steps()) == [[[4], [4]], [[], []]]
    assert chosen(llama, "last", *steps()) == [[[4], [4]], [[0], [0]]]
    assert chosen(llama, "generated", *steps()) == [[[], []], [[0], [0]]]
    assert chosen(llama, 3, *steps(), at="model.layers.0.self_attn.k") == [[[], [3]], [[5], [3]]]
    assert chosen(llama, 3, *steps(), at="model.layers.0.self_attn.weights") == [[[], [3]], [[0], []]]


@pytest.mark.parametrize("use_cache", [True, False])
@pytest.mark.parametrize("positions", [2, -1, "last", "generated", "prompt", slice(1, 5)])
def test_an_edit_at_positions_is_the_same_with_and_without_a_cache(
    model: Transformer, token_ids: Tensor, use_cache: bool, positions: Positions
) -> None:
    def add(value: Tensor, point: HookPoint, call: Call) -> Tensor:
        mask = token_mask(positions, point, value, call)
        assert mask is not None
        return torch.where(mask, value + 3, value)

    with HookManager(model) as hooks:
        hooks.use(add, at="blocks.0.output")
        generated = model.generate(token_ids, 4, use_cache=use_cache)
    # By hand, without a cache: the same edit on the whole sequence at every step.
    expected = token_ids
    for _ in range(4):
        index = torch.arange(expected.shape[1])
        where = (
            {
                "last": index >= 6,
                "generated": index >= 7,
                "prompt": index < 7,
            }.get(positions)
            if isinstance(positions, str)
            else None
        )
        if where is None:
            where = torch.zeros(expected.shape[1], dtype=torch.bool)
            where[6 if positions == -1 else positions] = True
        handle = model.blocks[0].register_forward_hook(
            lambda module, args, output, where=where: torch.where(where[:, None], output + 3, output)
        )
        expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
        handle.remove()
    assert torch.equal(generated, expected)


def test_generate_of_transformers_keeps_the_prompt_of_each_row(llama: LlamaForCausalLM) -> None:
    for use_cache in (True, False):
        with HookManager(llama) as hooks:
            last, first_new = Marks(hooks, "model.layers.1.output", -1), Marks(hooks, "model.layers.1.output", 3)
            options = {"max_new_tokens": 3, "do_sample": False, "use_cache": use_cache}
            llama.generate(LEFT_PADDED, attention_mask=LEFT_MASK, **options)
        if use_cache:
            assert last.chosen == [[[4], [4]], [[], []], [[], []]]
            assert first_new.chosen == [[[], [3]], [[0], []], [[], []]]
        else:
            assert last.chosen == [[[4], [4]]] * 3
            assert first_new.chosen == [[[], [3]], [[5], [3]], [[5], [3]]]
    assert "generate" not in vars(llama)


def test_the_chosen_part_is_taken_in_the_order_of_the_sequence(llama: LlamaForCausalLM) -> None:
    parts: list[Tensor | None] = []
    whole: list[Tensor] = []

    def take(value: Tensor, point: HookPoint, call: Call) -> None:
        whole.append(value)
        parts.extend(take_positions(positions, point, value, call) for positions in ([-1, 0], "generated", None))

    with torch.no_grad(), HookManager(llama) as hooks:
        hooks.use(take, at=["model.layers.0.output", "model.layers.0.self_attn.q"])
        llama(**LEFT)
    for value, (ends, generated, everything) in zip(whole, (parts[:3], parts[3:]), strict=True):
        assert ends is not None
        assert torch.equal(ends[0], value[0][..., [2, 4], :])
        assert torch.equal(ends[1], value[1][..., [0, 4], :])
        assert generated is None
        assert everything is value


def fails(model: nn.Module, positions: Any, *calls: dict[str, Any], at: str = "model.layers.0.output") -> str:
    with pytest.raises(PositionError) as caught:
        chosen(model, positions, *calls, at=at)
    return str(caught.value)


def test_what_cannot_be_known_is_an_error_and_never_a_guess(llama: LlamaForCausalLM) -> None:
    cache = DynamicCache(config=llama.config)
    with torch.no_grad():
        llama(input_ids=RIGHT_PADDED, cache=cache)
    step = {"input_ids": torch.tensor([[8], [9]]), "cache": cache}
    assert fails(llama, -1, step).startswith("where the prompt ends is not known: this pass continues a cache that was")
    assert fails(llama, "frist", RIGHT) == "there are no positions 'frist'; it is one of prompt, generated, last"
    assert fails(llama, 1.5, RIGHT).endswith("or one of prompt, generated, last, not 1.5")
    assert fails(llama, True, RIGHT).endswith("not True")
    assert fails(llama, slice(None, None, -1), RIGHT) == "a slice of positions goes forward; its step is -1"
    assert fails(llama, torch.tensor([1, 2, 3]), RIGHT) == "3 positions were given for 2 rows; give one for each row"


def test_rows_with_different_numbers_of_tokens_cannot_be_taken_together(llama: LlamaForCausalLM) -> None:
    def take(value: Tensor, point: HookPoint, call: Call) -> None:
        take_positions(3, point, value, call)

    message = r"the rows of point 'model\.layers\.0\.output' have different numbers of tokens at positions 3: \[0, 1\]"
    with torch.no_grad(), HookManager(llama) as hooks:
        hooks.use(take, at="model.layers.0.output")
        with pytest.raises(PositionError, match=message):
            llama(**LEFT)


def test_a_model_without_a_sequence_has_no_positions() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    message = fails(net, 0, {"input": torch.ones(2, 3)}, at="0.output")
    assert message.startswith("positions 0 cannot be found at point '0.output': the forward pass did not begin with ")


def test_a_value_of_another_shape_than_the_sequence_is_told_with_both(model: Transformer, token_ids: Tensor) -> None:
    class Flattens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Identity()

        def forward(self, token_ids: Tensor) -> Tensor:
            return self.inner(token_ids.flatten())

    message = fails(Flattens(), 0, {"token_ids": token_ids}, at="inner.output")
    assert message == (
        "positions 0 do not fit point 'inner.output': its value has shape (14,), the sequence has shape (2, 7)"
    )


def test_calls_know_their_positions_and_prompt_lengths(model: Transformer, token_ids: Tensor) -> None:
    seen: list[Any] = []

    def keep(value: Tensor, call: Call) -> None:
        assert call.positions is not None
        assert call.key_positions is not None
        assert call.prompt_lengths is not None
        seen.append((call.positions[0].tolist(), call.key_positions[0].tolist(), call.prompt_lengths.tolist()))

    cache = KVCache()
    with HookManager(model) as hooks:
        hooks.use(keep, at="blocks.1.output")
        model(token_ids[:, :3], cache)
        model(token_ids[:, 3:5], cache=cache)
    assert seen == [([0, 1, 2], [0, 1, 2], [3, 3]), ([3, 4], [0, 1, 2, 3, 4], [3, 3])]
