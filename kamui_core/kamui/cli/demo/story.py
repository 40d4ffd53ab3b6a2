"""The study as a text: every number is one that was measured, every conclusion depends on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from kamui.cli.demo.layout import code, columns, share, verdict
from kamui.cli.demo.proof import Compared
from kamui.cli.demo.steering import AT, FULL
from kamui.cli.demo.study import Study
from kamui.cli.demo.tables import knockout_table, rank_table, sequence_table, trace_table

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kamui.cli.demo.layers import LayerReading

Page = Iterator["RenderableType"]

_CLEAR = 0.1  # a rise of the loss that is more than noise


def tell(out: Console, study: Study) -> None:
    """Print the whole study."""
    config = study.config
    out.print(Text("KAMUI", "bold magenta"), Text("how a small transformer continues what repeats", "bold"))
    out.print(
        f"a trained model of {config.n_layers} layers with {config.n_heads} heads each, D {config.d_model}, "
        f"{config.vocab_size} tokens\n"
    )
    for number, (title, page) in enumerate(PAGES.items(), start=1):
        out.print(Rule(Text(f"{number}  {title}", "bold"), align="left", style="dim"))
        for part in page(study):
            out.print(Padding(part, (0, 0, 1, 3), expand=False))
    out.print(Text("The code of each step stands in kamui.cli.demo, to be copied from.", "dim"))


def repetition(study: Study) -> Page:
    """Yield what the model was given, and how well it continues it."""
    n = study.sequences.length
    loss, blind = study.knockouts.nothing, _blind(study)
    yield Text(f"{n} random tokens, and the same {n} once more. Only then can be known what comes next.")
    yield sequence_table(study)
    yield Text(
        f"Mean loss over {len(study.sequences.token_ids)} such sequences: {loss.first:.2f} the first time, "
        f"{loss.second:.2f} the second. A blind guess has ln {study.config.vocab_size} = {blind:.2f}."
    )
    yield verdict(
        loss.second < blind / 2 < loss.first,
        "the model continues what repeats",
        "the model does not tell the repetition from the rest",
    )


def lens(study: Study) -> Page:
    """Yield after which layer the right token is on top."""
    yield code('lens = hooks.use("logit_lens", at=["embed.output", "blocks.*.output"])')
    yield Text(
        "Each layer, read through the model's own head. The numbers are how many tokens it takes to be likelier than "
        "the right one (0 is the top), at each position of the repetition above; then how likely it takes the right "
        "one to be, over all sequences."
    )
    yield rank_table(study)
    knowing = [reading for reading in study.readings if reading.share_on_top > 0.5]
    first = knowing[0] if knowing else study.readings[-1]
    yield verdict(
        bool(knowing),
        f"the right token comes up at {first.point}, where it is on top in {first.share_on_top:.0%} of the places"
        f"{_layer_before(study, first)}",
        "after no layer is the right token on top in most of the places",
    )


def heads(study: Study) -> Page:
    """Yield which heads look up what followed."""
    best, found, previous = study.heads.best, study.heads.induction, study.heads.previous
    yield code('hooks.attach("blocks.*.attn", "weights")')
    yield Text(
        "Where each head looks in the repetition, as its mean attention. An induction head looks at what followed the "
        "present token when that was there before."
    )
    table = columns("head", "at what followed", "at the previous token")
    for head in study.heads.ranked:
        table.add_row(str(head), share(head.induction), share(head.previous))
    yield table
    yield verdict(
        bool(found),
        f"{best} is an induction head, with {best.induction:.0%} of its attention at what followed; heads like it: "
        f"{len(found)} of {len(study.heads.ranked)}",
        f"no head looks mostly at what followed; {best} comes nearest with {best.induction:.0%}",
    )
    yield verdict(
        bool(previous),
        f"before them come heads that look at the previous token ({len(previous)}): through these a token can be "
        f"marked with the one that it follows, for an induction head to search for",
        "no head before them looks mostly at the previous token",
    )


def knockout(study: Study) -> Page:
    """Yield what the model can no longer do without those heads."""
    best, control, found = study.heads.best, study.heads.control, study.knockouts
    yield code(
        'hooks.attach(head.module, "z", replace_with=average, heads=head.number)',
        'hooks.attach(head.module, "weights", replace_with=cut, heads=head.number)',
    )
    yield Text(
        "A head is knocked out by putting its average output, the same whatever it sees, in place of its own. A sight "
        "is cut by setting one attention weight to 0."
    )
    yield knockout_table(study)
    rise, control_rise = (loss.second - found.nothing.second for loss in (found.best, found.control))
    yield verdict(
        rise > max(2 * control_rise, _CLEAR),
        f"without {best} the loss rises by {rise:.2f}; without {control}, which looks least at either place, by "
        f"{control_rise:z.2f}",
        f"{best} is not needed much more than {control}: without it the loss rises by {rise:z.2f}, without the control "
        f"by {control_rise:z.2f}",
    )
    yield verdict(
        found.together.second > found.best.second + _CLEAR,
        f"the others stand in for it: without all of them the loss is {found.together.second:.2f}, and a blind guess "
        f"has {_blind(study):.2f}",
        f"without all of them the loss is {found.together.second:.2f}, not much more than without the one",
    )
    yield _one_sight(study)


def tracing(study: Study) -> Page:
    """Yield where the answer passes."""
    trace, result = study.trace, study.trace.result
    yield code(
        "patcher = ActivationPatcher(model)",
        "patcher.sweep(clean, corrupted, metric=log_probability,",
        '              at="blocks.*.output")',
    )
    yield Text(
        f"The clean input stops at position {trace.last}, and the answer has a log probability of {result.clean:.2f}. "
        f"In the corrupted one the last token's first occurrence, at {trace.token}, is another token, and the answer "
        f"has {result.corrupted:.2f}. One activation of the clean run at a time is put into the corrupted one: 1 "
        f"brings the answer back, 0 does nothing. The best of {result.scores.numel()}:"
    )
    yield trace_table(study)
    carrying = {(cell.point, cell.column) for cell in result.best(4) if cell.score > 0.5}
    first, last = result.points[0], result.points[-1]
    yield verdict(
        {(first, trace.follower), (last, trace.last)} <= carrying,
        f"after {first.module} the answer waits where it stands, marked with the token that it follows; {last.module} "
        f"fetches it to the end: an induction circuit",
        "the answer does not take the way of an induction circuit",
    )


def steering(study: Study) -> Page:
    """Yield what steering does."""
    steered = study.steered
    yield code(
        f'steering = hooks.use("steering", at="{AT}", positions=-1)',
        "steering.fit(prompts.ending_in(prompts.other),",
        "             prompts.ending_in(prompts.read))",
    )
    yield Text(
        f"Prompts end in token {steered.read} and hold, somewhere before, {steered.read} as well as {steered.other}. A "
        f"vector, fitted on other prompts, is added at the last position where the induction heads read, so that they "
        f"search for {steered.other}. How likely does the model take what followed either to be?"
    )
    table = columns("alpha", f"what followed {steered.read}", f"what followed {steered.other}")
    for effect in steered.effects:
        table.add_row(f"{effect.alpha:.2f}", share(effect.read), share(effect.other))
    table.add_row(f"{FULL:.2f}, random vector", share(steered.control.read), share(steered.control.other))
    yield table
    bare, full, control = steered.at(0.0), steered.at(FULL), steered.control
    numbers = (
        f"what followed {steered.other} goes from {bare.other:.1%} to {full.other:.1%}, and with a random vector of "
        f"the same length to {control.other:.1%}"
    )
    yield verdict(
        full.other > 0.5 > max(bare.other, control.other),
        f"the model looks up the other token: {numbers}",
        f"steering does not turn the model to the other token: {numbers}",
    )


def proof(study: Compared) -> Page:
    """Yield whether the model is what it was."""
    difference = (study.before.logits - study.after.logits).abs().max().item()
    yield code("kamui.hooks.inspect(model)")
    table = columns()
    table.add_row("logits", f"{_same(study.same_logits)} (largest difference {difference:g})")
    table.add_row("state dict", f"{_same(study.same_state)} (SHA-256 {study.after.digest[:16]}...)")
    table.add_row("hooks", f"{len(study.after.hooks)} on the model, {len(study.before.hooks)} before")
    yield table
    yield verdict(study.left_no_trace, "nothing is left behind", "the model is not what it was; please report this")


PAGES: dict[str, Callable[[Study], Page]] = {
    "A sequence that repeats itself": repetition,
    "After which layer is the answer known?": lens,
    "Which heads look it up?": heads,
    "Does the model need them?": knockout,
    "Which way does the answer take?": tracing,
    "Can it be made to search for something else?": steering,
    "Is the model what it was?": proof,
}


def _blind(study: Study) -> float:
    return math.log(study.config.vocab_size)


def _layer_before(study: Study, reading: LayerReading) -> str:
    place = study.readings.index(reading)
    if place == 0:
        return ""
    earlier = study.readings[place - 1]
    return f", and in {earlier.share_on_top:.0%} of them at {earlier.point}"


def _one_sight(study: Study) -> Text:
    found = study.knockouts
    cut, beside = (loss.second - found.nothing.second for loss in (found.cut, found.cut_beside))
    elsewhere = found.cut.first - found.nothing.first
    return verdict(
        cut > max(2 * beside, _CLEAR),
        f"it is this one sight that counts: without it the loss rises by {cut:.2f} (and by {elsewhere:z.2f} the first "
        f"time), without the place beside it by {beside:z.2f}",
        f"this one sight does not count for much more than that beside it: {cut:z.2f} against {beside:z.2f}",
    )


def _same(same: bool) -> str:
    return "the same, bit for bit" if same else "NOT the same"
