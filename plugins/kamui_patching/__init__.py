"""`patching`: replace activations, and find out which of them a behaviour depends on.

`Patching` is what `hooks.attach("blocks.3.attn", "output", replace_with=clean)` uses. `ActivationPatcher` puts the
activations of one input into the run of another, one place at a time, and tells how much of the first run's
behaviour each of them brings back.
"""

from kamui_patching.metrics import logit_difference
from kamui_patching.patching import Patching
from kamui_patching.result import Cell, SweepResult
from kamui_patching.sweep import ActivationPatcher

__all__ = ["ActivationPatcher", "Cell", "Patching", "SweepResult", "logit_difference"]
