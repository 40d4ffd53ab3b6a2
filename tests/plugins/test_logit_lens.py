"""The logit lens, against the same reading made with torch hooks by hand."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from kamui.errors import (
    CallIndexError,
    NeverFiredWarning,
    NotCapturedError,
    OptionError,
    PositionError,
    UnknownPointError,
    UnsupportedModelError,
)
from kamui.hooks import HookManager, Positions
from kamui.model import ModelConfig, Transformer
from kamui.testing import leaves_no_trace
from kamui_logit_lens import LogitLens


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=32, vocab_size=16, context_length=32)
    model = Transformer(config).eval()
    for parameter in model.parameters():  # so that tokens differ in more than the fourth digit
        parameter.data = torch.randn_like(parameter) * 0.4
    return model


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(0, 16, (2, 7), generator=torch.Generator().manual_seed(1))  # (B, S)


def use_lens(hooks: HookManager, **options: Any) -> LogitLens:
    lens = hooks.use("logit_lens", **options)
    assert isinstance(lens, LogitLens)
    return lens


def lens_of(model: nn.Module, *inputs: Tensor, **options: Any) -> LogitLens:
    with HookManager(model) as hooks:
        lens = use_lens(hooks, **options)
        for token_ids in inputs:
            model(token_ids)
    return lens


def by_hand(model: Transformer, run: Callable[[], Any]) -> Tensor:
    """Return the logits of every layer in the last pass of `run`, (L, B, S, V)."""
    seen: dict[int, Tensor] = {}
    handles = [
        block.register_forward_hook(lambda module, args, output, layer=layer: seen.__setitem__(layer, output))
        for layer, block in enumerate(model.blocks)
    ]
    run()
    for handle in handles:
        handle.remove()
    with torch.no_grad():
        return torch.stack([model.unembed(model.final_ln(seen[layer])) for layer in sorted(seen)])


def test_each_layer_is_read_as_by_hand_and_the_last_is_the_models_own(model: Transformer, token_ids: Tensor) -> None:
    expected = by_hand(model, lambda: model(token_ids))
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        lens = use_lens(hooks)
        output = run(token_ids)
        logits = lens.logits()
        assert torch.equal(logits, expected)
        assert torch.equal(logits[-1], output)
        assert hooks.report().finished == 1
    assert torch.equal(lens.logits(), expected)
    assert lens.layers == ("blocks.0.output", "blocks.1.output")
    assert not logits.requires_grad


@pytest.mark.parametrize("layer", [0, -2, "blocks.0.output"])
def test_one_layer_is_read_by_index_or_by_point(model: Transformer, token_ids: Tensor, layer: int | str) -> None:
    assert torch.equal(lens_of(model, token_ids).logits(layer), by_hand(model, lambda: model(token_ids))[0])


def test_top_tells_the_likeliest_tokens_with_their_probabilities(model: Transformer, token_ids: Tensor) -> None:
    chances = by_hand(model, lambda: model(token_ids)).softmax(-1)
    top = lens_of(model, token_ids).top(3)
    assert torch.equal(top.token_ids, chances.argsort(-1, descending=True)[..., :3])
    torch.testing.assert_close(top.probabilities, chances.sort(-1, descending=True).values[..., :3])
    assert lens_of(model, token_ids).top().token_ids.shape == (2, 2, 7, 5)


@pytest.mark.parametrize("shape", [(), (7,), (2, 7), (1, 7)])
def test_probability_and_rank_of_given_tokens(model: Transformer, token_ids: Tensor, shape: tuple[int, ...]) -> None:
    wanted = torch.randint(0, 16, shape)
    logits = by_hand(model, lambda: model(token_ids))
    order = logits.argsort(-1, descending=True)
    lens = lens_of(model, token_ids)
    chances, ranks = lens.probability(wanted), lens.rank(wanted)
    assert chances.shape == ranks.shape == (2, 2, 7)
    for layer, row, column in torch.cartesian_prod(torch.arange(2), torch.arange(2), torch.arange(7)).tolist():
        token = int(wanted.expand(2, 7)[row, column])
        assert ranks[layer, row, column] == order[layer, row, column].tolist().index(token)
        torch.testing.assert_close(chances[layer, row, column], logits[layer, row, column].softmax(-1)[token])


def test_a_token_is_given_as_an_int_too(model: Transformer, token_ids: Tensor) -> None:
    lens = lens_of(model, token_ids)
    assert torch.equal(lens.rank(3), lens.rank(torch.full((2, 7), 3)))
    assert torch.equal(lens.probability(3), lens.probability(torch.full((7,), 3)))


def test_the_top_token_has_rank_zero(model: Transformer, token_ids: Tensor) -> None:
    lens = lens_of(model, token_ids)
    assert not lens.rank(lens.top(1).token_ids[-1, ..., 0])[-1].any()


def test_equally_likely_tokens_share_the_better_rank(model: Transformer, token_ids: Tensor) -> None:
    model.unembed.weight.data[:] = 1.0
    assert not lens_of(model, token_ids).rank(9).any()


def test_half_precision_is_read_out_with_probabilities_in_single(model: Transformer, token_ids: Tensor) -> None:
    model.bfloat16()
    lens = lens_of(model, token_ids)
    assert torch.equal(lens.logits(-1), model(token_ids))
    assert lens.probability(1).dtype is torch.float32


@pytest.mark.parametrize(
    ("positions", "columns"), [(2, [2]), (-1, [6]), ([0, 3], [0, 3]), (slice(4, None), [4, 5, 6]), ("last", [6])]
)
def test_only_the_positions_asked_for_are_kept(
    model: Transformer, token_ids: Tensor, positions: Positions, columns: list[int]
) -> None:
    expected = by_hand(model, lambda: model(token_ids))[:, :, columns]
    lens = lens_of(model, token_ids, positions=positions)
    torch.testing.assert_close(lens.logits(), expected)
    assert lens._residuals.bytes() == 2 * 2 * len(columns) * 16 * 4


def test_each_row_may_have_its_own_position(model: Transformer, token_ids: Tensor) -> None:
    expected = by_hand(model, lambda: model(token_ids))[:, [0, 1], [1, 6]]
    torch.testing.assert_close(lens_of(model, token_ids, positions=torch.tensor([1, -1])).logits()[:, :, 0], expected)


def test_other_points_can_be_read(model: Transformer, token_ids: Tensor) -> None:
    lens = lens_of(model, token_ids, at=["embed.output", "blocks.-1.output"])
    with torch.no_grad():
        assert torch.equal(lens.logits(0), model.unembed(model.final_ln(model.embed(token_ids))))
    assert torch.equal(lens.logits(1), model(token_ids))
    assert lens.layers == ("embed.output", "blocks.1.output")


def test_it_sees_what_the_model_goes_on_with(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        lens = use_lens(hooks)
        hooks.use(lambda value: value * 3, at="blocks.*.output")
        output = run(token_ids)
    handles = [block.register_forward_hook(lambda module, args, output: output * 3) for block in model.blocks]
    expected = by_hand(model, lambda: model(token_ids))
    for handle in handles:
        handle.remove()
    assert torch.equal(lens.logits(), expected)
    assert torch.equal(lens.logits(-1), output)


def test_reading_is_not_touched_by_interventions_on_the_head(model: Transformer, token_ids: Tensor) -> None:
    expected = by_hand(model, lambda: model(token_ids))
    with HookManager(model) as hooks:
        lens = use_lens(hooks)
        hooks.use(lambda value: value * 0, at="final_ln.output")
        hooks.attach("unembed")
        model(token_ids)
        assert torch.equal(lens.logits(), expected)
        assert not hooks.get("unembed.output").any()
        assert hooks.report().finished == 1


def test_captures_are_copies(model: Transformer, token_ids: Tensor) -> None:
    expected = by_hand(model, lambda: model(token_ids))
    with HookManager(model) as hooks:
        lens = use_lens(hooks)
        handle = model.blocks[1].register_forward_pre_hook(lambda module, args: (args[0].mul_(2),))
        with torch.no_grad():
            model(token_ids)
        handle.remove()
    assert torch.equal(lens.logits(0), expected[0])


def test_what_was_seen_in_inference_mode_is_usable_outside(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks, torch.inference_mode():
        lens = use_lens(hooks)
        model(token_ids)
    assert not lens.logits().is_inference()
    assert torch.equal(lens.logits(-1), model(token_ids))


# Forward passes.


def test_the_last_finished_pass_is_read_unless_another_is_asked_for(model: Transformer, token_ids: Tensor) -> None:
    others = (token_ids + 1) % 16
    lens = lens_of(model, token_ids, others)
    first, second = (model(ids) for ids in (token_ids, others))
    assert torch.equal(lens.logits(-1), second)
    assert torch.equal(lens.logits(-1, forward=1), second)
    assert torch.equal(lens.logits(-1, forward=0), first)
    assert torch.equal(lens.logits(-1, forward=-2), first)
    assert torch.equal(lens.logits(-1, forward="all"), torch.cat([first, second], dim=1))
    assert torch.equal(lens.top(1, forward=0).token_ids[-1, ..., 0], first.argmax(-1))


def test_generation_is_read_as_one_sequence(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        lens = use_lens(hooks)
        told = run.apply(lambda model: model.generate(token_ids, 5))
    expected = by_hand(model, lambda: model(told[:, :-1]))
    torch.testing.assert_close(lens.logits(forward="all"), expected)
    torch.testing.assert_close(lens.logits(), expected[:, :, -1:])


def test_a_failed_pass_is_never_seen(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        lens = use_lens(hooks)
        model(token_ids)
        expected = lens.logits()
        handle = model.unembed.register_forward_hook(lambda module, args, output: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model((token_ids + 1) % 16)
        handle.remove()
        assert torch.equal(lens.logits(), expected)


def test_only_the_latest_pass_may_be_kept(model: Transformer, token_ids: Tensor) -> None:
    lens = lens_of(model, token_ids, token_ids, keep="last")
    assert torch.equal(lens.logits(-1), model(token_ids))
    with pytest.raises(NotCapturedError, match=r"forward pass 0 of 'blocks.0.output' is not kept"):
        lens.logits(forward=0)


def test_a_lens_used_again_starts_empty(model: Transformer, token_ids: Tensor) -> None:
    lens = lens_of(model, token_ids)
    with HookManager(model) as hooks:
        hooks.use(lens)
        with pytest.raises(NotCapturedError):
            lens.logits()
        model(token_ids)


# Tables.


def printed(thing: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(thing)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert isinstance(text, str)
    return text


def test_the_table_has_the_top_token_of_each_layer_and_position(model: Transformer, token_ids: Tensor) -> None:
    lens = lens_of(model, token_ids)
    top = lens.top(1)
    lines = [line.split("│")[1:-1] for line in printed(lens).splitlines() if "blocks." in line]
    assert [line[0].strip() for line in lines] == ["blocks.1.output", "blocks.0.output"]
    for line, layer in zip(lines, (1, 0), strict=True):
        cells = zip(top.token_ids[layer, 0, :, 0].tolist(), top.probabilities[layer, 0, :, 0].tolist(), strict=True)
        assert [cell.strip() for cell in line[1:]] == [f"{token} {chance:.0%}" for token, chance in cells]


def test_the_table_shows_text_and_the_last_positions(model: Transformer, token_ids: Tensor) -> None:
    lens = lens_of(model, token_ids, decode="[/b]abcdefghijklmnop".__getitem__)
    text = printed(lens.table(row=1, k=2, last=3))
    assert "the last 3 of 7 positions" in text
    for layer in range(2):
        for token in lens.top(2).token_ids[layer, 1, 4:].flatten().tolist():
            assert repr("[/b]abcdefghijklmnop"[token]) in text


def test_the_table_refuses_a_row_that_there_is_not(model: Transformer, token_ids: Tensor) -> None:
    with pytest.raises(PositionError, match="there is no row 2 in this forward pass; it has 2, numbered from 0"):
        lens_of(model, token_ids).table(row=2)


# What is refused.


def test_before_any_forward_pass_there_is_nothing_to_read(model: Transformer) -> None:
    message = (
        "^intervention 'logit_lens' has not seen a forward pass that finished; call the model inside the scope, after "
        "the lens is in use$"
    )
    lens = lens_of(model)
    for read in (lens.logits, lens.top, lens.table, lambda: lens.rank(0), lambda: lens.probability(0)):
        with pytest.raises(NotCapturedError, match=message):
            read()  # type: ignore[operator]
    with pytest.raises(NotCapturedError, match="intervention 'LogitLens' has not seen"):
        LogitLens().logits()


def test_a_model_that_nothing_recognises_is_refused() -> None:
    message = (
        r"^intervention 'logit_lens' reads layers through the model's own head, and no installed .* 'Linear'; inst"
    )
    with HookManager(nn.Linear(2, 2)) as hooks, pytest.raises(UnsupportedModelError, match=message):
        hooks.use("logit_lens", at="output")


def test_a_layer_that_is_not_read_is_refused(model: Transformer, token_ids: Tensor) -> None:
    message = r"there is no layer 2 in intervention 'logit_lens'; it reads 2: 'blocks.0.output', 'blocks.1.output'"
    lens = lens_of(model, token_ids)
    with pytest.raises(NotCapturedError, match=message):
        lens.logits(2)
    with pytest.raises(NotCapturedError, match=r"there is no layer 'embed.output'"):
        lens.logits("embed.output")


def test_a_pass_that_there_was_not_is_refused(model: Transformer, token_ids: Tensor) -> None:
    with pytest.raises(CallIndexError, match="there is no forward pass 1: 1 finished in this scope, numbered from 0"):
        lens_of(model, token_ids).logits(forward=1)


def test_a_pass_without_the_positions_is_refused(model: Transformer, token_ids: Tensor) -> None:
    message = r"layer 'blocks.0.output' was not seen in forward pass -1: its module was not called, or the positions"
    with pytest.warns(NeverFiredWarning, match="the positions asked for were in no call of these points"):
        lens = lens_of(model, token_ids, positions=20)
    with pytest.raises(NotCapturedError, match=message):
        lens.logits()


def test_a_layer_that_is_called_twice_is_refused(model: Transformer, token_ids: Tensor) -> None:
    model.blocks[1] = model.blocks[0]
    message = (
        r"layer 'blocks.0.output' was called 2 times in forward pass -1, and the lens reads layers that are called"
    )
    with pytest.raises(CallIndexError, match=message):
        lens_of(model, token_ids).logits()


@pytest.mark.parametrize("k", [0, 17])
def test_more_tokens_than_there_are_are_refused(model: Transformer, token_ids: Tensor, k: int) -> None:
    with pytest.raises(OptionError, match=f"top takes k from 1 to the 16 tokens of the vocabulary, not {k}"):
        lens_of(model, token_ids).top(k)


@pytest.mark.parametrize("token", [-1, 16])
def test_a_token_outside_the_vocabulary_is_refused(model: Transformer, token_ids: Tensor, token: int) -> None:
    with pytest.raises(OptionError, match=f"token ids go from 0 to 15 in this vocabulary, not {token}"):
        lens_of(model, token_ids).rank(token)


def test_tokens_that_do_not_fit_the_positions_are_refused(model: Transformer, token_ids: Tensor) -> None:
    with pytest.raises(
        PositionError, match=r"token ids of shape \(3,\) do not fit logits of \(2, 7\) \(rows, positions"
    ):
        lens_of(model, token_ids).probability(torch.zeros(3, dtype=torch.long))


def test_no_points_are_refused(model: Transformer) -> None:
    with pytest.raises(OptionError, match=r"intervention 'logit_lens' has nothing to read with at=\(\); name a point"):
        lens_of(model, at=())
    with pytest.raises(UnknownPointError, match=r"blocks\.9\.output"):
        lens_of(model, at="blocks.9.output")
