"""A third party's package of two files, installed by pip, is there under its name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import Environment

SCALE = '''
import kamui


class Scale(kamui.Intervention):
    """Multiply an activation by a factor."""

    at: str
    factor: float = 1.0

    @kamui.hookimpl
    def points(self):
        return self.at

    @kamui.hookimpl
    def activation(self, point, value):
        return value * self.factor
'''

PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "kamui-scale"
version = "1.2"
dependencies = ["kamui-core"]

[project.entry-points."kamui.interventions"]
scale = "kamui_scale:Scale"

[tool.hatch.build.targets.wheel]
only-include = ["kamui_scale.py"]
"""

USE = """
import torch
import kamui
from kamui.hooks import HookManager

model = torch.nn.Linear(2, 2)
x = torch.ones(1, 2)
before = model(x)
with HookManager(model):
    kamui.use("scale", at="output", factor=3.0)
    scaled = model(x)
assert torch.equal(scaled, before * 3.0)
assert torch.equal(model(x), before)
try:
    with HookManager(model):
        kamui.use("scale", at="output", facto=3.0)
except kamui.errors.OptionError as error:
    print(error)
"""


def test_a_package_of_two_files_works_by_its_name(environment: Environment, tmp_path: Path) -> None:
    package = tmp_path / "kamui-scale"
    package.mkdir()
    (package / "kamui_scale.py").write_text(SCALE)
    (package / "pyproject.toml").write_text(PROJECT)
    environment.install(package)

    told = environment.run("-W", "error", "-c", USE, cwd=tmp_path)
    assert "intervention 'scale' has no option 'facto'; did you mean 'factor'?" in told
    assert "kamui-scale" in environment.run("-m", "kamui", "plugins", cwd=tmp_path)
