"""The study as a text: every number is one that was measured, every conclusion depends on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from kamui.cli.demo.steering import AT, FULL
from kamui.cli.demo.study import Study

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from kamui.cli.demo.layers import LayerReading
    from kamui.cli.demo.sequences import Loss

Page = Iterator["RenderableType"]


def tell(out: Console, study: Study) -> None:
    """Print the whole study."""
    config = study.config
    out.print(Text("KAMUI", "bold magenta"), Text("how a small transformer continues what repeats", "bold"))
    out.print(
        f"trained checkpoint 'nano': {config.n_layers} layers of {config.n_heads} heads, D {config.d_model}, "
        f"{config.vocab_size} tokens\n"
    )
    for number, (title, page) in enumerate(PAGES.items(), start=1):
        out.print(Rule(Text(f"{number}  {title}", "bold"), align="left", style="dim"))
        for part in page(study):
            out.print(Padding(part, (0, 0, 1, 3)))


def repetition(study: Study) -> Page:
    """Yield what the model was given, and how well it continues it."""
    n = study.sequences.length
    yield Text(
        f"{n} random tokens, and the same {n} once more. What comes next can be known in the second occurrence alone."
    )
    yield _sequence(study)
    loss, blind = study.knockouts.nothing, math.log(study.config.vocab_size)
    yield Text(
        f"mean loss over {len(study.sequences.token_ids)} such sequences: {loss.first:.2f} at first, {loss.second:.2f} "
        f"in the repetition; a blind guess has ln {study.config.vocab_size} = {blind:.2f}"
    )
    yield _verdict(
        loss.second < blind / 2 < loss.first,
        "the model continues what repeats",
        "the model does not tell the repetition from the rest",
    )


def lens(study: Study) -> Page:
    """Yield after which layer the right token is on top."""
    yield _code('hooks.use("logit_lens", at=["embed.output", "blocks.*.output"])')
    yield Text(
        "Each layer read through the model's own head: how many tokens are taken to be likelier than the right one (0 is "
        "the top), at each position of the repetition above; and how likely the right one is, over all sequences."
    )
    yield _ranks(study)
    knowing = [reading for reading in study.readings if reading.share_on_top > 0.5]
    first = knowing[0] if knowing else study.readings[-1]
    yield _verdict(
        bool(knowing),
        f"the right token comes up at {first.point}: it is on top in {first.share_on_top:.0%} of the places, and "
        f"{_before(study, first)}",
        "after no layer is the right token on top in most of the places",
    )


def heads(study: Study) -> Page:
    """Yield which heads look up what followed."""
    yield _code('hooks.attach("blocks.*.attn", "weights")')
    yield Text("Where the heads look in the repetition, as the mean of their attention:")
    table = _table("head", "what followed the token before", "the previous token")
    for head in study.heads.ranked:
        table.add_row(str(head), _share(head.induction), _share(head.previous))
    yield table
    best, found = study.heads.best, study.heads.induction
    yield _verdict(
        bool(found),
        f"{best} is an induction head: {best.induction:.0%} of its attention goes to what followed. There "
        f"{'is one such head' if len(found) == 1 else f'are {len(found)} such heads'} of {len(study.heads.ranked)}",
        f"no head gives most of its attention to what followed; {best} comes nearest with {best.induction:.0%}",
    )
    previous = study.heads.previous
    yield _verdict(
        bool(previous),
        f"what makes that possible: {len(previous)} heads in earlier layers look at the previous token, and so let a token "
        f"be found by what it follows",
        "no head of an earlier layer gives most of its attention to the previous token",
    )


def knockout(study: Study) -> Page:
    """Yield what the model can no longer do without those heads."""
    best, control = study.heads.best, study.heads.control
    yield _code(
        f'hooks.attach("{best.module}", "z", replace_with=average, heads={best.number})',
        f'hooks.attach("{best.module}", "weights", replace_with=cut, heads={best.number})',
    )
    yield Text(
        "A head is knocked out by its average output in place of its own, which is as large and tells nothing. Its sight "
        "is cut where one attention weight is set to 0: that to what followed; or, as the control, to the place after."
    )
    yield _knockouts(study)
    with_out = study.knockouts
    rise, control_rise = (loss.second - with_out.nothing.second for loss in (with_out.best, with_out.control))
    yield _verdict(
        rise > max(2 * control_rise, 0.1),
        f"without {best} the loss rises by {rise:.2f}, without the control {control} by {control_rise:.2f}",
        f"{best} is not needed more than the control {control}: without it the loss rises by {rise:.2f}, without the "
        f"control by {control_rise:.2f}",
    )
    yield _redundancy(study)
    cut, beside = (loss.second - with_out.nothing.second for loss in (with_out.cut, with_out.cut_beside))
    yield _verdict(
        cut > max(2 * beside, 0.1),
        f"it is this one look that counts: without it the loss rises by {cut:.2f}, without the look beside it by "
        f"{beside:.2f}; the loss on the first occurrence moves by {abs(with_out.cut.first - with_out.nothing.first):.2f}",
        f"this one look does not count for more than that beside it: {cut:.2f} against {beside:.2f}",
    )


def tracing(study: Study) -> Page:
    """Yield where the answer passes."""
    trace = study.trace
    yield _code('ActivationPatcher(model).sweep(clean, corrupted, metric=log_probability, at="blocks.*.output")')
    yield Text(
        f"In the corrupted input the last token (position {trace.last}) has no earlier occurrence, and there is nothing to "
        f"look up. Each activation of the clean run is put into that run by itself: 1 brings the answer back, 0 does "
        f"nothing. The best of {trace.result.scores.numel()}:"
    )
    table = _table("activation", "position", "recovery", "what stands there")
    best = trace.result.best(4)
    for point, position, score in best:
        table.add_row(Text(point), str(position), f"{score:.3f}", trace.role(position))
    yield table
    carrying = {(cell.point, cell.column) for cell in best if cell.score > 0.5}
    first, last = trace.result.points[0], trace.result.points[-1]
    yield _verdict(
        {(first, trace.follower), (last, trace.last)} <= carrying,
        "the answer waits where it stands, marked with the token that it follows, until the second layer fetches it to "
        "the end: an induction circuit",
        "the answer does not take the way of an induction circuit",
    )


def steering(study: Study) -> Page:
    """Yield what steering does."""
    steered = study.steered
    yield _code(
        f'steering = hooks.use("steering", at="{AT}", positions=-1)',
        "steering.fit(ending_in_other, ending_in_read)",
    )
    yield Text(
        f"Fresh prompts end in token {steered.read}, which they hold once before; they hold token {steered.other} as well. A "
        f"vector, fitted on other prompts, is added where the induction heads read, so that they look for {steered.other} "
        f"instead. How likely is what followed either?"
    )
    table = _table("alpha", f"what followed {steered.read}", f"what followed {steered.other}")
    for effect in steered.effects:
        table.add_row(f"{effect.alpha:.2f}", _share(effect.read), _share(effect.other))
    table.add_row(
        f"{FULL:.2f}, random vector", _share(steered.control.read), _share(steered.control.other), style="dim"
    )
    yield table
    plain, full, control = steered.at(0.0), steered.at(FULL), steered.control
    yield _verdict(
        full.other > 0.5 > control.other and plain.other < 0.5,
        f"the model looks up the other token: what followed {steered.other} goes from {plain.other:.1%} to "
        f"{full.other:.1%}, with a random vector as long to {control.other:.1%}",
        f"steering does not turn the model: what followed {steered.other} goes from {plain.other:.1%} to "
        f"{full.other:.1%}, with a random vector to {control.other:.1%}",
    )


def proof(study: Study) -> Page:
    """Yield whether the model is what it was."""
    yield _code("kamui.hooks.inspect(model)")
    difference = (study.before.logits - study.after.logits).abs().max().item()
    table = _table("of the model, after all this", "")
    table.add_row("logits", f"{_same(study.same_logits)}, largest difference {difference:g}")
    table.add_row("state dict", f"{_same(study.same_state)}, SHA-256 {study.after.digest[:16]}...")
    table.add_row("hooks on it", f"{len(study.after.hooks)}, and {len(study.before.hooks)} before")
    yield table
    yield _verdict(study.left_no_trace, "nothing is left behind", "the model is not what it was: this is a bug")


PAGES: dict[str, Callable[[Study], Page]] = {
    "A sequence that repeats itself": repetition,
    "After which layer is the answer known?": lens,
    "Which heads look it up?": heads,
    "Does the model need them?": knockout,
    "Which way does the answer take?": tracing,
    "Can it be made to look for something else?": steering,
    "Is the model what it was?": proof,
}


def _sequence(study: Study) -> Table:
    """Return the first sequence with the loss on each token, one line of the table for each occurrence."""
    n = study.sequences.length
    tokens = study.sequences.token_ids[0].tolist()
    losses = ["", *(f"{loss:.1f}" for loss in study.losses[0].tolist())]
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0), pad_edge=False)
    for title, part in (("first", slice(0, n)), ("again", slice(n, 2 * n))):
        table.add_row(Text(f"{title}  token", "bold"), *(f"{token:>3}" for token in tokens[part]))
        table.add_row("       loss", *(Text(loss.rjust(3), _heat(loss)) for loss in losses[part]))
    return table


def _heat(loss: str) -> str:
    return "green" if loss and float(loss) < 1 else "dim"


def _ranks(study: Study) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("position")
    for position in range(*study.sequences.second.indices(2 * study.sequences.length)):
        table.add_column(f"{position:>3}", justify="right")
    table.add_column("  likely", justify="right")
    for reading in reversed(study.readings):
        ranks = (Text(str(rank), _rank_style(rank)) for rank in reading.ranks[0].tolist())
        table.add_row(reading.point, *ranks, f"{reading.probabilities.mean().item():.1%}")
    return table


def _rank_style(rank: int) -> str:
    return "bold green" if rank == 0 else "yellow" if rank < 10 else "dim"


def _before(study: Study, reading: LayerReading) -> str:
    place = study.readings.index(reading)
    if place == 0:
        return "that is the first place read"
    earlier = study.readings[place - 1]
    return f"in {earlier.share_on_top:.0%} of them at {earlier.point}"


def _knockouts(study: Study) -> Table:
    found = study.knockouts
    several = f"all {len(study.heads.induction)} induction heads" if study.heads.induction else "the head nearest to it"
    table = _table("taken from the model", "first", "again", "")
    rows: list[tuple[str, Loss]] = [
        ("nothing", found.nothing),
        (f"{study.heads.best}", found.best),
        (f"{study.heads.control} (control)", found.control),
        (several, found.together),
        ("their look at what followed", found.cut),
        ("their look one place further (control)", found.cut_beside),
    ]
    for what, loss in rows:
        bar = Text("█" * round(4 * loss.second), "red" if loss.second > 1 else "green")
        table.add_row(what, f"{loss.first:.2f}", f"{loss.second:.2f}", bar)
    return table


def _redundancy(study: Study) -> Text:
    together, best = study.knockouts.together.second, study.knockouts.best.second
    blind = math.log(study.config.vocab_size)
    return _verdict(
        together > best + 0.1,
        f"the others stand in for it: without all of them the loss is {together:.2f}, where a blind guess has {blind:.2f}",
        f"without all of them the loss is {together:.2f}, not much more than without the one ({best:.2f})",
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column)
    return table


def _share(share: float) -> Text:
    filled = round(20 * share)
    return Text.assemble(f"{share:6.1%} ", ("█" * filled, "cyan"), ("░" * (20 - filled), "dim"))


def _same(same: bool) -> str:
    return "the same bit for bit" if same else "NOT the same"


def _code(*lines: str) -> Text:
    return Text("\n".join(f"│ {line}" for line in lines), "cyan")


def _verdict(holds: bool, yes: str, no: str) -> Text:
    return Text.assemble(("-> ", "bold green"), (yes, "bold")) if holds else Text.assemble(("-> no: ", "bold red"), no)
