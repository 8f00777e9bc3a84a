"""``vfl report`` and ``vfl runs``: commands that show finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from vfl.summary.run_argument import RUNS, locate_or_newest, locate_run
from vfl_common.errors import Code, InputError
from vfl_common.process.program import EXIT_CODES
from vfl_common.text import to_json

if TYPE_CHECKING:
    from vfl.summary.reading import ProcessNotes, RunRecord
    from vfl_common.config.task import ThresholdRule

# The file name of the page that compares several runs, in the folder of runs.
_COMPARISON = "comparison.html"


@click.command(epilog=EXIT_CODES)
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=click.Path(path_type=Path))
@click.option(
    "--baselines",
    is_flag=True,
    help="Train the missing baselines first, for a run made on this machine.",
)
@click.option(
    "--threshold",
    metavar="RULE",
    help="Show decisions at another threshold: a number, f1, rate=0.1, or cost=1:5.",
)
def report(runs: tuple[Path, ...], baselines: bool, threshold: str | None) -> None:
    """Print the tables of RUN, and write an HTML report.

    RUN is the folder of a run, a party's folder in it, or its summary.json. Without RUN, the
    command takes the newest finished run of a federation, not of a baseline, in the folder runs. A
    passive party gets no summary, and no process has one before the run ends. In these cases the
    tables and the page show the party's own counts. Several runs are compared in one page,
    comparison.html, next to the folder of the first run. RUN can also be the folder of a study or
    of a search.

    The page, report.html, is one file without scripts. It shows what the model does, how good it
    is, what the other parties contribute, what each party sent, and the cost. It compares the run
    with baselines on the same rows. Charts are also written as PNG. The rules f1, rate and cost of
    --threshold choose a threshold on the validation rows.

    \b
    Examples:
      vfl report runs/20260101-120000-digits-1f2e
      vfl report --baselines                 train baselines first, and compare with them
      vfl report --threshold cost=1:5        a false negative costs five false positives
      vfl report runs/*-digits-*             compare runs, with mean and deviation over seeds
    """
    from vfl.summary.reading import find, read_process_notes
    from vfl_lab.report.page.search_page import is_search
    from vfl_lab.report.page.study_page import is_study

    if len(runs) > 1:
        click.echo(write_comparison_page([find(locate_run(run)) for run in runs]))
        return
    run = locate_or_newest(runs[0] if runs else None)
    notes = read_process_notes(run)
    if is_study(run):
        click.echo(write_study_page(run))
    elif is_search(run):
        click.echo(write_search_page(run))
    elif notes is not None:
        _show_notes(run, notes)
        if notes.role == "passive":
            click.echo(write_party_page(notes.folder))
    else:
        _show_run(run, baselines, threshold)


def _show_notes(run: Path, notes: ProcessNotes) -> None:
    """Prints the records of one process about a run that has no summary."""
    from vfl.summary.reading import describe_initial_weights, read_importance
    from vfl.summary.table import show_notes

    show_notes(notes)
    for line in [*read_importance(run), *describe_initial_weights(run)]:
        click.echo(line)
    if notes.unfinished:
        click.echo(f"{run}: {notes.end.sentence}")
    if notes.role == "passive":
        click.echo(
            f"{run}: a passive party has no summary; the server and the active party have it"
        )
    elif notes.unfinished:
        click.echo(f"{run}: the summary is written at the end of the run")
    else:
        click.echo(f"{run}: summary.json is missing")


def _show_run(run: Path, baselines: bool, threshold: str | None) -> None:
    """Prints a finished run, draws it, and writes its page."""
    from vfl.summary.reading import (
        describe_initial_weights,
        find,
        find_role,
        find_run_folder,
        read_importance,
    )
    from vfl.summary.rounds import PartyFolder
    from vfl.summary.table import print_tables
    from vfl_lab.report.charts import draw

    record = find(run)
    print_tables(record.summary, record.phases)
    for line in [*read_importance(run), *describe_initial_weights(run)]:
        click.echo(line)
    click.echo(write_run_page(record, baselines=baselines, threshold=threshold))
    # A passive party also gets the page that it would see on its own machine.
    if find_run_folder(run) != run and find_role(PartyFolder(run)) == "passive":
        click.echo(write_party_page(run))
    paths = draw(record)
    for path in paths:
        click.echo(path)
    if not any(path.name == "learning-curves.png" for path in paths):
        click.echo(
            "no learning curves: no metrics.jsonl in this folder has more than one round with "
            "metrics"
        )


@click.command(epilog=EXIT_CODES)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=RUNS,
    show_default=True,
    help="List the runs of this folder.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print a JSON line for each run instead of the table."
)
def runs(out: Path, as_json: bool) -> None:
    """List the runs in OUT, the newest first.

    The state of a run is finished, failed, stopped or unfinished. An unfinished run is still
    running, was killed, or was pruned or failed in a search. List the runs of a study with --out
    OUT/STUDY, and those of a search with --out OUT/SEARCH/runs.

    \b
    Examples:
      vfl runs
      vfl runs --json | jq -r 'select(.state == "finished") | .folder'
    """
    from vfl.summary.reading import find_runs
    from vfl_lab.report.runs import show_runs

    all_runs, others = find_runs(out)
    if as_json:
        for run in all_runs:
            click.echo(to_json(run.as_json(), compact=True))
    else:
        show_runs(all_runs, others)


def write_run_page(
    run: RunRecord, *, baselines: bool = False, threshold: str | None = None
) -> Path:
    """Writes ``report.html`` into a run's folder, and returns its path.

    Args:
        run: The run to report.
        baselines: Whether to train the missing baselines first.
        threshold: The threshold or its rule, in a format of ``parse_threshold``.

    Raises InputError.
    """
    from vfl_lab.report.page.baselines import (
        find_baselines,
        list_possible_baselines,
        train_baselines,
    )
    from vfl_lab.report.page.facts import Facts
    from vfl_lab.report.page.render import FILE, write
    from vfl_lab.report.page.run_page import make_run_page

    rule = None if threshold is None else parse_threshold(threshold)
    facts = Facts(run)
    if baselines:
        trained = find_baselines(facts)
        train_baselines(
            facts, [kind for kind in list_possible_baselines(facts) if kind not in trained]
        )
    return write(make_run_page(facts, find_baselines(facts), rule), run.folder / FILE)


def write_party_page(folder: Path) -> Path:
    """Writes ``report.html`` into a passive party's folder, and returns its path.

    Raises InputError.
    """
    from vfl_lab.report.page.party_page import make_party_page
    from vfl_lab.report.page.render import FILE, write

    return write(make_party_page(folder), folder / FILE)


def write_study_page(folder: Path) -> Path:
    """Writes ``report.html`` into a study's folder, and returns its path. Raises InputError."""
    from vfl_lab.report.page.render import FILE, write
    from vfl_lab.report.page.study_page import make_study_page

    return write(make_study_page(folder), folder / FILE)


def write_search_page(folder: Path) -> Path:
    """Writes ``report.html`` into a search's folder, and returns its path. Raises InputError."""
    from vfl_lab.report.page.render import FILE, write
    from vfl_lab.report.page.search_page import make_search_page

    return write(make_search_page(folder), folder / FILE)


def write_comparison_page(runs: Sequence[RunRecord]) -> Path:
    """Writes ``comparison.html`` next to the folder of the first run, and returns its path.

    Raises InputError.
    """
    from vfl_lab.report.page.facts import Facts
    from vfl_lab.report.page.render import write
    from vfl_lab.report.page.several import make_comparison_page

    return write(
        make_comparison_page([Facts(run) for run in runs]), runs[0].folder.parent / _COMPARISON
    )


def parse_threshold(text: str) -> ThresholdRule | float:
    """Parses a threshold: ``0.3``, ``f1``, ``rate=0.1`` or ``cost=1:5`` (the costs of a false
    positive and of a false negative). Raises InputError.
    """
    from vfl_common.config.task import ThresholdRule

    name, _, value = text.partition("=")
    try:
        if name == "f1" and not value:
            return ThresholdRule(rule="f1")
        if name == "rate":
            return ThresholdRule(rule="rate", rate=float(value))
        if name == "cost":
            false_positive, false_negative = map(float, value.split(":"))
            return ThresholdRule(
                rule="cost", false_positive=false_positive, false_negative=false_negative
            )
        threshold = float(text)
        if 0 < threshold < 1:
            return threshold
    except ValueError:
        pass
    raise InputError(
        Code.CONFIG_INVALID,
        f"--threshold: is not a threshold (got {text[:40]!r}). Give a number between 0 and 1, f1, "
        "rate=0.1, or cost=1:5.",
    )
