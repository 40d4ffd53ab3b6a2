"""Models inside the wrappers of others: what their points are called, and that hooks and results are right there."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils.parametrizations import weight_norm

from kamui.errors import StrictError, SwappedModuleWarning
from kamui.hooks import HookManager, HookRegistry
from kamui.model import Transformer
from kamui.testing import leaves_no_trace

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2))


@pytest.fixture
def _one_process(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_process")
def test_ddp_is_no_part_of_a_name_and_trains_with_an_edit(net: nn.Sequential) -> None:
    ddp = DistributedDataParallel(net)
    assert HookRegistry.resolve(ddp, "*.output")[0] == "0.output"
    bare, hidden = net(X), net[0](X)
    with HookManager(ddp) as hooks:
        hooks.attach("module.0")
        hooks.use(lambda value: value + 1, at="0.output")
        for _ in range(3):
            ddp(X).sum().backward()
        assert torch.equal(hooks.get("0.output"), hidden + 1)
        assert hooks.run(X, stop=True) is None
    for _ in range(2):
        output = ddp(X)
        output.sum().backward()
        assert torch.equal(output, bare)


@pytest.mark.usefixtures("_one_process")
def test_a_constant_patch_under_ddp_ends_in_torchs_own_error(net: nn.Sequential) -> None:
    ddp = DistributedDataParallel(net)
    with HookManager(ddp) as hooks:
        hooks.attach("0", replace_with=torch.zeros(2, 3))
        ddp(X).sum().backward()
        with pytest.raises(RuntimeError, match="finished reduction"):
            ddp(X)


@pytest.mark.usefixtures("_one_process")
def test_a_patch_that_keeps_the_graph_trains_under_ddp(net: nn.Sequential) -> None:
    ddp = DistributedDataParallel(net)
    with HookManager(ddp) as hooks:
        hooks.attach("0", replace_with=lambda value: torch.ones(2, 3) + 0 * value)
        for _ in range(3):
            ddp(X).sum().backward()
        assert hooks.report().finished == 3


def test_data_parallel_is_no_part_of_a_name(net: nn.Sequential) -> None:
    parallel = DataParallel(net)
    with leaves_no_trace(parallel) as run, HookManager(parallel) as hooks:
        hooks.attach("module.0")
        run(X)
        assert torch.equal(hooks.get("0.output"), net[0](X))


FSDP = """
    import os, sys, warnings
    import torch, torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from kamui.errors import ScopeError
    from kamui.hooks import HookManager

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2)
    torch.manual_seed(0)
    net, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), torch.randn(3, 4)
    bare, hidden = net(x), net[0](x)
    for module in (net[0], net[2], net):
        fully_shard(module)
    with HookManager(net) as hooks:
        hooks.attach("0")
        hooks.attach("2", "input", replace_with=lambda value: value * 0)
        output = net(x)
        assert torch.equal(hooks.get("0.output"), hidden)
        assert torch.equal(output, net[2].bias.full_tensor().expand(3, 2))
        output.sum().backward()
        try:
            hooks.run(x, stop=True)
        except ScopeError as error:
            assert "is sharded by FSDP; run with stop=False" in str(error), error
        else:
            raise AssertionError("an early stop was not refused")
    output = net(x)
    assert torch.equal(output, bare)
    output.sum().backward()
    dist.barrier()
    print("all is well", flush=True)
    os._exit(0)  # gloo's threads may abort the interpreter while it ends
"""


def test_a_model_sharded_over_two_processes_is_observed_and_changed(tmp_path: Path) -> None:
    script = tmp_path / "sharded.py"
    script.write_text(textwrap.dedent(FSDP))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert all("all is well" in output for output in outputs), "\n".join(outputs)


def test_a_forward_that_accelerate_replaced_stays_and_offloaded_weights_are_used(net: nn.Sequential) -> None:
    accelerate = pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")
    bare, hidden = net(X).detach(), net[0](X).detach()
    accelerate.cpu_offload(net, execution_device=torch.device("cpu"))
    forward = net[0].forward
    with torch.no_grad(), HookManager(net) as hooks:
        hooks.attach("0")
        assert torch.equal(net(X), bare)
        assert torch.equal(hooks.get("0.output"), hidden)
        hooks.run(X, stop=True)
        assert all(parameter.device.type == "meta" for parameter in net.parameters())
        hooks.attach("2", "input", replace_with=lambda value: value * 0)
        assert (net(X)[0] == net(X)[1]).all()
    assert net[0].forward is forward
    assert torch.equal(net(X), bare)


def test_a_forward_that_accelerate_replaces_inside_the_scope_stays(net: nn.Sequential) -> None:
    accelerate = pytest.importorskip("accelerate.hooks", reason="the extra 'hf' is not installed")
    with leaves_no_trace(net) as run:
        with HookManager(net) as hooks:
            hooks.attach("0")
            run.apply(lambda model: accelerate.add_hook_to_module(model[0], accelerate.AlignDevicesHook()))
            run(X)
            assert hooks.report().finished == 1
        assert "_hf_hook" in vars(net[0])


@pytest.fixture
def adapted() -> Any:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=16, bos_token_id=0, eos_token_id=None
    )
    lora = peft.LoraConfig(target_modules=["c_attn"], r=2, init_lora_weights=False, fan_in_fan_out=True)
    return peft.get_peft_model(transformers.GPT2LMHeadModel(config).eval(), lora).eval()


TOKEN_IDS = torch.randint(32, (2, 5), generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", ["transformer.h.1", "base_model.model.transformer.h.1"])
def test_the_modules_of_an_adapted_model_have_the_names_of_its_base(adapted: Any, name: str) -> None:
    with leaves_no_trace(adapted) as run, HookManager(adapted) as hooks:
        hooks.attach(name)
        states = run(TOKEN_IDS, output_hidden_states=True).hidden_states
        normed = adapted.get_base_model().transformer.ln_f(hooks.get("transformer.h.1.output"))
        assert torch.equal(normed, states[-1])
        assert HookRegistry.resolve(adapted, name.replace("1", "*") + ".output") == [
            "transformer.h.0.output",
            "transformer.h.1.output",
        ]


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_the_adapter_and_what_it_adapts_are_points_of_their_own(adapted: Any) -> None:
    with leaves_no_trace(adapted) as run, HookManager(adapted) as hooks:
        hooks.attach("transformer.h.0.attn.c_attn")
        hooks.attach("transformer.h.0.attn.c_attn.base_layer")
        run(TOKEN_IDS)
        whole, base = (hooks.get(f"transformer.h.0.attn.c_attn{part}.output") for part in ("", ".base_layer"))
        assert not torch.allclose(whole, base)
        with adapted.disable_adapter():
            adapted(TOKEN_IDS)
        whole, base = (hooks.get(f"transformer.h.0.attn.c_attn{part}.output") for part in ("", ".base_layer"))
        assert torch.equal(whole, base)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_adapted_model_generates_pass_by_pass(adapted: Any) -> None:
    with leaves_no_trace(adapted) as run, HookManager(adapted) as hooks:
        hooks.attach("transformer.h.*", positions="generated")
        run.apply(lambda model: model.generate(input_ids=TOKEN_IDS, max_new_tokens=4, do_sample=False))
        assert hooks.report().finished == 4
        assert hooks.get("transformer.h.1.output", forward="all").shape == (2, 3, 16)


def test_a_parametrized_module_is_one_module_and_its_weights_stay() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(weight_norm(nn.Linear(3, 2)))
    bare, weight = net(X), torch.as_tensor(net[0].weight)
    with leaves_no_trace(net) as run:
        with HookManager(net) as hooks:
            hooks.attach("0")
            hooks.attach("0.parametrizations.weight")
            hooks.use(lambda value: value * 0, at="0.output")
            assert (run(X) == 0).all()
            assert torch.equal(hooks.get("0.parametrizations.weight.output"), weight)
        assert torch.equal(net(X), bare)


class Tied(nn.Module):
    """An embedding and a head with one weight, and a block that is called three times under two names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(7, 3)
        self.head = nn.Linear(3, 7, bias=False)
        self.head.weight = self.embed.weight
        self.block = self.alias = nn.Linear(3, 3)

    def forward(self, token_ids: Tensor) -> Tensor:
        x = self.embed(token_ids)
        for block in (self.block, self.alias, self.block):
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def test_tied_weights_stay_tied_and_an_edit_of_one_end_leaves_the_other() -> None:
    net, ids = Tied(), torch.tensor([[1, 2]])
    with leaves_no_trace(net) as run, HookManager(net) as hooks:
        hooks.attach("embed")
        hooks.use(lambda value: value * 0, at="head.output")
        assert (run(ids) == 0).all()
        assert torch.equal(hooks.get("embed.output"), net.embed(ids))
        assert net.head.weight is net.embed.weight


def test_a_module_called_three_times_under_two_names_fires_three_times_and_once_for_each() -> None:
    net, ids = Tied(), torch.tensor([[1, 2]])
    first = net.block(net.embed(ids))
    second = net.block(first)
    with leaves_no_trace(net) as run, HookManager(net) as hooks:
        hooks.attach("block")
        run(ids)
        for index, expected in enumerate((first, second, net.block(second))):
            assert torch.equal(hooks.get("alias.output", call=index, forward=0), expected)


def test_a_module_that_is_replaced_inside_the_scope_is_told_of(model: Transformer, token_ids: Tensor) -> None:
    hooks = HookManager(model).__enter__()
    hooks.attach("blocks.0")
    hooks.attach("blocks.1")
    model(token_ids)
    first = model.blocks[0]
    model.blocks[0] = nn.Identity()
    with pytest.warns(SwappedModuleWarning, match=r"point 'blocks\.0\.output' \(cache\) is another module now"):
        hooks.__exit__(None, None, None)
    assert not first._forward_hooks
    assert not model.blocks[1]._forward_hooks


def test_in_a_strict_scope_a_replaced_module_is_an_error(net: nn.Sequential) -> None:
    hooks = HookManager(net, strict=True).__enter__()
    hooks.attach("0")
    net[0] = nn.Linear(3, 3)
    with pytest.raises(StrictError, match=r"'0' was replaced inside the scope, and the new module was neither seen"):
        hooks.__exit__(None, None, None)
