"""The study of SmolLM2 as a text: every number is one that was measured, every conclusion depends on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from kamui.cli.demo.facts import ANSWER, AT, FACT, OTHER_ANSWER, OTHER_FACT, PAIRS, PROMPTS, FactStudy
from kamui.cli.demo.layout import code, columns, grid, share, verdict
from kamui.cli.demo.story import Page, proof
from kamui.cli.terminal import plain

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from kamui.cli.demo.facts import Opinion


def tell_facts(out: Console, study: FactStudy) -> None:
    """Print the whole study."""
    out.print(Text("KAMUI", "bold magenta"), Text("where a language model keeps a fact", "bold"))
    out.print(f"SmolLM2-135M-Instruct, {len(study.readings)} blocks\n")
    for number, (title, page) in enumerate(PAGES.items(), start=1):
        out.print(Rule(Text(f"{number}  {title}", "bold"), align="left", style="dim"))
        for part in page(study):
            out.print(Padding(part, (0, 0, 1, 3), expand=False))
    out.print(Text("The same as a script to copy from: examples/eiffel_tower.py", "dim"))


def lens(study: FactStudy) -> Page:
    """Yield after which block the answer is on top."""
    yield Text(f"{FACT!r} goes on with {ANSWER!r}, the model says with probability {study.probability:.2f}.")
    yield code('lens = hooks.use("logit_lens", positions=-1)')
    readings = study.readings
    first = next((at for at, reading in enumerate(readings) if reading.rank == 0), None)
    shown = range(len(readings))[-8:] if first is None else range(max(first - 5, 0), min(first + 3, len(readings)))
    table = columns("after", f"rank of {ANSWER!r}", "probability")
    for at in shown:
        table.add_row(readings[at].point, str(readings[at].rank), share(readings[at].probability))
    yield table
    yield verdict(
        first is not None,
        "" if first is None else f"the lens first says {ANSWER!r} at {readings[first].point}",
        f"after no block does the lens say {ANSWER!r}",
    )


def tracing(study: FactStudy) -> Page:
    """Yield which block and position carry the fact."""
    yield code(
        "patcher = ActivationPatcher(model)", 'patcher.sweep(fact, other_fact, metric=..., at="blocks.*.output")'
    )
    yield Text(
        f"{OTHER_FACT!r} has as many tokens, and {OTHER_ANSWER!r} follows. One activation of the first run at a time "
        f"is put into this one: 1 turns {OTHER_ANSWER!r} to {ANSWER!r}, 0 does nothing."
    )
    yield _sweep_table(study)
    at, carriers, scores = study.handover, study.carriers, study.sweep.scores
    said = ""
    if at is not None:
        rank = (study.readings[at - 1].rank, study.readings[at].rank)
        said = (
            f"until {study.sweep.points[at - 1]} the fact is carried at {study.tokens[carriers[0]]!r} "
            f"(up to {scores[:at].max():.2f}), from {study.sweep.points[at]} on at the last token (up to "
            f"{scores[at:].max():.2f}); at that block the lens takes {ANSWER!r} from rank {rank[0]} to {rank[1]}"
        )
    yield verdict(at is not None, said, "the fact does not go from one token straight to the last one")


def steering(study: FactStudy) -> Page:
    """Yield what a vector does to what the model says."""
    opinions = study.opinions
    yield code(f'steering = hooks.use("steering", at="{AT}")', "steering.fit(blame, praise)")
    yield Text(
        f"A vector from {len(PAIRS)} pairs of sentences, such as {PAIRS[0][0]!r} and {PAIRS[0][1]!r}, is added at "
        f"every token. How does the model go on, greedily, and how likely are words of praise and of blame?"
    )
    table = columns("", "praise", "blame", "text")
    for prompt, *said in zip(PROMPTS, *opinions, strict=True):
        table.add_row("", "", "", plain(f"{prompt} ...", "dim"))
        for name, opinion in zip(("as it is", "steered", "random"), said, strict=True):
            table.add_row(name, f"{opinion.praise:.1%}", f"{opinion.blame:.1%}", plain(opinion.text.strip()))
    yield table
    bare, steered, control = (_mean_blame(each) for each in opinions)
    changed = sum(a.text != b.text for a, b in zip(opinions.plain, opinions.steered, strict=True))
    numbers = (
        f"of praise and blame, blame has {bare:.0%} without the vector, {steered:.0%} with it, and {control:.0%} with "
        f"a random one of the same length"
    )
    yield verdict(
        steered > 0.5 > max(bare, control) and changed > 0,
        f"the vector turns praise into blame: {numbers}",
        f"the vector does not turn praise into blame: {numbers}",
    )


PAGES: dict[str, Callable[[FactStudy], Page]] = {
    "After which block is the answer known?": lens,
    "Where is the fact, and how does it get to the end?": tracing,
    "Can the model be made to dislike things?": steering,
    "Is the model what it was?": proof,
}


def _sweep_table(study: FactStudy, step: int = 4) -> Table:
    """Return the scores of some blocks, those around the handover among them."""
    table = grid("", *(token.strip() for token in study.tokens))
    around = set() if study.handover is None else {study.handover - 1, study.handover}
    last = len(study.readings) - 1
    for row in sorted({*range(0, last, step), last} | around):
        cells = (Text(f"{score:.2f}", "bold green" if score > 0.5 else "dim") for score in study.sweep.scores[row])
        table.add_row(study.sweep.points[row], *cells)
    return table


def _mean_blame(opinions: tuple[Opinion, ...]) -> float:
    return sum(opinion.share_of_blame for opinion in opinions) / len(opinions)
