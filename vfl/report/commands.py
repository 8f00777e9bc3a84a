"""``vfl report`` and ``vfl runs``: what runs have left behind."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from vfl.report.run_argument import RUNS, meant, or_newest
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import to_json

if TYPE_CHECKING:
    from vfl.report.reading import Own


@click.command(epilog=EXIT_CODES)
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=click.Path(path_type=Path))
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
def report(runs: tuple[Path, ...], baselines: bool, threshold: str | None) -> None:
    """Print the table of RUN again, and write a page about it, report.html, with pictures as PNG.

    RUN is the folder of a run, or a party's folder in it, or its summary.json; if it is left out,
    the newest finished run of a federation, not of a baseline, in the folder runs. A passive party
    gets no summary, and nobody has one before the run ends: table and page show the party's own
    counts. Several runs are compared in one page, comparison.html, in the first one's folder of
    runs. The folder of a study or of a search gets a page, too.

    The page is one file without scripts: what the model does, how good it is, what the other
    parties add, what left each party, what it cost. Baselines of the same rows stand beside it.

    \b
    Examples:
      vfl report runs/20260101-120000-digits-1f2e
      vfl report --baselines                 train alone and in one place first, to compare
      vfl report --threshold cost=1:5        a missed row costs five times a false alarm
      vfl report runs/*-digits-*             compare runs, seeds as mean and deviation
    """
    from vfl.report.page import command as page
    from vfl.report.page.search_page import is_search
    from vfl.report.page.study_page import is_study
    from vfl.report.reading import find, own_notes

    if len(runs) > 1:
        click.echo(page.page_of_runs([find(meant(each)) for each in runs]))
        return
    run = or_newest(runs[0] if runs else None)
    own = own_notes(run)
    if is_study(run):
        click.echo(page.page_of_study(run))
    elif is_search(run):
        click.echo(page.page_of_search(run))
    elif own is not None:
        _show_own(run, own)
        if own.role == "passive":
            click.echo(page.page_of_party(own.folder))
    else:
        _show_run(run, baselines, threshold)


def _show_own(run: Path, own: Own) -> None:
    """Prints what one process has noted of a run of which there is no summary."""
    from vfl.report.reading import importance, initial
    from vfl.report.table import show_own

    show_own(own)
    for line in [*importance(run), *initial(run)]:
        click.echo(line)
    if own.goes_on:
        click.echo(f"{run}: {own.end.sentence}")
    if own.role == "passive":
        text = "a passive party has no summary of the run; the server and the active party do"
    else:
        text = "its summary comes at the end" if own.goes_on else "its summary.json is missing"
    click.echo(f"{run}: {text}")


def _show_run(run: Path, baselines: bool, threshold: str | None) -> None:
    """Prints a finished run, draws it, and writes its page."""
    from vfl.report.charts import draw
    from vfl.report.page import command as page
    from vfl.report.reading import find, importance, initial, of_run, role_of
    from vfl.report.rounds import Source
    from vfl.report.table import show

    found = find(run)
    show(found.summary, found.phases)
    for line in [*importance(run), *initial(run)]:
        click.echo(line)
    click.echo(page.page_of_run(found, baselines=baselines, threshold=threshold))
    # What a passive party would see on its own machine.
    if of_run(run) != run and role_of(Source(run)) == "passive":
        click.echo(page.page_of_party(run))
    paths = draw(found)
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
    unfinished: it runs now, was killed, or was pruned or failed in a search. A study's runs are
    listed with --out OUT/STUDY, a search's with --out OUT/SEARCH/runs.

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
