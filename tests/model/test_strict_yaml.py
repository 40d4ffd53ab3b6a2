from __future__ import annotations

import math
from pathlib import Path

import pytest

from kamui.errors import ConfigError
from kamui.strict_yaml import Section, load, load_file


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("-1.5E+2", -150.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("12", 12),
        ("+12", 12),
        ("010", 10),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000", "1_000"),
        ("3:5", "3:5"),
        ("190:20:30", "190:20:30"),
        ("0b101", "0b101"),
        ("true", True),
        ("False", False),
        ("yes", "yes"),
        ("no", "no"),
        ("on", "on"),
        ("off", "off"),
        ("~", None),
        ("null", None),
        ("2024-01-31", "2024-01-31"),
        ("1.2.3", "1.2.3"),
        ("-", [None]),
        ("'1'", "1"),
        ("!!str 1", "1"),
        ("!!float 1", 1.0),
        ("-.inf", -math.inf),
        ("[1, [two, 3.0]]", [1, ["two", 3.0]]),
        ("", None),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    read = load(text, "x.yaml")
    assert read == value
    assert type(read) is type(value)


def test_not_a_number_is_read() -> None:
    assert math.isnan(load(".nan", "x.yaml"))


def test_a_merge_key_is_a_plain_key() -> None:
    assert load("<<: {a: 1}", "x.yaml") == {"<<": {"a": 1}}


def test_a_section_equals_a_dict_and_knows_the_line_of_each_key() -> None:
    document = load("# a comment\na: 1\n\nb:\n  - c: 2\n    d: 3\n", "x.yaml")
    assert document == {"a": 1, "b": [{"c": 2, "d": 3}]}
    assert document.lines == {"a": 2, "b": 4}
    assert document["b"][0].lines == {"c": 5, "d": 6}
    assert document["b"][0].line == 5
    assert isinstance(document, Section)


def test_where_names_file_and_line_of_a_key_or_of_the_section() -> None:
    section = load("a:\n  b: 1\n  c: 2\n", "x.yaml")["a"]
    assert section.where("c") == "x.yaml:3"
    assert section.where() == "x.yaml:2"
    assert section.where("absent") == "x.yaml:2"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: 2\na: 3\n", "x.yaml:3: key 'a' is there already, on line 1"),
        ("a:\n  b: 1\n  b: 2\n", "x.yaml:3: key 'b' is there already, on line 2"),
        ("a: &one 1\nb: *one\n", "x.yaml:1: anchors and aliases are not allowed, found '&one'"),
        ("a: *one\n", "x.yaml:1: anchors and aliases are not allowed, found '*one'"),
        ("a: 1\nb: !!set {c}\n", "x.yaml:2: the tag '!!set' is not allowed; only !!null, !!bool, "),
        ("a: !!python/name:os.system\n", "x.yaml:1: the tag '!!python/name:os.system' is not allowed"),
        ("a: !mine 1\n", "x.yaml:1: the tag '!mine' is not allowed"),
        ("a: 1\nb: !!int 1_000\n", "x.yaml:2: '1_000' is not an integer, which its tag asks for"),
        ("!!bool yes", "x.yaml:1: 'yes' is not a boolean, which its tag asks for"),
        ("!!int [1]", "x.yaml:1: a list or a mapping is not an integer, which its tag asks for"),
        ("!!seq {a: 1}", "x.yaml:1: a sequence is expected after the tag '!!seq'"),
        ("!!map [1]", "x.yaml:1: a mapping is expected after the tag '!!map'"),
        ("a: 1\n? [b]\n: 2\n", "x.yaml:2: a key must be a plain value, not a list or a mapping"),
        ("a: 1\nb: [1, 2\n", "x.yaml:3: expected ',' or ']'"),
        ("a: 1\n---\nb: 2\n", "x.yaml:2: but found another document"),
        ("a: 1\nb: \x07\n", "x.yaml:2: the character '\\x07' is not allowed"),
        ("[" * 5000, "x.yaml: nested too deeply to be read"),
    ],
)
def test_what_is_refused_names_file_and_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(text, "x.yaml")
    assert str(caught.value).startswith(message)


def test_a_file_is_read_as_utf_8_with_or_without_its_mark(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes("\ufeffname: é\n".encode())
    assert load_file(file) == {"name": "é"}


def test_a_file_of_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_bytes(b"name: \xe9\n")
    with pytest.raises(ConfigError, match="byte 6 is not UTF-8; save the file as UTF-8"):
        load_file(file)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_file(tmp_path)
    assert str(caught.value) == f"{tmp_path}: cannot be read: Is a directory"
