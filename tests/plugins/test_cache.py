"""`cache`: what is kept of an activation, beside plain torch hooks that keep the same."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kamui.errors import CallIndexError, HeadError, NotCapturedError, OptionError
from kamui.hooks import HookManager
from kamui.model import ModelConfig, Transformer
from kamui.testing import leaves_no_trace
from kamui_cache import Cache


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    sizes = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=32, vocab_size=16, context_length=32)
    return Transformer(sizes).eval()


@pytest.fixture
def token_ids() -> Tensor:
    return torch.arange(12).view(2, 6)


@pytest.fixture
def overwriting() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(64, 2))


def seen_by_hooks(model: nn.Module, paths: list[str], token_ids: Tensor) -> dict[str, Tensor]:
    seen: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(path).register_forward_hook(
            lambda module, args, output, path=path: seen.__setitem__(path, output.detach().clone())
        )
        for path in paths
    ]
    model(token_ids)
    for handle in handles:
        handle.remove()
    return seen


def test_a_pattern_keeps_what_plain_hooks_see(model: Transformer, token_ids: Tensor) -> None:
    expected = seen_by_hooks(model, ["blocks.0", "blocks.1", "blocks.1.attn"], token_ids)
    with HookManager(model) as hooks:
        hooks.use("cache", at=["blocks.*.output", "blocks.-1.attn.output"])
        model(token_ids)
        got = hooks.get_all()
    assert got.keys() == {f"{path}.output" for path in expected}
    assert all(torch.equal(got[f"{path}.output"], value) for path, value in expected.items())


def test_it_leaves_no_trace(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        hooks.use("cache", at=["blocks.*.output", "blocks.*.attn.weights"], positions=-1)
        run(token_ids)
        run.apply(lambda one: one.generate(token_ids, 2))  # type: ignore[attr-defined]


def test_a_later_write_does_not_reach_the_capture(overwriting: nn.Sequential) -> None:
    image = torch.randn(1, 3, 6, 6)
    with torch.no_grad(), HookManager(overwriting) as hooks:
        hooks.attach("0")
        overwriting(image)
        captured = hooks.get("0.output")
        assert torch.equal(captured, overwriting[0](image))
    assert (captured < 0).any()


@pytest.mark.parametrize("detach", [True, False])
def test_a_live_value_that_was_written_to_is_not_handed_out(overwriting: nn.Sequential, *, detach: bool) -> None:
    with torch.no_grad(), HookManager(overwriting) as hooks:
        hooks.use("cache", at=["0.output", "2.output"], copy=False, detach=detach)
        overwriting(torch.randn(1, 3, 6, 6))
        with pytest.raises(NotCapturedError, match=r"'0\.output' is no longer what was captured.*copy=True"):
            hooks.get("0.output")
        with pytest.raises(NotCapturedError, match=r"'0\.output'"):
            hooks.get("0.output", forward="all")
        assert hooks.get("2.output").shape == (1, 64)


def test_a_live_value_shares_the_memory_of_the_model_s_own(model: Transformer, token_ids: Tensor) -> None:
    addresses = []
    model.blocks[0].register_forward_hook(lambda module, args, output: addresses.append(output.data_ptr()))
    with HookManager(model) as hooks:
        hooks.attach("blocks.0", copy=False)
        model(token_ids)
        assert hooks.get("blocks.0.output").data_ptr() == addresses[0]


def test_a_live_value_cannot_be_guarded_under_inference_mode(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.0", copy=False)
        with torch.inference_mode(), pytest.raises(NotCapturedError, match=r"'blocks\.0\.output' cannot be guarded"):
            model(token_ids)


@pytest.mark.parametrize("options", [{}, {"detach": False}, {"positions": 1}, {"dtype": torch.float64}])
def test_captures_made_under_inference_mode_are_normal_tensors(
    model: Transformer, token_ids: Tensor, options: dict[str, Any]
) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.0", **options)
        with torch.inference_mode():
            model(token_ids)
        captured = hooks.get("blocks.0.output")
    assert not captured.is_inference()
    assert not captured.requires_grad
    captured.add_(1)


def test_captures_do_not_keep_the_graph_alive() -> None:
    net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    x = torch.randn(4, 8)
    gone = weakref.ref(x)
    with HookManager(net) as hooks:
        hooks.attach("0")
        net(x)
        del x
        gc.collect()
        assert gone() is None
        assert hooks.get("0.output").grad_fn is None


def test_a_loss_on_a_kept_graph_reaches_the_model() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)
    net[0](x).square().sum().backward()
    expected = net[0].weight.grad.clone()
    net.zero_grad()
    with HookManager(net) as hooks:
        hooks.attach("0", detach=False)
        net(x)
        hooks.get("0.output").square().sum().backward()
    assert torch.equal(net[0].weight.grad, expected)


def test_a_live_value_with_its_graph_retains_the_gradient_of_what_follows() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.randn(2, 4)
    with HookManager(net) as hooks:
        hooks.attach("0", detach=False, copy=False)
        y = net(x)
        captured = hooks.get("0.output")
        captured.retain_grad()
        y.sum().backward()
    assert captured.grad is not None
    torch.testing.assert_close(captured.grad, 1 - y.detach() ** 2)


def test_every_call_of_a_shared_module_is_kept() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.act = nn.Linear(4, 4), nn.Linear(4, 4), nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.b(self.act(self.a(x))))  # type: ignore[no-any-return]

    net, x = Shared(), torch.randn(3, 4)
    with torch.no_grad(), HookManager(net) as hooks:
        hooks.attach("act")
        y = net(x)
        with pytest.raises(CallIndexError, match="called 2 times"):
            hooks.get("act.output")
        assert torch.equal(hooks.get("act.output", call=0), net.a(x).relu())
        assert torch.equal(hooks.get("act.output", call=1), y)
        assert hooks.get_all().keys() == {"act.output#0", "act.output#1"}


def test_generation_is_kept_step_by_step(model: Transformer) -> None:
    prompt = torch.tensor([[5, 6, 7, 8]])
    with HookManager(model) as hooks:
        hooks.attach("blocks.1")
        generated = model.generate(prompt, 3)
        steps = [hooks.get("blocks.1.output", forward=step) for step in range(3)]
        joined = hooks.get("blocks.1.output", forward="all")
        with pytest.raises(CallIndexError, match="no forward pass 5: 3 finished"):
            hooks.get("blocks.1.output", forward=5)
    assert [step.shape[1] for step in steps] == [4, 1, 1]
    whole = seen_by_hooks(model, ["blocks.1"], generated[:, :-1])["blocks.1"]
    torch.testing.assert_close(joined, whole)


def test_only_the_latest_pass_is_kept_on_request(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.1", keep="last")
        model(token_ids)
        model(token_ids[:, :2])
        assert hooks.get("blocks.1.output").shape == (2, 2, 16)
        with pytest.raises(NotCapturedError, match="keep='all'"):
            hooks.get("blocks.1.output", forward=0)


@pytest.mark.parametrize(
    ("positions", "columns"),
    [(2, [2]), (-1, [5]), ([4, 1], [1, 4]), (slice(1, 4), [1, 2, 3]), ("last", [5])],
)
def test_positions_choose_tokens(model: Transformer, token_ids: Tensor, positions: Any, columns: list[int]) -> None:
    expected = seen_by_hooks(model, ["blocks.0"], token_ids)["blocks.0"][:, columns]
    with HookManager(model) as hooks:
        hooks.attach("blocks.0", positions=positions)
        model(token_ids)
        captured = hooks.get("blocks.0.output")
    assert torch.equal(captured, expected)
    assert captured.untyped_storage().nbytes() == expected.numel() * 4


def test_a_position_that_is_in_no_decoding_step_is_kept_once(model: Transformer) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.0", positions=2)
        model.generate(torch.tensor([[5, 6, 7, 8]]), 3)
        assert hooks.get("blocks.0.output", forward="all").shape == (1, 1, 16)
        told = r"the positions asked for were not in that call \(they were missed in 2 of 3 calls"
        with pytest.raises(NotCapturedError, match=told):
            hooks.get("blocks.0.output")


@pytest.mark.parametrize("io", ["q", "k", "v", "pre_softmax", "weights", "z"])
@pytest.mark.parametrize(("heads", "chosen"), [(1, [1]), (-2, [0]), ([1, 0], [0, 1])])
def test_heads_choose_the_second_dimension(
    model: Transformer, token_ids: Tensor, io: str, heads: Any, chosen: list[int]
) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.0.attn", io)
        model(token_ids)
        everything = hooks.get(f"blocks.0.attn.{io}")
    with HookManager(model) as hooks:
        hooks.attach("blocks.0.attn", io, heads=heads)
        model(token_ids)
        captured = hooks.get(f"blocks.0.attn.{io}")
    assert torch.equal(captured, everything[:, chosen])
    assert captured.untyped_storage().nbytes() == captured.numel() * 4


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ("blocks.0.attn.v", r"point 'blocks\.0\.attn\.v' has 2 heads, numbered from 0; there is no head 3"),
        ("blocks.0.output", r"heads 3 cannot be chosen at point 'blocks\.0\.output', whose value has shape"),
    ],
)
def test_heads_that_are_not_there_are_refused(model: Transformer, token_ids: Tensor, at: str, message: str) -> None:
    with HookManager(model) as hooks:
        hooks.use("cache", at=at, heads=3)
        with pytest.raises(HeadError, match=message):
            model(token_ids)


def test_dtype_and_device_are_those_asked_for(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        hooks.attach("blocks.0", dtype=torch.float16, device="cpu")
        model(token_ids)
        captured = hooks.get("blocks.0.output")
    assert captured.dtype is torch.float16
    assert captured.device.type == "cpu"


def test_raw_is_what_the_module_gave_and_otherwise_what_the_model_went_on_with(
    model: Transformer, token_ids: Tensor
) -> None:
    given = seen_by_hooks(model, ["blocks.0"], token_ids)["blocks.0"]
    for raw, expected in ((True, given), (False, given * 2)):
        with HookManager(model) as hooks:
            hooks.use("cache", at="blocks.0.output", raw=raw)
            hooks.use(lambda value: value * 2, at="blocks.0.output")
            model(token_ids)
            assert torch.equal(hooks.get("blocks.0.output"), expected)


def test_one_tensor_of_a_nested_value_is_kept() -> None:
    lstm = nn.LSTM(4, 4, batch_first=True)
    x = torch.randn(2, 3, 4)
    with torch.no_grad(), HookManager(nn.Sequential(lstm)) as hooks:
        hooks.use("cache", at=["0.output", "0.output[1][0]"])
        expected, (hidden, _) = hooks.run(x)
        assert torch.equal(hooks.get("0.output"), expected)
        assert torch.equal(hooks.get("0.output[1][0]"), hidden)


def test_an_instance_starts_empty_in_every_scope(model: Transformer, token_ids: Tensor) -> None:
    cache = Cache(at="blocks.0.output")
    hooks = HookManager(model)
    for _ in range(2):
        with hooks:
            hooks.use(cache)
            with pytest.raises(NotCapturedError, match="no forward pass has finished"):
                hooks.get("blocks.0.output")
            model(token_ids)
        assert hooks.get("blocks.0.output").shape == (2, 6, 16)
        assert cache.captures.bytes() == 2 * 6 * 16 * 4


def test_options_are_checked(model: Transformer) -> None:
    with HookManager(model) as hooks:
        with pytest.raises(OptionError, match=r"option 'keep' of intervention 'cache' takes .*'last'.*, not str 'two'"):
            hooks.use("cache", at="blocks.0.output", keep="two")
        with pytest.raises(RuntimeError, match="nowhere"):
            hooks.use("cache", at="blocks.0.output", device="nowhere")
