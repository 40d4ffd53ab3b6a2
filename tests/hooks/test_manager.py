from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import kamui
from kamui.errors import (
    ForeignForwardWarning,
    InterventionContractError,
    NeverFiredWarning,
    NoOpenScopeError,
    NotCapturedError,
    OptionError,
    PointError,
    ScopeClosedError,
    ScopeError,
    StrictError,
    UnknownPointError,
    UnsupportedModelError,
)
from kamui.hooks import HookManager, inspect
from kamui.hooks.context import active_scopes
from kamui.model import Transformer
from kamui.testing import leaves_no_trace

X = torch.ones(2, 3)


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh())


def test_what_design_promises_to_its_first_user_works(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model) as run:
        with HookManager(model) as hooks:
            attached = hooks.attach("blocks.1.attn", point="output")
            hooks.attach("blocks.*.attn", "weights")
            clean = run(token_ids)
            captured = hooks.get("blocks.1.attn.output")
            hooks.attach("blocks.1.attn", point="output", replace_with=torch.zeros_like(captured))
            edited = hooks.run(token_ids)
        assert attached == ("blocks.1.attn.output",)
        assert captured.shape == (2, 7, 16)
        assert hooks.get("blocks.0.attn.weights").shape == (2, 2, 7, 7)
        assert not torch.equal(edited, clean)
        assert (hooks.get("blocks.1.attn.output") == 0).all()


@pytest.mark.parametrize("verb", ["attach", "use", "run", "get", "get_all", "clear", "report"])
def test_before_the_block_every_verb_says_where_it_belongs(net: nn.Module, verb: str) -> None:
    arguments = {"attach": ("0",), "use": ("cache",), "run": (X,), "get": ("0.output",)}.get(verb, ())
    with pytest.raises(ScopeError, match=rf"'{verb}' came before the scope was opened; write it inside 'with Hook"):
        getattr(HookManager(net), verb)(*arguments)


def test_after_the_block_reading_works_and_changing_does_not(net: nn.Module) -> None:
    with HookManager(net) as hooks:
        hooks.attach("0")
        net(X)
    assert hooks.get("0.output").shape == (2, 3)
    assert list(hooks.get_all()) == ["0.output"]
    assert hooks.report().finished == 1
    for verb, arguments in (("attach", ("0",)), ("use", ("cache",)), ("run", (X,))):
        with pytest.raises(ScopeClosedError, match=f"'{verb}' came after the end of the scope"):
            getattr(hooks, verb)(*arguments)
    hooks.clear()
    assert hooks.get_all() == {}


def test_a_manager_cannot_be_entered_twice_at_once(net: nn.Module) -> None:
    with leaves_no_trace(net), HookManager(net) as hooks:
        with pytest.raises(ScopeError, match="this HookManager is open already; make another one to nest scopes"):
            hooks.__enter__()
        hooks.attach("0")


def test_leaving_a_scope_that_is_not_open_is_an_error(net: nn.Module) -> None:
    with pytest.raises(ScopeError):
        HookManager(net).__exit__(None, None, None)
    with HookManager(net) as hooks:
        pass
    with pytest.raises(ScopeClosedError):
        hooks.__exit__(None, None, None)


def test_entering_again_starts_empty(net: nn.Module) -> None:
    hooks = HookManager(net)
    with hooks:
        hooks.attach("0")
        hooks.use(lambda value: value * 0, at="1.output")
        net(X)
    with hooks:
        assert hooks.get_all() == {}
        assert hooks.report().rows == ()
        assert hooks.report().finished == 0
        assert not (net(X) == 0).all()


@pytest.mark.parametrize("thing", [None, "model", torch.ones(1), nn.Linear])
def test_only_a_module_can_be_managed(thing: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"HookManager takes a torch\.nn\.Module, not"):
        HookManager(thing)


def test_scopes_that_end_in_another_order_than_they_began_leave_nothing(net: nn.Module) -> None:
    with leaves_no_trace(net) as run:
        first, second = HookManager(net), HookManager(net)
        first.__enter__()
        second.__enter__()
        first.use(lambda value: value + 1, at="0.output")
        second.use(lambda value: value * 2, at="0.output")
        bare = net[0].forward(X)
        assert torch.equal(run(X), torch.tanh((bare + 1) * 2))
        first.__exit__(None, None, None)
        assert torch.equal(run(X), torch.tanh(bare * 2))
        assert len(active_scopes()) == 1
        second.__exit__(None, None, None)
        assert torch.equal(run(X), torch.tanh(bare))


def test_scopes_on_several_models_do_not_meet(net: nn.Module) -> None:
    other = nn.Sequential(nn.Linear(3, 3))
    checks = leaves_no_trace(net), leaves_no_trace(other)
    with checks[0] as run, checks[1] as run_other, HookManager(net) as hooks, HookManager(other) as others:
        hooks.attach("0")
        others.attach("0")
        run(X)
        run_other(X * 2)
        assert torch.equal(hooks.get("0.output"), net[0].forward(X))
        assert torch.equal(others.get("0.output"), other[0].forward(X * 2))
        assert kamui.use("cache", at="0.output") is not None
        assert [len(one.report().rows) for one in (hooks, others)] == [1, 2]


def test_use_without_a_scope_says_what_to_write(net: nn.Module) -> None:
    with pytest.raises(NoOpenScopeError, match=r"kamui\.use\('cache'\) needs an open scope; write 'with HookManager\("):
        kamui.use("cache", at="0.output")
    with HookManager(net):
        pass
    with pytest.raises(NoOpenScopeError):
        kamui.use("cache", at="0.output")


def test_an_intervention_comes_as_a_name_a_class_an_instance_or_a_function(net: nn.Module) -> None:
    class Doubles(kamui.Intervention):
        at: str

        @kamui.hookimpl
        def points(self) -> str:
            return self.at

        @kamui.hookimpl
        def activation(self, value: Tensor) -> Tensor:
            return value * 2

    def doubles(value: Tensor) -> None:
        value *= 2

    with HookManager(net) as hooks:
        hooks.use("cache", at="1.output")
        hooks.use(Doubles, at="1.output")
        hooks.use(Doubles(at="1.output"))
        hooks.use(doubles, at="1.output")
        assert torch.equal(net(X), torch.tanh(net[0].forward(X)) * 8)
        assert [row.intervention for row in hooks.report().rows] == ["cache", "Doubles", "Doubles", "doubles"]
        with pytest.raises(OptionError, match="intervention 'Doubles' is an instance already; give its options when"):
            hooks.use(Doubles(at="1.output"), at="0.output")
        with pytest.raises(InterventionContractError, match="3 is no intervention; use takes a name, a class"):
            hooks.use(3)  # type: ignore[arg-type]


def test_attach_takes_strings_and_names_what_there_is(net: nn.Module) -> None:
    with HookManager(net) as hooks:
        with pytest.raises(PointError, match="attach takes a module path and an io, both strings, not 0 and 'output'"):
            hooks.attach(0)  # type: ignore[arg-type]
        with pytest.raises(UnknownPointError, match=r"point '2\.output' is not in this model"):
            hooks.attach("2")
        assert hooks.attach("*") == ("0.output", "1.output")
        assert hooks.attach("") == ("output",)


def leave(net: nn.Module, at: str, **options: Any) -> None:
    with HookManager(net, **options) as hooks:
        hooks.attach(at)
        net(X)


class Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b.forward(x)


MESSAGE = r"the model ran 1 time\(s\), and these points never fired: 'b\.output' \(cache\); their modules were not"


def test_a_point_that_never_fired_is_named_at_the_end() -> None:
    with pytest.warns(NeverFiredWarning, match=MESSAGE) as caught:
        leave(Unused(), "*")
    assert caught[0].filename == __file__
    with pytest.raises(StrictError, match=MESSAGE):
        leave(Unused(), "b", strict=True)


def test_the_output_projection_of_multi_head_attention_is_never_called_and_said_to_be() -> None:
    attention = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 3, 8)

    def leave_it() -> None:
        with HookManager(attention) as hooks:
            hooks.use(lambda value: value * 0, at="out_proj.output")
            hooks.attach("")
            output, _ = attention(x, x, x)
            assert torch.equal(hooks.get("output"), output)

    with pytest.warns(NeverFiredWarning, match=r"'out_proj\.output'"):
        leave_it()


def test_nothing_is_said_of_a_scope_in_which_nothing_ran_or_something_failed(net: nn.Module) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with HookManager(net, strict=True) as hooks:
            hooks.attach("0")
        unused = Unused()
        with pytest.raises(KeyError, match="mine"):
            fail_inside(unused)


def fail_inside(net: nn.Module) -> None:
    with HookManager(net, strict=True) as hooks:
        hooks.attach("b")
        net(X)
        raise KeyError("mine")


def test_a_module_list_is_refused_and_its_children_named() -> None:
    net = nn.Module()
    net.blocks = nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)])
    message = r"'blocks\.output' is never reached: 'blocks' is a ModuleList.*use one of them: 'blocks\.0\.output', 'blo"
    with HookManager(net) as hooks, pytest.raises(UnknownPointError, match=message):
        hooks.attach("blocks")


def test_one_name_means_one_layer_and_a_pattern_those_that_it_fits() -> None:
    net = nn.Module()
    net.h = nn.ModuleList(nn.Linear(2, 2) for _ in range(12))
    with HookManager(net) as hooks:
        assert hooks.attach("h.1") == ("h.1.output",)
        assert hooks.attach("h.*") == tuple(f"h.{layer}.output" for layer in range(12))
        assert hooks.attach("h.1*") == ("h.1.output", "h.10.output", "h.11.output")
        assert hooks.attach("h.-1") == ("h.11.output",)
        assert hooks.attach("h.9:") == ("h.9.output", "h.10.output", "h.11.output")


def test_the_model_module_and_architecture_can_be_asked_of_a_scope(model: Transformer, token_ids: Tensor) -> None:
    with HookManager(model) as hooks:
        assert hooks.model is model
        assert hooks.module("final_ln") is model.final_ln
        assert hooks.architecture is not None
        hooks.attach("blocks.-1")
        logits = model(token_ids)
        residual = hooks.get("blocks.1.output")
        torch.testing.assert_close(hooks.architecture.readout(model, residual), logits)
        with pytest.raises(UnknownPointError):
            hooks.module("final_layer_norm")


def test_nothing_is_left_after_a_scope(model: Transformer, token_ids: Tensor) -> None:
    with leaves_no_trace(model) as run, HookManager(model) as hooks:
        hooks.attach("blocks.*.*")
        hooks.attach("blocks.*.attn", "*")
        run(token_ids)
        run.apply(lambda one: one.generate(token_ids, 2))
        assert len(inspect(model)) > 8
    assert inspect(model) == []


def test_a_model_that_ran_elsewhere_is_told_of_in_strict_scopes_as_an_error(net: nn.Module) -> None:
    import threading

    def leave_it(**options: Any) -> None:
        with HookManager(net, **options) as hooks:
            thread = threading.Thread(target=net, args=(X,))
            thread.start()
            thread.join()
            assert hooks.report().foreign == 1

    message = r"the model ran 1 time\(s\) in threads or tasks that do not have this scope"
    with pytest.warns(ForeignForwardWarning, match=message):
        leave_it()
    with pytest.raises(StrictError, match=message):
        leave_it(strict=True)


def test_a_scope_that_nobody_refers_to_any_more_is_closed_and_told(net: nn.Sequential) -> None:
    bare = net(X)
    hooks = HookManager(net)
    hooks.__enter__()
    hooks.attach("0", replace_with=torch.zeros_like)
    with pytest.warns(ResourceWarning, match="a HookManager scope on a Sequential was never left and is closed now"):
        del hooks
    assert torch.equal(net(X), bare)
    assert inspect(net) == []
    with pytest.raises(NoOpenScopeError, match="needs an open scope"):
        kamui.use("cache", at="0.output")


def test_one_point_captured_in_two_ways_is_not_read_as_if_it_were_one(net: nn.Sequential) -> None:
    with HookManager(net) as hooks:
        hooks.attach("0")
        hooks.attach("0", dtype=torch.float64)
        net(X)
    with pytest.raises(NotCapturedError, match=r"point .0\.output. is captured 2 times in this scope, with different"):
        hooks.get("0.output")


def test_a_later_attach_of_the_same_point_leaves_earlier_passes_readable(net: nn.Sequential) -> None:
    with HookManager(net) as hooks:
        hooks.attach("0")
        net(X)
        hooks.attach("0")
        hooks.attach("0", "input")
        assert torch.equal(hooks.get("0.output"), net[0].forward(X))
        assert list(hooks.get_all()) == ["0.output"]
        net(X)
        assert list(hooks.get_all()) == ["0.output", "0.input"]


def test_a_pass_that_an_inner_scope_refuses_is_dropped_in_the_outer_one_too(net: nn.Sequential) -> None:
    class Refuses(kamui.Intervention):
        @kamui.hookimpl
        def forward_finished(self) -> None:
            raise ValueError("refused")

    with HookManager(net) as outer, HookManager(net) as inner:
        inner.use(Refuses)
        with pytest.raises(ValueError, match="refused"):
            net(X)
        assert (outer.report().finished, inner.report().finished) == (0, 0)
