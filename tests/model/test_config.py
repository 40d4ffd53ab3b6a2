from __future__ import annotations

import subprocess
import sys
from dataclasses import FrozenInstanceError, asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamui import bundled_configs
from kamui.errors import ConfigError
from kamui.model import ModelConfig
from kamui.strict_yaml import load

SIZES: dict[str, Any] = {
    "n_layers": 2,
    "d_model": 12,
    "n_heads": 3,
    "d_ff": 16,
    "vocab_size": 11,
    "context_length": 8,
}
YAML = "model:\n" + "".join(f"  {key}: {value}\n" for key, value in SIZES.items())


def write(folder: Path, text: str) -> Path:
    file = folder / "model.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def message_of(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_yaml(file)
    return str(caught.value).replace(str(file), "FILE")


def test_defaults_and_head_width() -> None:
    config = ModelConfig(**SIZES)
    assert (config.d_head, config.positional_encoding, config.dropout) == (4, "learned", 0.0)


def test_a_config_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        ModelConfig(**SIZES).n_layers = 3  # type: ignore[misc]


def test_it_reads_the_model_section_and_leaves_the_others(tmp_path: Path) -> None:
    file = write(tmp_path, "seed: 1\n" + YAML + "  positional_encoding: sinusoidal\n  dropout: 1e-1\n")
    assert ModelConfig.from_yaml(file) == ModelConfig(**SIZES, positional_encoding="sinusoidal", dropout=0.1)


@given(
    st.builds(
        lambda heads, width, encoding, dropout, size: ModelConfig(
            size, 2 * heads * width, heads, size, size, size, encoding, dropout
        ),
        st.integers(1, 64),
        st.integers(1, 64),
        st.sampled_from(["learned", "sinusoidal"]),
        st.floats(0, 1, exclude_max=True),
        st.integers(1, 10**6),
    )
)
def test_what_is_written_reads_back_equal(config: ModelConfig) -> None:
    assert ModelConfig(**load(config.to_yaml(), "x.yaml")["model"]) == config


def test_it_writes_the_file_that_it_returns(tmp_path: Path) -> None:
    config = ModelConfig(**SIZES, dropout=1e-5)
    text = config.to_yaml(tmp_path / "x.yaml")
    assert (tmp_path / "x.yaml").read_text(encoding="utf-8") == text
    assert ModelConfig.from_yaml(tmp_path / "x.yaml") == config


def test_an_unknown_key_is_named_with_its_line_and_the_nearest(tmp_path: Path) -> None:
    assert message_of(write(tmp_path, YAML + "  drop_out: 0.1\n")) == (
        "FILE:8: 'model' has no key 'drop_out'; did you mean 'dropout'? "
        "(it takes n_layers, d_model, n_heads, d_ff, vocab_size, context_length, "
        "positional_encoding, dropout)"
    )


def test_missing_keys_are_named(tmp_path: Path) -> None:
    text = YAML.replace("  d_ff: 16\n", "").replace("  n_layers: 2\n", "")
    assert message_of(write(tmp_path, text)) == (
        "FILE:2: 'model' lacks 'n_layers', 'd_ff' "
        "(it needs n_layers, d_model, n_heads, d_ff, vocab_size, context_length)"
    )


@pytest.mark.parametrize("value", ["0", "-1", "true", "2.0", "'2'", "~", "[2]", "1_000"])
@pytest.mark.parametrize("key", SIZES)
def test_sizes_are_positive_integers(tmp_path: Path, key: str, value: str) -> None:
    lines = [f"  {key}: {value}" if line.startswith(f"  {key}:") else line for line in YAML.splitlines()]
    message = message_of(write(tmp_path, "\n".join(lines)))
    assert message.startswith(f"FILE:{2 + list(SIZES).index(key)}: {key!r} is ")
    assert message.endswith("; expected an integer of at least 1")


@pytest.mark.parametrize("value", ["1", "-0.1", "1.0", "true", "'0.1'", ".nan", ".inf"])
def test_dropout_is_a_share(tmp_path: Path, value: str) -> None:
    message = message_of(write(tmp_path, f"{YAML}  dropout: {value}\n"))
    assert message.startswith("FILE:8: 'dropout' is ")
    assert message.endswith("; expected a number from 0 up to but not including 1")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"d_model": 13}, "'d_model' is 13; expected a multiple of 'n_heads', which is 3"),
        ({"n_heads": True}, "'n_heads' is True; expected an integer of at least 1"),
        ({"vocab_size": 0}, "'vocab_size' is 0; expected an integer of at least 1"),
        (
            {"positional_encoding": "rotary"},
            "'positional_encoding' is 'rotary'; expected one of ('learned', 'sinusoidal')",
        ),
        (
            {"positional_encoding": ["learned"]},
            "'positional_encoding' is ['learned']; expected one of ('learned', 'sinusoidal')",
        ),
        (
            {"positional_encoding": "sinusoidal", "d_model": 15},
            "'d_model' is 15; sinusoidal positions need an even one",
        ),
        ({"dropout": 1.0}, "'dropout' is 1.0; expected a number from 0 up to but not including 1"),
    ],
)
def test_python_and_yaml_are_checked_alike(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    values = {**SIZES, **changes}
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**values)
    assert str(caught.value) == f"model config: {message}"
    text = "model:\n" + "".join(f"  {key}: {value}\n" for key, value in values.items())
    line = 2 + list(values).index(next(key for key in values if message.startswith(repr(key))))
    assert message_of(write(tmp_path, text)) == f"FILE:{line}: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "FILE:1: no section 'model'; found None"),
        ("[1]", "FILE:1: no section 'model'; found [1]"),
        ("modle:\n  n_layers: 1\nseed: 2\n", "FILE:1: no section 'model'; found 'modle', 'seed'"),
        ("seed: 1\nmodel: 3\n", "FILE:2: 'model' is 3; expected a mapping of sizes"),
        ("model:\n", "FILE:1: 'model' is None; expected a mapping of sizes"),
    ],
)
def test_a_file_without_a_usable_section_is_refused(tmp_path: Path, text: str, message: str) -> None:
    assert message_of(write(tmp_path, text)) == message


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("nano", (2, 128, 4, 256, 256, 128)),
        ("small", (6, 256, 8, 1024, 8192, 256)),
        ("medium", (12, 512, 8, 2048, 16384, 512)),
        ("gpt2", (12, 768, 12, 3072, 50257, 1024)),
    ],
)
def test_the_configs_that_come_along_are_found_from_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, sizes: tuple[int, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    config = ModelConfig.from_yaml(f"configs/{name}.yaml")
    assert tuple(asdict(config).values()) == (*sizes, "learned", 0.0)


def test_a_file_that_exists_wins_over_one_that_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "small.yaml").write_text(YAML, encoding="utf-8")
    assert ModelConfig.from_yaml("configs/small.yaml") == ModelConfig(**SIZES)


def test_a_file_that_is_nowhere_is_named_with_what_comes_along() -> None:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_yaml("configs/smal.yaml")
    message = str(caught.value)
    assert message.startswith("no file 'configs/smal.yaml'; did you mean 'configs/small.yaml'? (these come along: ")
    assert "configs/gpt2.yaml, configs/medium.yaml, configs/nano.yaml" in message


@pytest.mark.parametrize("path", ["/configs/small.yaml", "small.yaml", "configs", "configs/../small.yaml"])
def test_only_the_written_name_finds_what_comes_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no file"):
        bundled_configs.find(path)


def test_a_config_can_be_had_without_torch() -> None:
    code = "import sys; from kamui.model import ModelConfig; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_public_name_that_does_not_exist_says_so() -> None:
    import kamui.model

    with pytest.raises(AttributeError, match=r"module 'kamui.model' has no attribute 'Transfomer'"):
        kamui.model.Transfomer  # type: ignore[attr-defined]  # noqa: B018
    assert set(kamui.model.__all__) <= set(dir(kamui.model))
    assert kamui.model.__all__ == sorted(kamui.model.__all__)
