"""Commands that show and study runs: ``vfl report``, ``runs``, ``card``, ``study`` and
``watch``.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from vfl.summary.run_argument import RUNS, locate_or_newest, locate_run, out_option, run_argument
from vfl_common.errors import Code, InputError
from vfl_common.process.logs import utc
from vfl_common.process.program import EXIT_CODES, add_stop_text
from vfl_common.text import clean, to_json

if TYPE_CHECKING:
    from rich.console import Console

    from vfl.summary.reading import ListedRun, ProcessNotes, RunRecord
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
    from vfl_lab.report.many_runs import is_search, is_study

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
    from vfl_lab.report.facts import (
        Facts,
        find_baselines,
        list_possible_baselines,
        train_baselines,
    )
    from vfl_lab.report.render import FILE, write
    from vfl_lab.report.run_page import make_run_page

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
    from vfl_lab.report.party_page import make_party_page
    from vfl_lab.report.render import FILE, write

    return write(make_party_page(folder), folder / FILE)


def write_study_page(folder: Path) -> Path:
    """Writes ``report.html`` into a study's folder, and returns its path. Raises InputError."""
    from vfl_lab.report.many_runs import make_study_page
    from vfl_lab.report.render import FILE, write

    return write(make_study_page(folder), folder / FILE)


def write_search_page(folder: Path) -> Path:
    """Writes ``report.html`` into a search's folder, and returns its path. Raises InputError."""
    from vfl_lab.report.many_runs import make_search_page
    from vfl_lab.report.render import FILE, write

    return write(make_search_page(folder), folder / FILE)


def write_comparison_page(runs: Sequence[RunRecord]) -> Path:
    """Writes ``comparison.html`` next to the folder of the first run, and returns its path.

    Raises InputError.
    """
    from vfl_lab.report.facts import Facts
    from vfl_lab.report.many_runs import make_comparison_page
    from vfl_lab.report.render import write

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


_MAIN_METRICS = ("accuracy", "auc", "rmse")


# Maximum number of characters in a line of the table.
_MAX_WIDTH = 400


# Maximum number of characters of a name that another party or person chose.
_MAX_CHARACTERS = 60


def show_runs(runs: list[ListedRun], others: list[Path], console: Console | None = None) -> None:
    """Prints a table of the runs, with their metrics on the test rows."""
    from rich.console import Group
    from rich.text import Text

    from vfl.summary.table import PIPE_WIDTH, new_table, wide_console

    table = new_table("Runs, with metrics of the test rows")
    metric_names = [
        name for name in _MAIN_METRICS if any(name in _get_test_metrics(run) for run in runs)
    ]
    for heading in ("run", "began (UTC)", "method", "seed", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in (*metric_names, "bytes", "seconds"):
        table.add_column(heading, no_wrap=True, justify="right")
    for run in runs:
        table.add_row(*_make_row(run, metric_names))
    parts: list[Any] = [table] if runs else [Text("no runs")]
    if any(run.state == "unfinished" for run in runs):
        parts += [Text("unfinished: running, killed, or pruned or failed in a search", "dim")]
    if others:
        names = ", ".join(clean(path.name, _MAX_CHARACTERS) for path in others)
        parts += [Text(f"folders without a run: {names}", "dim")]
    console = console or wide_console()
    table_width = console.measure(
        table, options=console.options.update(max_width=_MAX_WIDTH)
    ).maximum
    # A narrow terminal wraps long lines, so names and numbers are never cut off.
    console.width = max(console.width, PIPE_WIDTH, table_width)
    console.print(Group(*parts))


def _get_test_metrics(run: ListedRun) -> dict[str, float]:
    return run.summary.metrics.get("test", {}) if run.summary is not None else {}


def _make_row(run: ListedRun, metric_names: list[str]) -> tuple[str, ...]:
    from vfl.summary.table import format_size

    began = utc(run.began_s)[:16].replace("T", " ")
    name = clean(run.folder.name, _MAX_CHARACTERS)
    if run.state == "study":
        return (f"{name}/", began, "", "", f"{run.runs} runs")
    method = clean(run.method, _MAX_CHARACTERS)
    if run.job == "predict":
        method = (
            f"prediction with {clean(run.model, _MAX_CHARACTERS)}" if run.model else "prediction"
        )
    start = (name, began, method, "" if run.seed is None else str(run.seed), run.state)
    if run.summary is None:
        return start
    metrics = [
        f"{_get_test_metrics(run)[name]:.4g}" if name in _get_test_metrics(run) else ""
        for name in metric_names
    ]
    return (
        *start,
        *metrics,
        format_size(run.summary.bytes.total.message_bytes),
        f"{run.summary.wall_s:.1f}",
    )


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
    from vfl_lab.report.model_card import read_run, write
    from vfl_lab.report.model_card import render_card as render_card

    facts = read_run(run, party)
    out = out or facts.folder / facts.party / "model-card.md"
    unwritten = write(out, render_card(facts))
    click.echo(out)
    if unwritten:
        click.echo(f"to write: {', '.join(unwritten)}", err=True)


@click.command(epilog=EXIT_CODES)
@click.argument("study", type=click.Path(path_type=Path))
@out_option
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Run this many federations at once.",
)
@click.option(
    "--backend",
    metavar="NAME",
    help="Run federations with a joblib backend: loky, ray, spark or dask.",
)
@click.option(
    "--folds",
    type=click.IntRange(2, 1000),
    help="Cross-validate with this many folds, instead of the file's.",
)
@click.option(
    "--json", "as_json", is_flag=True, help="Print JSON lines instead of progress and table."
)
def study(
    study: Path, out: Path, jobs: int, backend: str | None, folds: int | None, as_json: bool
) -> None:
    """Compare methods by many runs, or search settings.

    STUDY is a TOML file. For a comparison, it names a recipe, seeds, label counts, and methods with
    their phases (docs/how-to/results/study.md). For a search, it names a recipe, and in the table
    [search] the values to try (docs/how-to/python/study.md). Each run is a federation like those
    of `vfl simulate`. One pretraining is used for all label counts. The same command resumes a
    study that was stopped or killed; it does not repeat finished runs. A failed run does not stop
    the other runs. With at least three seeds or folds, every method is compared with the first
    method, over runs with the same seed and fold.

    A search chooses settings by a metric on the validation rows. Several commands can work on the
    same search, even on several machines that share OUT. The backend dask needs the address of its
    scheduler in DASK_SCHEDULER_ADDRESS.

    \b
    The folder OUT/<study>/ gets a folder for each run, and results and differences as .csv and
    .png. For a search, it gets trials.csv, parallel.png and importance.png. `vfl report
    OUT/<study>` makes a page.

    \b
    Examples:
      vfl study examples/study/digits.toml
      vfl study examples/study/search.toml --jobs 2
    """
    from vfl_lab.searching.search import is_search, show_search
    from vfl_lab.studies.run import show_study

    if is_search(study):
        if folds is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{study}: --folds cannot be used for a search. Set rows.folds and rows.fold in "
                "the recipe.",
            )
        show_search(study, out, jobs=jobs, backend=backend, as_json=as_json)
        return
    show_study(study, out, jobs=jobs, folds=folds, backend=backend, as_json=as_json)


# The command ``vfl watch``, which shows the progress of a run in a browser.
@click.command(epilog=EXIT_CODES)
@click.argument("run", metavar="[RUN|FOLDER]", required=False, type=click.Path(path_type=Path))
@click.option(
    "--port",
    default=0,
    show_default="a free port",
    type=click.IntRange(0, 65_535),
    help="Listen on this port of 127.0.0.1.",
)
# Programs of a run start ``vfl watch`` with this hidden option: see ``vfl_common.process.program``.
@click.option("--beside", is_flag=True, hidden=True)
def watch(run: Path | None, port: int, beside: bool) -> None:
    """Show the progress of a run in a browser.

    The page shows phases, rounds, learning curves, remaining time, processes, bytes and the log.
    RUN is the folder of a run, or of one process in it. FOLDER is a folder of runs, whose newest
    run is shown; when another run begins, the page switches to it. The default is the folder runs.
    Only files on this machine are read, and only while a browser has the page open. The printed
    link contains a token: anyone who has the link can see the page. Ctrl-C ends the page, not the
    run.

    \b
    Examples:
      vfl watch
      vfl watch runs/20260101-120000-digits-1f2e
      ssh -L 8700:127.0.0.1:8700 host vfl watch --port 8700      a run on another machine
    """
    path = RUNS if run is None else locate_run(run)
    if not path.is_dir() and not beside:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: no such folder. Give the folder of a run, or a folder of runs.",
        )
    try:
        from vfl_lab.watch.serve import Page, Picture, listen
    except ImportError as error:
        raise InputError(
            Code.CONFIG_INVALID,
            "vfl watch: FastAPI or uvicorn cannot be imported "
            f"({str(error).splitlines()[0]}). Run pip install '.[watch]' in the clone of vfl.",
        ) from None

    try:
        listening = listen(port)
    except OSError as error:
        raise InputError(
            Code.ADDRESS_IN_USE,
            f"--port {port}: cannot listen on 127.0.0.1 ({os.strerror(error.errno or 0)}). "
            "Choose another port.",
        ) from None
    with listening, add_stop_text("the run goes on"):
        page = Page(Picture(path), listening)
        click.echo(page.link)
        sys.stdout.flush()
        page.serve(_end_with_parent if beside else None)


def _end_with_parent(end: Callable[[], None]) -> None:
    """Calls ``end`` when the parent program ends, which closes this process's standard input."""

    def wait() -> None:
        while os.read(0, 1):
            pass
        end()

    threading.Thread(target=wait, name="starter", daemon=True).start()
