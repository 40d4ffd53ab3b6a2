"""Write `docs/families.md`: where the canonical points are on each family.

Run from the repository: `PYTHONPATH=tests python -m families.table`.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

from families.zoo import FAMILIES, make
from kamui import HookManager
from kamui.hooks import Architecture

PAGE = Path(__file__).parents[2] / "docs" / "families.md"
POINTS = ("attn.output", "ffn.mid", "ffn.output")
INTRODUCTION = """\
# Families of Hugging Face models

The canonical names are understood on models of `transformers` that have a list of blocks whose attention makes its
queries with a module of its own. They are recognised by their structure; no family is named in the code. The families
below are tested with tiny models that have the settings of the published checkpoints. Not recognised are XLNet, XLM,
FlauBERT, JetMoE, and models without attention such as Mamba; these work by module path. This page is made by
`tests/families/table.py`.

- `embed.output` is what enters the first block: the sum of all embeddings, after any norm or factor.
- `blocks.N.output` is the residual stream, before the final norm. `output_hidden_states` gives it too, but most
  families give the last one after the final norm.
- `blocks.N.attn` is the module that computes the dot product; `blocks.N.attn.output` and `blocks.N.ffn.output` are
  what is added to the residual stream, before a norm that follows.
- `blocks.N.ffn.mid` is what enters the last matrix. A mixture of experts has no such place.
- An encoder and decoder have `encoder.blocks.N`, `decoder.blocks.N` and `decoder.blocks.N.cross_attn`. Of other
  models with several stacks, the one that speaks has the plain names; the names of the others begin with the module
  that holds them, as `vision_tower.blocks.N` does.
- In OPT, `ffn.mid` and `ffn.output` are of shape (B * S, F) and (B * S, D), because the model joins rows there.
- ALBERT calls one block many times: `blocks.N` is its call N.

The readout (what `logit_lens` uses) is the final norm and the unembedding where these give the model's own logits,
and else the model itself, run on one token whose last block hands on the residual stream.

`*` stands for the path of the block.
"""


def page() -> str:
    """Return the page."""
    head = "| family | model | block | attention | " + " | ".join(f"`{point}`" for point in POINTS) + " | `final_ln` |"
    lines = [INTRODUCTION, head, "|---" * head.count(" | ") + "|---|"]
    for name in FAMILIES:
        lines.extend(_rows(name))
    return "\n".join(lines) + "\n"


def _rows(name: str) -> list[str]:
    model, _ = make(name)
    architecture = HookManager(model).architecture
    assert architecture is not None
    found = [re.fullmatch(r"(.*)blocks\.1", path) for path in architecture.modules]
    prefixes = Counter(match[1] for match in found if match)
    return [_row(name, type(model).__name__, prefix, architecture) for prefix in prefixes]


def _row(name: str, model: str, prefix: str, architecture: Architecture) -> str:
    block = architecture.modules[f"{prefix}blocks.1"]
    cells = [architecture.modules[f"{prefix}blocks.1.attn"]]
    for point in POINTS:
        target = architecture.points.get(f"{prefix}blocks.1.{point}")
        cells.append(target.point if target else "")
    short = [f"`{cell.replace(block, '*', 1)}`" if cell else "none" for cell in cells]
    norm = architecture.modules.get(f"{prefix}final_ln")
    shown = re.sub(r"\.1\b", ".N", block, count=1)
    stack = f"{name} ({prefix.rstrip('.')})" if prefix else name
    return f"| {stack} | {model} | `{shown}` | {' | '.join(short)} | {f'`{norm}`' if norm else 'none'} |"


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page(), encoding="utf-8")
