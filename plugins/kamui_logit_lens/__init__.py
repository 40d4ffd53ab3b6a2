"""The logit lens: what the model would say if it stopped after each layer."""

from __future__ import annotations

from kamui_logit_lens.lens import LogitLens
from kamui_logit_lens.tokens import Top

__all__ = ["LogitLens", "Top"]
