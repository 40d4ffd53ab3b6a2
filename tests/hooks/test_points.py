from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kamui.errors import PointError
from kamui.hooks import HookPoint
from kamui.hooks.points import FORWARD_IOS, IOS

segments = st.text(st.characters(exclude_characters=".", exclude_categories=("Cs",)), min_size=1, max_size=8)
keys = st.one_of(
    st.integers(-(10**8), 10**8),
    st.text(st.characters(exclude_characters=".[]", exclude_categories=("Cs",)), min_size=1, max_size=6).filter(
        lambda key: not key.removeprefix("-").isdecimal()
    ),
)


@given(st.lists(segments, max_size=4), st.sampled_from(IOS), st.lists(keys, max_size=3))
def test_a_point_is_taken_apart_into_what_it_was_made_of(path: list[str], io: str, selector: list[Any]) -> None:
    text = ".".join([*path, io]) + "".join(f"[{key}]" for key in selector)
    point = HookPoint(text)
    assert (point.module, point.io, point.selector) == (".".join(path), io, tuple(selector))
    assert point == text
    assert hash(point) == hash(text)
    assert HookPoint.at(point.module, text.removeprefix(point.module).removeprefix(".")) == point


@given(st.text(max_size=30))
def test_any_text_is_a_point_or_a_point_error(text: str) -> None:
    try:
        point = HookPoint(text)
    except PointError as error:
        message = str(error)
    else:
        assert point.io in IOS
        assert point.startswith(HookPoint.at(point.module, point.io))
        message = repr(text)
    assert repr(text) in message


@pytest.mark.parametrize(
    ("text", "module", "io"),
    [
        ("output", "", "output"),
        ("encoder.layer.0.attention.output.output", "encoder.layer.0.attention.output", "output"),
        ("encoder.layer.0.attention.output", "encoder.layer.0.attention", "output"),
        ("a.grad_weights", "a", "grad_weights"),
        ("input.input", "input", "input"),
    ],
)
def test_the_last_segment_is_always_the_io(text: str, module: str, io: str) -> None:
    point = HookPoint(text)
    assert (point.module, point.io) == (module, io)


NO_POINTS = ["", ".", "blocks.0", "a.outputs", "a..output", ".output", "a.output.", "output[", "b[0]"]


@pytest.mark.parametrize("text", NO_POINTS)
def test_what_is_no_point_is_refused(text: str) -> None:
    with pytest.raises(PointError, match="is no hook point"):
        HookPoint(text)


def test_the_message_names_every_io() -> None:
    with pytest.raises(PointError) as caught:
        HookPoint("blocks.3.attn.dense")
    assert str(caught.value) == (
        "'blocks.3.attn.dense' is no hook point: its last segment 'dense' is no io; write '<module_path>.<io>' with "
        f"one of {', '.join(FORWARD_IOS)} (each also with the prefix 'grad_')"
    )
    with pytest.raises(PointError, match=r"'a\.\.output' is no hook point: it has an empty segment"):
        HookPoint("a..output")


@pytest.mark.parametrize("thing", [None, 3, b"output", ("output",)])
def test_only_strings_are_points(thing: Any) -> None:
    with pytest.raises(PointError, match=r"a hook point is a string such as 'blocks\.3\.attn\.output', not"):
        HookPoint(thing)


def test_a_point_serialises_as_the_string_that_it_is() -> None:
    point = HookPoint("lstm.output[1][name]")
    assert json.dumps({point: point}) == '{"lstm.output[1][name]": "lstm.output[1][name]"}'
    assert repr(point) == "'lstm.output[1][name]'"
    for twin in (pickle.loads(pickle.dumps(point)), copy.deepcopy(point), HookPoint(point)):
        assert twin == point
        assert (twin.module, twin.io, twin.selector) == ("lstm", "output", (1, "name"))
