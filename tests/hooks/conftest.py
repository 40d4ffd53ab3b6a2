"""The reference model, small, with weights large enough that every part of it matters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kamui.model import ModelConfig, Transformer

CONFIG = ModelConfig(n_layers=2, d_model=16, n_heads=2, d_ff=24, vocab_size=31, context_length=24)


@pytest.fixture
def model() -> Transformer:
    torch.manual_seed(0)
    model = Transformer(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    return model


@pytest.fixture
def token_ids() -> Tensor:
    return torch.randint(31, (2, 7), generator=torch.Generator().manual_seed(1))  # (B, S)
