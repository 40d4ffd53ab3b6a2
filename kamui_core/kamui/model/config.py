"""The sizes of a reference model, checked, from Python or from YAML."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self

import yaml

from kamui import bundled_configs, strict_yaml
from kamui.errors import ConfigError, did_you_mean

PositionalEncoding = Literal["learned", "sinusoidal"]

_SIZES = ("n_layers", "d_model", "n_heads", "d_ff", "vocab_size", "context_length")
_ENCODINGS = ("learned", "sinusoidal")


@dataclass(frozen=True)
class ModelConfig:
    """What a `Transformer` is built from.

    Attributes:
        n_layers: Number of blocks.
        d_model: Width of the residual stream, D; a multiple of `n_heads`.
        n_heads: Attention heads of each block, H.
        d_ff: Width of the feed-forward's hidden layer, F.
        vocab_size: Number of tokens, V.
        context_length: The most positions that a sequence may have.
        positional_encoding: `"learned"` or `"sinusoidal"`.
        dropout: The share of values dropped in training mode.

    Raises:
        ConfigError: A value is of the wrong type, out of range, or does not fit another.
    """

    n_layers: int
    d_model: int
    n_heads: int
    d_ff: int
    vocab_size: int
    context_length: int
    positional_encoding: PositionalEncoding = "learned"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for _, problem in _problems(vars(self)):
            raise ConfigError(f"model config: {problem}")

    @property
    def d_head(self) -> int:
        """Width of one attention head, Dh."""
        return self.d_model // self.n_heads

    @classmethod
    def from_yaml(cls, path: str | Path) -> Self:
        """Read the `model:` section of a YAML file.

        Args:
            path: The file. A relative path that does not exist is looked up among the configs that come
                along, such as `configs/small.yaml`.

        Raises:
            ConfigError: There is no such file or section, or what it says cannot be used.
        """
        section = _read_section(bundled_configs.find(path))
        known = [field.name for field in fields(cls)]
        for key in section:
            if key not in known:
                hint = did_you_mean(str(key), known)
                raise ConfigError(
                    f"{section.where(key)}: 'model' has no key {key!r}{hint} (it takes {', '.join(known)})"
                )
        missing = [name for name in _SIZES if name not in section]
        if missing:
            lacking = ", ".join(map(repr, missing))
            raise ConfigError(f"{section.where()}: 'model' lacks {lacking} (it needs {', '.join(_SIZES)})")
        for key, problem in _problems(section):
            raise ConfigError(f"{section.where(key)}: {problem}")
        return cls(**section)

    def to_yaml(self, path: str | Path | None = None) -> str:
        """Return the YAML that `from_yaml` reads back to an equal config, and write it to `path` if given."""
        text = yaml.safe_dump({"model": asdict(self)}, sort_keys=False)
        if path is not None:
            Path(path).write_text(text, encoding="utf-8")
        return text


def _read_section(file: Path) -> strict_yaml.Section:
    document = strict_yaml.load_file(file)
    if not isinstance(document, strict_yaml.Section) or "model" not in document:
        found = ", ".join(map(repr, document)) if isinstance(document, strict_yaml.Section) else repr(document)
        raise ConfigError(f"{file}:1: no section 'model'; found {found}")
    section = document["model"]
    if not isinstance(section, strict_yaml.Section):
        raise ConfigError(f"{document.where('model')}: 'model' is {section!r}; expected a mapping of sizes")
    return section


def _problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each key that cannot be used and why; later checks may rely on earlier ones having passed."""
    for key in _SIZES:
        value = values[key]
        if type(value) is not int or value < 1:
            yield key, f"{key!r} is {value!r}; expected an integer of at least 1"
    encoding = values.get("positional_encoding", "learned")
    if encoding not in _ENCODINGS:
        yield "positional_encoding", f"'positional_encoding' is {encoding!r}; expected one of {_ENCODINGS!r}"
    dropout = values.get("dropout", 0.0)
    if type(dropout) not in (int, float) or not 0 <= dropout < 1:
        yield "dropout", f"'dropout' is {dropout!r}; expected a number from 0 up to but not including 1"
    d_model, n_heads = values["d_model"], values["n_heads"]
    if d_model % n_heads:
        yield "d_model", f"'d_model' is {d_model!r}; expected a multiple of 'n_heads', which is {n_heads!r}"
    if encoding == "sinusoidal" and d_model % 2:
        yield "d_model", f"'d_model' is {d_model!r}; sinusoidal positions need an even one"
