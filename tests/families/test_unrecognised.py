"""Models that are no transformer, or none of transformers, work by module path."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from kamui import HookManager, HookRegistry
from kamui.errors import UnsupportedModelError
from kamui_transformers import recognise


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.stages = nn.Sequential(Residual(), Residual())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((-1, -2)))


def encoder() -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS = {
    "resnet": (ResNet, (2, 3, 8, 8), "stages.1"),
    "lstm": (lambda: nn.LSTM(6, 4, num_layers=2, batch_first=True), (2, 5, 6), ""),
    "mlp": (lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 2)), (3, 6), "1"),
    "encoder": (encoder, (2, 5, 8), "layers.1"),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_module_path_is_observed_and_replaced(name: str) -> None:
    torch.manual_seed(0)
    make, shape, path = MODELS[name]
    model, x = make().eval(), torch.randn(shape)
    seen: list[Tensor] = []
    module = model.get_submodule(path)
    handle = module.register_forward_hook(
        lambda module, args, out: seen.append((out if isinstance(out, Tensor) else out[0]).detach().clone())
    )
    with HookManager(model) as hooks:
        hooks.attach(path)
        model(x)
    handle.remove()
    assert torch.equal(hooks.get(f"{path}.output" if path else "output"), seen[0])
    with HookManager(model) as hooks:
        hooks.attach(path, replace_with=torch.zeros_like(seen[0]))
        output = model(x)
    main = output if isinstance(output, Tensor) else output[0]
    plain = model(x)
    assert not torch.allclose(main, plain if isinstance(plain, Tensor) else plain[0])


@pytest.mark.parametrize("name", MODELS)
def test_nothing_recognises_it(name: str) -> None:
    model = MODELS[name][0]()
    assert recognise(model) is None
    assert HookManager(model).architecture is None


def test_a_canonical_name_is_refused_with_the_module_paths_that_there_are() -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        HookRegistry.validate(ResNet(), "blocks.0.output")
    assert str(caught.value) == (
        "'blocks.0.output' is a canonical name, and no installed architecture recognises 'ResNet'; use its module "
        "paths: 'stem', 'stages', 'stages.0', 'stages.0.conv', 'stages.0.norm', 'stages.1', 'stages.1.conv', "
        "'stages.1.norm', ..."
    )


def test_looking_at_another_model_does_not_import_transformers() -> None:
    code = (
        "import sys, torch, kamui; kamui.HookManager(torch.nn.Linear(2, 2)).architecture; "
        "assert 'kamui_transformers' in sys.modules; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ)
