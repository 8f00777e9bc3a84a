"""The command ``vfl card``, which writes a model card of a trained run."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.summary.run_argument import run_argument
from vfl_common.process.program import EXIT_CODES


@click.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--party",
    metavar="NAME",
    help="Write the card of this party, from its own folder. [default: the only one here, or all]",
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write the card to FILE. [default: model-card.md in the folder of the run or of --party]",
)
def card(run: Path, party: str | None, out: Path | None) -> None:
    """Write a model card of RUN in Markdown.

    RUN is the folder of a run, or a party's folder in it. Each party can write its own card from
    its own folder. The card contains facts from these files. Places that a person must fill in are
    marked TO WRITE. Write your text between the marks: it is kept when the card is written again. A
    file with text outside of the marks is not overwritten. The card has no names, categories or
    statistics of columns.

    \b
    Examples:
      vfl card runs/20260101-120000-churn-1f2e
      vfl card runs/20260101-120000-churn-1f2e/shop --out shop.md
    """
    from vfl_lab.card.model_card import read_run, write
    from vfl_lab.card.model_card import render_card as render_card

    facts = read_run(run, party)
    out = out or facts.folder / facts.party / "model-card.md"
    unwritten = write(out, render_card(facts))
    click.echo(out)
    if unwritten:
        click.echo(f"to write: {', '.join(unwritten)}", err=True)
