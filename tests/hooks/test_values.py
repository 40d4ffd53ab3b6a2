from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from transformers.modeling_outputs import BaseModelOutput

from kamui.errors import ValueStructureError
from kamui.hooks import HookManager
from kamui.hooks.values import argument_path, main_path, put, take


class Pair(NamedTuple):
    count: int
    hidden: Tensor


@dataclasses.dataclass(frozen=True)
class Result:
    name: str
    hidden: Tensor


ONE, TWO = torch.ones(2), torch.zeros(3)

CONTAINERS: dict[str, tuple[Any, tuple[int | str, ...]]] = {
    "tensor": (ONE, ()),
    "1-tuple": ((ONE,), (0,)),
    "tuple": ((None, "x", ONE, TWO), (2,)),
    "nested": (((), ("x", (ONE, TWO))), (1, 1, 0)),
    "list": ([ONE, TWO], (0,)),
    "dict": ({"name": "x", "hidden": ONE}, ("hidden",)),
    "ordered": (OrderedDict(hidden=ONE, other=TWO), ("hidden",)),
    "named tuple": (Pair(1, ONE), (1,)),
    "dataclass": (Result("x", ONE), ("hidden",)),
    "model output": (BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO,)), ("last_hidden_state",)),
    "return type": (torch.return_types.max((ONE, TWO)), (0,)),
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_the_first_tensor_is_found_and_put_back_in_the_same_container(name: str) -> None:
    value, path = CONTAINERS[name]
    assert main_path(value) == path
    assert take(value, path) is ONE
    new = torch.full((2,), 7.0)
    changed = put(value, path, new)
    assert type(changed) is type(value)
    assert take(changed, path) is new
    assert take(value, path) is ONE


def test_the_other_parts_stay_the_same_objects() -> None:
    inner = [TWO, object()]
    value = (ONE, {"inner": inner})
    changed = put(value, (0,), TWO)
    assert changed[1] is value[1]
    output = BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO,))
    edited = put(output, ("last_hidden_state",), TWO)
    assert edited.last_hidden_state is TWO
    assert edited[0] is TWO
    assert edited.hidden_states is output.hidden_states


def test_packed_sequences_keep_their_lengths() -> None:
    packed = pack_padded_sequence(torch.randn(2, 3, 4), torch.tensor([3, 2]), batch_first=True)
    assert main_path(packed) == ("data",)
    changed = put(packed, ("data",), packed.data * 0)
    assert isinstance(changed, PackedSequence)
    assert torch.equal(changed.batch_sizes, packed.batch_sizes)
    assert (changed.data == 0).all()


@pytest.mark.parametrize(
    ("value", "path", "message"),
    [
        ((ONE,), (1,), "there is no 1 in a tuple; it holds 0"),
        ({"a": ONE}, ("b",), "there is no 'b' in a dict; it holds 'a'"),
        (ONE, (0,), r"there is no 0 in a tensor of shape \(2,\); it holds nothing"),
    ],
)
def test_a_path_that_leads_nowhere_says_what_there_is(value: Any, path: Any, message: str) -> None:
    with pytest.raises(ValueStructureError, match=message):
        take(value, path)


def test_mappings_and_tuples_can_be_counted_from_either_end() -> None:
    output = BaseModelOutput(last_hidden_state=ONE, hidden_states=(TWO,))
    assert take(output, (0,)) is ONE
    assert take(output, (1, -1)) is TWO
    assert take(Pair(1, ONE), ("hidden",)) is ONE


def test_nothing_is_found_in_what_holds_no_tensor_however_deep() -> None:
    endless: list[Any] = []
    endless.append(endless)
    assert main_path(endless) is None
    assert main_path({"a": (1, None, "x")}) is None


class Takes(nn.Module):
    def forward(self, a: Any, b: Any = None, *, c: Any = None) -> Any: ...


@pytest.mark.parametrize(
    ("args", "kwargs", "selector", "path"),
    [
        ((ONE, TWO), {}, (), (0, 0)),
        ((), {"c": ONE, "a": TWO}, (), (1, "a")),
        (("x",), {"c": ONE}, (), (1, "c")),
        ((ONE, TWO), {}, ("b",), (0, 1)),
        ((ONE,), {"b": (TWO, ONE)}, ("b", 1), (1, "b", 1)),
        ((ONE, TWO), {}, (-1,), (0, -1)),
        (((ONE, TWO),), {}, (), (0, 0, 0)),
        ((), {}, (), None),
    ],
)
def test_arguments_are_found_whichever_way_they_came(args: Any, kwargs: Any, selector: Any, path: Any) -> None:
    assert argument_path(Takes(), args, kwargs, selector) == path


def test_a_one_tuple_stays_one_at_batch_size_one() -> None:
    class Inner(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor]:
            return (x,)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            (hidden,) = self.inner(x)
            return hidden.sum(-1)

    net = Outer()
    with HookManager(net) as hooks:
        hooks.use(lambda value: value * 2, at="inner.output")
        assert torch.equal(net(torch.ones(3, 4)), torch.full((3,), 8.0))
        assert torch.equal(net(torch.ones(1, 4)), torch.full((1,), 8.0))


def test_each_part_of_an_lstm_can_be_read_and_changed_by_itself() -> None:
    torch.manual_seed(0)
    lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)
    x = torch.randn(2, 5, 3)
    out, (hidden, cell) = lstm(x)
    with HookManager(lstm) as hooks:
        hooks.use("cache", at=["output", "output[1][0]", "output[1][1]"], raw=True)
        hooks.use(lambda value: value * 0, at="output")
        hooks.use(lambda value: value + 1, at="output[1][1]")
        edited, (edited_hidden, edited_cell) = lstm(x)
    assert (edited == 0).all()
    assert torch.equal(edited_hidden, hidden)
    assert torch.equal(edited_cell, cell + 1)
    assert torch.equal(hooks.get("output"), out)
    assert torch.equal(hooks.get("output[1][0]"), hidden)
    assert torch.equal(hooks.get("output[1][1]"), cell)


def test_keyword_inputs_are_replaced_where_they_came() -> None:
    class Attention(nn.Module):
        def forward(self, *, mask: Tensor, hidden_states: Tensor, name: str) -> Tensor:
            return hidden_states * mask if name == "yes" else mask

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = Attention()

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(hidden_states=x, mask=x.new_ones(2), name="yes")

    net = Layer()
    with HookManager(net) as hooks:
        hooks.use("cache", at=["attention.input[hidden_states]", "attention.input[mask]"])
        hooks.use(lambda value: value + 5, at="attention.input[hidden_states]")
        assert torch.equal(net(torch.ones(2)), torch.full((2,), 6.0))
        assert torch.equal(hooks.get("attention.input[hidden_states]"), torch.full((2,), 6.0))
        assert torch.equal(hooks.get("attention.input[mask]"), torch.ones(2))


def test_an_argument_that_is_a_tuple_stays_one_argument() -> None:
    class Adds(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            a, b = pair
            return a + b

    net, a, b = Adds(), torch.ones(2), torch.ones(2) * 2
    with HookManager(net) as hooks:
        hooks.use(lambda value: value.clone(), at="input")
        assert torch.equal(net((a, b)), a + b)
        hooks.use(lambda value: value * 10, at="input[pair][1]")
        assert torch.equal(net((a, b)), a + 10 * b)


def test_model_outputs_of_transformers_keep_their_type_and_attributes() -> None:
    class Gives(nn.Module):
        def forward(self, x: Tensor) -> BaseModelOutput:
            return BaseModelOutput(last_hidden_state=x, hidden_states=(x, x + 1))

    net = Gives()
    with HookManager(net) as hooks:
        hooks.use(lambda value: value * 0, at="output")
        hooks.use(lambda value: value * 3, at="output[hidden_states][1]")
        result = net(torch.ones(2))
    assert isinstance(result, BaseModelOutput)
    assert (result.last_hidden_state == 0).all()
    assert (result["last_hidden_state"] == 0).all()
    assert torch.equal(result.hidden_states[0], torch.ones(2))
    assert torch.equal(result.hidden_states[1], torch.full((2,), 6.0))
    assert type(result.hidden_states) is tuple


def test_a_selector_that_leads_nowhere_is_told_in_the_forward_pass() -> None:
    net = nn.Linear(2, 2)
    with HookManager(net) as hooks:
        hooks.attach("", "output[1]")
        with pytest.raises(ValueStructureError, match=r"there is no 1 in a tensor of shape \(1, 2\)"):
            net(torch.ones(1, 2))
