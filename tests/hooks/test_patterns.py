from __future__ import annotations

from fnmatch import translate
from re import fullmatch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamui.hooks.patterns import expand, is_pattern, matches, tree_of

NAMES = [f"{stack}.{layer}.{part}" for stack in ("h", "other") for layer in range(12) for part in ("attn", "mlp")]


@given(st.text("ab*", max_size=10), st.text("ab", max_size=10))
def test_a_star_means_what_it_means_to_the_shell(pattern: str, segment: str) -> None:
    assert matches(pattern, segment) == (fullmatch(translate(pattern), segment) is not None)


@given(st.text("a*", min_size=40, max_size=400), st.integers(100, 2000))
def test_matching_never_takes_exponential_time(pattern: str, length: int) -> None:
    assert not matches(pattern + "b", "a" * length)  # an exponential matcher would not come to an end here


@given(st.lists(st.text("ab*-:01", min_size=1, max_size=6), min_size=1, max_size=4))
def test_any_pattern_can_be_expanded_and_gives_names_that_there_are(segments: list[str]) -> None:
    found = expand(".".join(segments), tree_of(NAMES))
    assert set(found) <= set(NAMES)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("pattern", "layers"),
    [
        ("h.1.attn", [1]),
        ("h.*.attn", range(12)),
        ("h.1*.attn", [1, 10, 11]),
        ("h.-1.attn", [11]),
        ("h.-12.attn", [0]),
        ("h.-13.attn", []),
        ("h.2:5.attn", [2, 3, 4]),
        ("h.9:.attn", [9, 10, 11]),
        ("h.:-10.attn", [0, 1]),
        ("h.::5.attn", [0, 5, 10]),
        ("h.::-4.attn", [11, 7, 3]),
        ("h.::0.attn", []),
        ("h.12.attn", []),
        ("*.0.attn.*", []),
        ("h", []),
    ],
)
def test_numbered_children_are_counted_as_in_python(pattern: str, layers: list[int]) -> None:
    assert expand(pattern, tree_of(NAMES)) == [f"h.{layer}.attn" for layer in layers]


def test_a_star_stays_within_its_segment() -> None:
    assert expand("h.*", tree_of(NAMES)) == []
    assert expand("*.3.*", tree_of(NAMES)) == ["h.3.attn", "h.3.mlp", "other.3.attn", "other.3.mlp"]
    assert expand("*", tree_of(["a", "a.b", "c"])) == ["a", "c"]


def test_a_segment_that_exists_as_written_is_no_pattern() -> None:
    names = tree_of(["a.-1", "a.0", "a.1", "a.*", "b.0:2", "b.0"])
    assert expand("a.-1", names) == ["a.-1"]
    assert expand("a.*", names) == ["a.*"]
    assert expand("b.0:2", names) == ["b.0:2"]


@pytest.mark.parametrize(("text", "expected"), [("a.0.b", False), ("a.*.b", True), ("a.-1", True), ("a.1:2", True)])
def test_patterns_are_told_from_names(text: str, expected: bool) -> None:
    assert is_pattern(text) is expected


@pytest.mark.parametrize("pattern", ["-0.output", f"-{'9' * 5000}.output", f"{'9' * 5000}:.output", "::0.output"])
def test_a_number_that_no_child_can_have_matches_nothing(pattern: str) -> None:
    assert expand(pattern, tree_of(["0.output", "1.output"])) == []
