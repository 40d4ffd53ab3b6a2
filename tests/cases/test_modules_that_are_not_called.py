"""Modules that are there and are not called: by chance, because a weight of theirs is used elsewhere, or unseen."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from kamui.errors import NeverFiredWarning, NotCapturedError
from kamui.hooks import HookManager

SIZES = {"vocab_size": 32, "num_hidden_layers": 3, "hidden_size": 16, "ffn_dim": 32, "num_attention_heads": 2}


@pytest.fixture
def dropping() -> transformers.OPTModel:
    torch.manual_seed(0)
    config = transformers.OPTConfig(**SIZES, word_embed_proj_dim=16, max_position_embeddings=32, layerdrop=0.5)
    return transformers.OPTModel(config).train()


def test_a_layer_dropped_by_chance_never_hands_out_an_earlier_batch(dropping: transformers.OPTModel) -> None:
    ran: list[int] = []
    for index, layer in enumerate(dropping.decoder.layers):
        layer.register_forward_hook(lambda module, given, output, index=index: ran.append(index))
    dropped = 0
    with HookManager(dropping) as hooks:
        hooks.attach("decoder.layers.*")
        for batch_size in (1, 2, 3) * 5:
            ran.clear()
            dropping(input_ids=torch.full((batch_size, 4), 3))
            for index in range(3):
                point = f"decoder.layers.{index}.output"
                if index in ran:
                    assert hooks.get(point).shape == (batch_size, 4, 16)
                    continue
                dropped += 1
                with pytest.raises(NotCapturedError, match=f"'{point}'"):
                    hooks.get(point)
                assert point not in hooks.get_all()
    assert 0 < dropped < 45


def test_an_edit_of_a_dropped_layer_is_told_of(dropping: transformers.OPTModel) -> None:
    dropping.decoder.layerdrop = 1.0

    def run() -> None:
        with HookManager(dropping) as hooks:
            hooks.attach("decoder.layers.1", replace_with=torch.zeros_like)
            dropping(input_ids=torch.tensor([[3, 4]]))

    with pytest.warns(NeverFiredWarning, match=r"'decoder\.layers\.1\.output' \(patching\)"):
        run()


def test_an_embedding_that_lends_its_weight_is_not_where_the_tokens_go() -> None:
    config = transformers.T5Config(
        vocab_size=32, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    hooks = HookManager(model)

    def run() -> None:
        with hooks:
            for module in ("shared", "encoder.embed_tokens", "decoder.embed_tokens"):
                hooks.attach(module)
            model(input_ids=torch.tensor([[1, 2]]), decoder_input_ids=torch.tensor([[0]]))

    with pytest.warns(NeverFiredWarning, match=r"never fired: 'shared\.output' \(cache\)"):
        run()
    assert torch.equal(hooks.get("encoder.embed_tokens.output"), model.shared.weight[[1, 2]][None])
    assert torch.equal(hooks.get("decoder.embed_tokens.output"), model.shared.weight[[0]][None])
    with pytest.raises(NotCapturedError, match=r"'shared\.output' was never reached: 'shared' was not called"):
        hooks.get("shared.output")


class CallsForward(nn.Module):
    """Goes round the call of its child, and with it round every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner.forward(x)


def test_a_call_of_forward_itself_is_told_of() -> None:
    net = CallsForward()
    hooks = HookManager(net)

    def run() -> None:
        with hooks:
            hooks.attach("inner")
            hooks.attach("inner", replace_with=torch.zeros_like)
            net(torch.ones(1, 2))

    with pytest.warns(NeverFiredWarning, match=r"never fired: 'inner\.output' \(cache\), 'inner\.output' \(patching"):
        run()
    with pytest.raises(NotCapturedError, match=r"'inner\.output' was never reached"):
        hooks.get("inner.output")


def test_a_model_whose_forward_is_called_by_itself_has_no_forward_pass() -> None:
    net = nn.Linear(2, 2)
    with HookManager(net) as hooks:
        hooks.attach("")
        net.forward(torch.ones(1, 2))
        with pytest.raises(NotCapturedError, match="no forward pass has finished since the scope opened"):
            hooks.get("output")
