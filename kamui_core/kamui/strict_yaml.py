"""YAML that means what it says.

Plain `yaml.safe_load` reads `1e-3` as a string, `3:5` as 185 and `no` as False, keeps the last of two equal
keys in silence, and forgets on which line anything stood. This loader follows the core schema of YAML 1.2,
refuses aliases, duplicate keys and foreign tags, and gives mappings as `Section`, which knows their lines.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NoReturn

import yaml

from kamui.errors import ConfigError

_CORE = "tag:yaml.org,2002:"
_NULL = re.compile(r"(?:~|null|Null|NULL|)\Z")
_BOOL = re.compile(r"(?:true|True|TRUE|false|False|FALSE)\Z")
_INT = re.compile(r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)\Z")
_FLOAT = re.compile(
    r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))\Z"
)


class Section(dict[Any, Any]):
    """A mapping read from YAML that knows where it and each of its keys stood.

    Attributes:
        source: The file (or whatever the text was called) that it came from.
        line: The line on which the mapping begins, counted from 1.
        lines: The line of each key.
    """

    def __init__(self, source: str, line: int) -> None:
        super().__init__()
        self.source = source
        self.line = line
        self.lines: dict[Any, int] = {}

    def where(self, key: object = None) -> str:
        """Return `"file:line"` of a key, or of the whole mapping if it does not have that key."""
        return f"{self.source}:{self.lines.get(key, self.line)}"


def load(text: str, source: str) -> Any:
    """Read one YAML document; mappings become `Section`, everything else plain Python values.

    Args:
        text: The document.
        source: What error messages call it, usually the file's path.

    Raises:
        ConfigError: The text is no YAML, or holds something that this loader refuses.
    """
    try:
        loader = StrictLoader(text, source)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise ConfigError(f"{source}:{line}: {error.problem or error.context}") from error
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, int(error.position)) + 1
        raise ConfigError(f"{source}:{line}: the character {chr(int(error.character))!r} is not allowed") from error
    except RecursionError:
        raise ConfigError(f"{source}: nested too deeply to be read") from None


def load_file(path: str | Path) -> Any:
    """Read the YAML document in a file, see `load`.

    Raises:
        ConfigError: The file cannot be read, is no YAML, or holds something that this loader refuses.
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: byte {error.start} is not UTF-8; save the file as UTF-8") from error
    return load(text, str(path))


class StrictLoader(yaml.SafeLoader):
    """The loader behind `load`: YAML 1.2 scalars, no aliases, no duplicate keys, no foreign tags."""

    def __init__(self, text: str, source: str) -> None:
        super().__init__(text)
        self.source = source

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """Refuse anchors and aliases, then compose as usual."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        if event.anchor is not None:
            sign = "*" if isinstance(event, yaml.AliasEvent) else "&"
            self._refuse(event, f"anchors and aliases are not allowed, found '{sign}{event.anchor}'")
        return super().compose_node(parent, index)

    def construct_null(self, node: yaml.ScalarNode) -> None:
        """Read a null."""
        self._text(node, _NULL, "null")

    def construct_bool(self, node: yaml.ScalarNode) -> bool:
        """Read `true` or `false`."""
        return self._text(node, _BOOL, "a boolean").lower() == "true"

    def construct_int(self, node: yaml.ScalarNode) -> int:
        """Read a decimal, `0o17` or `0x1f` integer."""
        text = self._text(node, _INT, "an integer")
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))

    def construct_float(self, node: yaml.ScalarNode) -> float:
        """Read a float, `.inf` and `.nan` included."""
        text = self._text(node, _FLOAT, "a float").lower()
        return float(text.replace(".inf", "inf").replace(".nan", "nan"))

    def construct_text(self, node: yaml.ScalarNode) -> str:
        """Read a string."""
        return self._text(node, re.compile(""), "a string")

    def construct_list(self, node: yaml.Node) -> list[Any]:
        """Read a sequence."""
        if not isinstance(node, yaml.SequenceNode):
            self._refuse(node, "a sequence is expected after the tag '!!seq'")
        return [self.construct_object(child, deep=True) for child in node.value]

    def construct_section(self, node: yaml.Node) -> Section:
        """Read a mapping and the line of each of its keys."""
        if not isinstance(node, yaml.MappingNode):
            self._refuse(node, "a mapping is expected after the tag '!!map'")
        section = Section(self.source, node.start_mark.line + 1)
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self._refuse(key_node, "a key must be a plain value, not a list or a mapping")
            key = self.construct_object(key_node, deep=True)
            if key in section:
                self._refuse(key_node, f"key {key!r} is there already, on line {section.lines[key]}")
            section[key] = self.construct_object(value_node, deep=True)
            section.lines[key] = key_node.start_mark.line + 1
        return section

    def refuse_tag(self, node: yaml.Node) -> NoReturn:
        """Refuse a tag that is not in the core schema."""
        tag = str(node.tag).replace(_CORE, "!!")
        allowed = "!!null, !!bool, !!int, !!float, !!str, !!seq, !!map"
        self._refuse(node, f"the tag {tag!r} is not allowed; only {allowed} are")

    def _text(self, node: yaml.Node, pattern: re.Pattern[str], kind: str) -> str:
        if not isinstance(node, yaml.ScalarNode) or not pattern.match(node.value):
            shown = repr(node.value) if isinstance(node, yaml.ScalarNode) else "a list or a mapping"
            self._refuse(node, f"{shown} is not {kind}, which its tag asks for")
        return str(node.value)

    def _refuse(self, place: yaml.Node, problem: str) -> NoReturn:
        raise ConfigError(f"{self.source}:{place.start_mark.line + 1}: {problem}")


# Emptied first, so that nothing of YAML 1.1 is inherited.
StrictLoader.yaml_implicit_resolvers = {}
StrictLoader.yaml_constructors = {}
for _name, _pattern in {"null": _NULL, "bool": _BOOL, "int": _INT, "float": _FLOAT}.items():
    StrictLoader.add_implicit_resolver(_CORE + _name, _pattern, None)
for _name, _construct in {
    "null": StrictLoader.construct_null,
    "bool": StrictLoader.construct_bool,
    "int": StrictLoader.construct_int,
    "float": StrictLoader.construct_float,
    "str": StrictLoader.construct_text,
    "seq": StrictLoader.construct_list,
    "map": StrictLoader.construct_section,
}.items():
    StrictLoader.add_constructor(_CORE + _name, _construct)
StrictLoader.add_constructor(None, StrictLoader.refuse_tag)
