"""What KAMUI costs beside the same work done with torch hooks by hand, as ratios within one run.

    python benchmarks/overhead.py [--rounds N] [--json FILE]

The rivals take turns (A B A B ...), so that a machine which slows down slows both; medians are compared. The
results of the rivals are checked to be equal before anything is timed.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from timing import Comparison, in_turns, show
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from kamui.hooks import HookManager
from kamui.model import ModelConfig, Transformer

POINTS = [f"blocks.{layer}{part}" for layer in range(6) for part in (".attn", ".ffn", "")]


def observe_by_hand(model: Transformer, found: dict[str, Tensor]) -> list[RemovableHandle]:
    """Put a torch hook on each module that keeps a copy of its output."""

    def keeper(path: str) -> Callable[..., None]:
        def keep(module: object, args: object, output: Tensor) -> None:
            found[path] = output.detach().clone()

        return keep

    return [model.get_submodule(path).register_forward_hook(keeper(path)) for path in POINTS]


def capture_by_hand(model: Transformer, token_ids: Tensor) -> dict[str, Tensor]:
    """Capture the outputs with torch hooks, copies included."""
    found: dict[str, Tensor] = {}
    handles = observe_by_hand(model, found)
    model(token_ids)
    for handle in handles:
        handle.remove()
    return found


def capture(model: Transformer, token_ids: Tensor) -> dict[str, Tensor]:
    """Capture the outputs with KAMUI."""
    with HookManager(model) as hooks:
        for path in POINTS:
            hooks.attach(path)
        model(token_ids)
    return hooks.get_all()


def open_by_hand(model: Transformer) -> None:
    """Register and remove 18 hooks."""
    handles = [model.get_submodule(path).register_forward_hook(lambda *given: None) for path in POINTS]
    for handle in handles:
        handle.remove()


def open_scope(model: Transformer) -> None:
    """Open and close a scope with 18 points."""
    with HookManager(model) as hooks:
        for path in POINTS:
            hooks.attach(path)


def open_scope_at_once(model: Transformer) -> None:
    """Open and close a scope with 18 points in one use."""
    with HookManager(model) as hooks:
        hooks.use("cache", at=[f"{path}.output" for path in POINTS])


def forward(model: Transformer, token_ids: Tensor) -> Tensor:
    """Run the bare model."""
    logits: Tensor = model(token_ids)
    return logits


def observing(model: Transformer, token_ids: Tensor, rounds: int) -> tuple[float, float]:
    """Return the median seconds of a forward pass that is observed by hand, and by an open scope on a twin."""
    twin = copy.deepcopy(model)
    found: dict[str, Tensor] = {}
    handles = observe_by_hand(twin, found)
    with HookManager(model) as hooks:
        for path in POINTS:
            hooks.attach(path, keep="last")
        pair = in_turns(lambda: forward(twin, token_ids), lambda: forward(model, token_ids), rounds)
    for handle in handles:
        handle.remove()
    return pair


def import_seconds(rounds: int = 7) -> tuple[float, bool]:
    """Return the median seconds of `import kamui` in a new process, and whether torch came with it."""
    program = (
        "import sys, time; start = time.perf_counter(); import kamui; "
        "print(time.perf_counter() - start, 'torch' in sys.modules)"
    )
    told = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
        for _ in range(rounds)
    ]
    return statistics.median(float(seconds) for seconds, _ in told), any(torch_too == "True" for _, torch_too in told)


def check_equal(model: Transformer, token_ids: Tensor) -> None:
    """Check that both ways capture the same numbers."""
    ours, by_hand = capture(model, token_ids), capture_by_hand(model, token_ids)
    assert len(ours) == len(by_hand) == len(POINTS)
    for path in POINTS:
        assert torch.equal(ours[f"{path}.output"], by_hand[path]), path


def compare(rounds: int) -> list[Comparison]:
    """Time every row."""
    model = Transformer(ModelConfig.from_yaml("configs/small.yaml")).eval()
    token_ids = torch.randint(0, 8192, (1, 32), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        check_equal(model, token_ids)
        rows = []
        bare, by_hand = in_turns(lambda: forward(model, token_ids), lambda: capture_by_hand(model, token_ids), rounds)
        rows.append(Comparison("capture 18 outputs by hand, against the bare model", bare, by_hand, float("inf")))
        rows.append(Comparison("observe 18 outputs", *observing(model, token_ids, rounds), 1.15))
        pair = in_turns(lambda: capture_by_hand(model, token_ids), lambda: capture(model, token_ids), rounds)
        rows.append(Comparison("the same, each time with opening and closing", *pair, float("inf")))
        pair = in_turns(lambda: open_by_hand(model), lambda: open_scope(model), rounds * 5)
        rows.append(Comparison("open and close a scope with 18 points", *pair, 8.0))
        pair = in_turns(lambda: open_by_hand(model), lambda: open_scope_at_once(model), rounds * 5)
        rows.append(Comparison("the same in one use", *pair, 8.0))
    return rows


def main() -> None:
    """Print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = compare(options.rounds)
    seconds, with_torch = import_seconds()
    show(rows)
    print(f"import kamui: {seconds * 1e3:.0f} ms, with torch: {with_torch}  (aim: at most 60 ms, without)")
    if options.json:
        options.json.write_text(json.dumps([{**row._asdict(), "ratio": row.ratio} for row in rows], indent=2) + "\n")


if __name__ == "__main__":
    main()
