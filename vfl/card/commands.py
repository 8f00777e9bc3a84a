"""``vfl card``: a model card of a trained run."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.report.run_argument import run_argument
from vfl_common.process.program import EXIT_CODES


@click.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--party",
    metavar="NAME",
    help="Whose card, told from its own folder. [default: the only one whose folder is here, or "
    "all that is here]",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="The card. [default: model-card.md in the run's folder, or in that of --party]",
)
def card(run: Path, party: str | None, out: Path | None) -> None:
    """Write a model card of RUN in Markdown, with what its files say; what a person must write is
    marked TO WRITE.

    RUN is the folder of a run, or a party's folder in it; each party can write its own card from
    its own folder. Write your words between the marks: when the card is written again, they stay.
    A file with words outside of the marks is not overwritten. The card has no names, categories or
    statistics of columns.

    \b
    Examples:
      vfl card runs/20260101-120000-churn-1f2e
      vfl card runs/20260101-120000-churn-1f2e/shop --out shop.md
    """
    from vfl.card.known import known
    from vfl.card.marks import write
    from vfl.card.sections import card as written

    found = known(run, party)
    out = out or found.folder / found.party / "model-card.md"
    left = write(out, written(found))
    click.echo(out)
    if left:
        click.echo(f"to write: {', '.join(left)}", err=True)
