"""The trained checkpoints that come along, and how one is written and read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from kamui.errors import ConfigError, did_you_mean
from kamui.model.config import ModelConfig
from kamui.model.transformer import Transformer

_FOLDER = Path(__file__).parent / "checkpoints"
_TIED = "unembed.weight"


def load_pretrained(name: str = "nano") -> Transformer:
    """Load a trained model that comes along, in eval mode.

    Args:
        name: Which one. `"nano"` has two layers and continues sequences that repeat: the heads of its second
            layer are induction heads.

    Raises:
        ConfigError: No checkpoint of that name comes along.
    """
    known = sorted(file.stem for file in _FOLDER.glob("*.safetensors"))
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"no checkpoint {name!r} comes along{hint} (there is {', '.join(map(repr, known))})")
    return load_checkpoint(_FOLDER / f"{name}.safetensors")


def load_checkpoint(path: str | Path) -> Transformer:
    """Build the model that `save_checkpoint` wrote, in eval mode."""
    with safe_open(path, framework="pt") as file:
        facts = json.loads(file.metadata()["kamui"])
    model = Transformer(ModelConfig(**facts["config"]))
    weights = load_file(path)
    model.load_state_dict({**weights, _TIED: weights["embed.tokens.weight"]})
    return model.eval()


def save_checkpoint(model: Transformer, path: str | Path, facts: Mapping[str, object]) -> None:
    """Write a model's weights (tied ones once), its config and facts about its training as safetensors."""
    weights = {name: weight for name, weight in model.state_dict().items() if name != _TIED}
    # One entry alone: safetensors writes several in an order that changes from run to run.
    metadata = {"kamui": json.dumps({"config": asdict(model.config), "training": dict(facts)})}
    save_file(weights, path, metadata)
