"""``vfl report`` and ``vfl runs``: what runs have left behind."""

from __future__ import annotations

from pathlib import Path

import click

from vfl.report.run_argument import RUNS, run_argument
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import to_json


@click.command(epilog=EXIT_CODES)
@run_argument
@click.option(
    "--baselines",
    is_flag=True,
    help="Train the baselines that are missing first. Only where the run was made on this machine.",
)
@click.option(
    "--threshold",
    metavar="RULE",
    help="Show the decisions of another threshold: a number, or f1, rate=0.1, cost=1:5, which "
    "choose by the validation rows.",
)
def report(run: Path, baselines: bool, threshold: str | None) -> None:
    """Print the table of RUN again, and write a page about it, report.html, with pictures as PNG.

    RUN is the folder of a run, or a party's folder in it, or its summary.json; if it is left out,
    the newest finished run of a federation, not of a baseline, in the folder runs. A passive party
    gets no summary, and nobody has one before the run ends: the table shows the party's own counts.

    The page is one file without scripts: what the model does, how good it is, what the other
    parties add, what left each party, what it cost. Baselines of the same rows stand beside it.

    \b
    Examples:
      vfl report runs/20260101-120000-digits-1f2e
      vfl report --baselines                 train alone and in one place first, to compare
      vfl report --threshold cost=1:5        a missed row costs five times a false alarm
    """
    from vfl.report.charts import draw
    from vfl.report.page.command import page_of_run
    from vfl.report.reading import find, importance, initial, own_notes
    from vfl.report.table import show, show_own

    own = own_notes(run)
    if own is not None:
        show_own(own)
        for line in [*importance(run), *initial(run)]:
            click.echo(line)
        if own.goes_on:
            click.echo(f"{run}: {own.end.said}")
        if own.role == "passive":
            click.echo(
                f"{run}: a passive party has no summary of the run; the server and the "
                "active party do"
            )
        else:
            click.echo(
                f"{run}: "
                f"{'its summary comes at the end' if own.goes_on else 'its summary.json is missing'}"  # noqa: E501
            )
        return
    found = find(run)
    show(found.summary, found.phases)
    for line in [*importance(run), *initial(run)]:
        click.echo(line)
    paths = draw(found)
    click.echo(page_of_run(found, baselines=baselines, threshold=threshold))
    for path in paths:
        click.echo(path)
    if not any(path.name == "learning-curves.png" for path in paths):
        click.echo(
            "no learning curves: no metrics.jsonl in this folder has more than one round to draw"
        )


@click.command(epilog=EXIT_CODES)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="Folder of runs.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON line for each run instead of the table."
)
def runs(out: Path, as_json: bool) -> None:
    """List the runs in OUT, the newest first.

    A run is finished; or failed or stopped, if the log of one of its processes ends so; else
    unfinished: it runs now, or was killed. A study's runs are listed with --out OUT/STUDY.

    \b
    Examples:
      vfl runs
      vfl runs --json | jq -r 'select(.state == "finished") | .folder'
    """
    from vfl.report.runs import find_runs, show_runs

    found, others = find_runs(out)
    if as_json:
        for each in found:
            click.echo(to_json(each.as_json(), compact=True))
    else:
        show_runs(found, others)
