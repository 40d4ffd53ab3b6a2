from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

from kamui.errors import AmbiguousPointWarning, UnknownPointError, UnsupportedModelError
from kamui.hooks import HookManager, HookPoint, HookRegistry
from kamui.hooks.places import Locator, unwrap
from kamui.model import Transformer


@pytest.fixture
def bert() -> nn.Module:
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32}
    return BertModel(BertConfig(**sizes, num_hidden_layers=1, num_attention_heads=2)).eval()


def test_modules_that_are_called_output_have_points_of_their_own(bert: nn.Module) -> None:
    layer = "encoder.layer.0"
    with torch.no_grad(), HookManager(bert) as hooks:
        for module in (f"{layer}.attention", f"{layer}.attention.output", f"{layer}.output", layer):
            hooks.attach(module)
        bert(input_ids=torch.tensor([[1, 2, 3]]))
        assert torch.equal(hooks.get(f"{layer}.attention.output"), hooks.get(f"{layer}.attention.output.output"))
        assert torch.equal(hooks.get(f"{layer}.output"), hooks.get(f"{layer}.output.output"))
        assert hooks.get(f"{layer}.attention.output").shape == (1, 3, 16)
        places = [Locator(bert).place(HookPoint(f"{layer}.attention.{io}")) for io in ("output", "output.output")]
        assert places[0] != places[1]
    assert isinstance(bert.get_submodule(f"{layer}.output"), nn.Module)


def test_wrappers_are_no_part_of_a_name() -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    compiled = torch.compile(net, backend="eager")
    assert unwrap(compiled) is net
    assert unwrap(DataParallel(net)) is net
    for wrapped, prefix in ((compiled, "_orig_mod"), (DataParallel(net), "module")):
        with HookManager(wrapped) as hooks:
            assert hooks.model is wrapped
            hooks.use(lambda value: value + 1, at=["0.output", f"{prefix}.0.output"])
            assert [row.point for row in hooks.report().rows] == ["0.output"]
            x = torch.ones(1, 3)
            assert torch.equal(net[0](x), net[0].forward(x) + 1)
        assert "0.output" in HookRegistry.resolve(wrapped, "*.output")


def test_a_child_that_is_called_like_a_wrapper_is_a_child() -> None:
    net = nn.Sequential()
    net.add_module("module", nn.Sequential(nn.Linear(2, 2)))
    assert Locator(net).place(HookPoint("module.0.output")).module is net[0][0]


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (
            "blocks.1.atn.output",
            "point 'blocks.1.atn.output' is not in this model; nearest: 'blocks.1.attn.output', 'blocks.0.",
        ),
        ("blocks.9.output", "point 'blocks.9.output' is not in this model; nearest: 'blocks."),
        ("quite.elsewhere.output", "point 'quite.elsewhere.output' is not in this model; "),
        ("blocks.output", "point 'blocks.output' is never reached: 'blocks' is a ModuleList, which only holds"),
        ("blocks.7:.output", "pattern 'blocks.7:.output' matches no point of this model; its points begin 'embed"),
        ("final_ln.mid", "point 'final_ln.mid' is not in this model: 'final_ln' is no feed-forward module of a "),
        ("unembed.weights", "point 'unembed.weights' is not in this model: 'unembed' is a Linear, which computes "),
        ("blocks.0.attn.grad_output", "point 'blocks.0.attn.grad_output' is a gradient point, which this version can"),
    ],
)
def test_what_is_not_there_is_told_with_what_is(model: Transformer, point: str, message: str) -> None:
    with pytest.raises(UnknownPointError) as caught:
        HookRegistry.resolve(model, point)
    assert str(caught.value).startswith(message)
    assert isinstance(caught.value, KeyError)


def test_canonical_names_of_a_model_that_nothing_recognises_are_told_apart_from_typing_errors() -> None:
    net = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
    message = r"'blocks\.3\.output' is a canonical name, and no installed architecture recognises 'Sequential'; use it"
    with pytest.raises(UnsupportedModelError, match=message):
        HookRegistry.validate(net, "blocks.3.output")
    with pytest.raises(UnknownPointError):
        HookRegistry.validate(net, "2.output")
    with pytest.raises(UnsupportedModelError, match="no installed architecture recognises 'Sequential', so it has no"):
        HookRegistry.all_points(net)


def test_the_mid_of_a_feed_forward_is_where_its_last_map_begins(model: Transformer) -> None:
    place = Locator(model).place(HookPoint("blocks.0.ffn.mid"))
    assert place == Locator(model).place(HookPoint("blocks.0.ffn.down.input"))
    assert place.module is model.blocks[0].ffn.down


class Shadowed(nn.Module):
    """Has a module at a path that is a canonical name of another place."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.body = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embed(x))


@pytest.fixture
def recognised(monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    from kamui.hooks import Architecture, Target, naming

    points = {HookPoint("embed.output"): Target(HookPoint("body.output"))}

    def recognise(model: nn.Module) -> Architecture:
        return Architecture("shadowed", points, {"final_ln": "body"}, (), {}, lambda model, residual: residual)

    monkeypatch.setattr(naming, "architecture_of", recognise)
    return Shadowed()


def test_a_module_path_wins_over_a_canonical_name_and_says_so(recognised: nn.Module) -> None:
    message = r"'embed\.output' is a module path of this model and also the canonical name of 'body\.output'; the mod"
    with pytest.warns(AmbiguousPointWarning, match=message):
        place = Locator(recognised).place(HookPoint("embed.output"))
    assert place.module is recognised.embed
    assert Locator(recognised).module("final_ln") is recognised.body


def test_names_are_walked_again_when_the_model_has_changed(model: Transformer) -> None:
    assert len(HookRegistry.resolve(model, "blocks.*.output")) == 2
    model.blocks.append(copy.deepcopy(model.blocks[0]))
    assert HookRegistry.resolve(model, "blocks.*.output")[-1] == "blocks.2.output"
