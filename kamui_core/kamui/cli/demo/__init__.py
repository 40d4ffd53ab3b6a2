"""`kamui demo`: how a small trained model continues what repeats, found out in seven steps.

Each step is a module that may be copied from: `sequences`, `layers`, `heads`, `knockout`, `tracing`, `steering` and
`proof`. `study` takes the steps in order, `story` prints what was found and `pictures` draws it.
"""

from __future__ import annotations

from pathlib import Path

import click


@click.command("demo", short_help="Study a small trained model in seven steps.")
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write pictures to this folder; needs the extra 'viz'.",
)
@click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="Draws the sequences.")
@click.pass_context
def demo_command(ctx: click.Context, out: Path | None, seed: int) -> None:
    """Find the induction heads of a small trained model, knock them out, and steer them."""
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
    if not study.left_no_trace:
        ctx.exit(1)
