"""Parameters are no points: the module in which one acts has them, and the parameters stay as they are."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from kamui.errors import PointError, PositionError, UnknownPointError
from kamui.hooks import HookManager, HookRegistry


@pytest.mark.parametrize("name", ["weight_ih_l0", "bias_hh_l0"])
def test_a_parameter_of_an_lstm_is_no_point(name: str) -> None:
    net = nn.Sequential(nn.LSTM(3, 4))
    with pytest.raises(PointError, match=rf"'0\.{name}' is no hook point"):
        HookRegistry.validate(net, f"0.{name}")
    with pytest.raises(UnknownPointError, match=r"'0' is a LSTM, which computes no attention, and parameters are no"):
        HookRegistry.validate(net, "0.weights")


def test_an_unembedding_is_edited_without_the_embedding_that_it_is_tied_to() -> None:
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=1, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=None
    )
    model = transformers.GPT2LMHeadModel(config).eval()
    ids, weight = torch.tensor([[1, 2]]), model.lm_head.weight
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values = weight.detach().clone()
    with pytest.raises(UnknownPointError, match=r"parameters are no points; what they do is seen at 'lm_head\.output'"):
        HookRegistry.validate(model, "lm_head.weights")
    with torch.no_grad(), HookManager(model) as hooks:
        hooks.attach("lm_head", replace_with=torch.zeros_like)
        hooks.attach("transformer.wte")
        assert (model(input_ids=ids).logits == 0).all()
        assert torch.equal(hooks.get("transformer.wte.output"), values[ids])
    assert model.lm_head.weight is model.transformer.wte.weight is weight
    assert torch.equal(weight, values)
    assert weight.requires_grad
    assert any(weight is one for one in optimizer.param_groups[0]["params"])


def test_the_weight_that_a_parametrization_computes_is_the_output_of_the_parametrization() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(weight_norm(nn.Linear(3, 2)))
    x, point = torch.randn(4, 3), "0.parametrizations.weight.output"
    bare, weight = net(x), net[0].weight
    state = {name: value.clone() for name, value in net.state_dict().items()}
    with HookManager(net) as hooks:
        hooks.use("cache", at=point, raw=True)
        hooks.use(torch.zeros_like, at=point)
        assert torch.equal(net(x), net[0].bias.expand(4, 2))
    assert torch.equal(hooks.get(point), weight)
    assert torch.equal(net(x), bare)
    assert all(torch.equal(state[name], value) for name, value in net.state_dict().items())


@pytest.fixture
def mixture() -> transformers.MixtralForCausalLM:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    return transformers.MixtralForCausalLM(config).eval()


def test_experts_that_are_one_module_have_no_point_each(mixture: transformers.MixtralForCausalLM) -> None:
    experts = "model.layers.0.mlp.experts"
    with pytest.raises(UnknownPointError, match=rf"'{experts}\.0\.output' is not in this model"):
        HookRegistry.validate(mixture, f"{experts}.0.output")
    with pytest.raises(PointError, match=rf"'{experts}\.gate_up_proj' is no hook point"):
        HookRegistry.validate(mixture, f"{experts}.gate_up_proj")


def test_what_all_experts_give_has_its_rows_joined_and_takes_no_positions(
    mixture: transformers.MixtralForCausalLM,
) -> None:
    ids, point = torch.tensor([[1, 2, 3], [4, 5, 6]]), "model.layers.0.mlp.experts.output"
    with torch.no_grad(), HookManager(mixture) as hooks:
        hooks.use("cache", at=point)
        hooks.attach("model.layers.0.mlp", "output")
        mixture(input_ids=ids)
        assert hooks.get(point).shape == (6, 16)
        assert torch.equal(hooks.get(point).view(2, 3, 16), hooks.get("model.layers.0.mlp.output"))
        hooks.use("cache", at=point, positions=1)
        with pytest.raises(PositionError, match=r"its value has shape \(6, 16\), the sequence has shape \(2, 3\)"):
            mixture(input_ids=ids)
