"""Prints the progress and the results of ``vfl study``, as text or as JSON lines."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from vfl.library.simulate import open_run_maker
from vfl_common.text import count, to_json
from vfl_lab.studies.comparison import compare_methods, make_differences_table
from vfl_lab.studies.plan import Pipeline, StudyFile, load_study
from vfl_lab.studies.report import FineTuned, table
from vfl_lab.studies.run import StudyFailed, run_study

# The width of the table in characters if the output is not a terminal.
PIPE_WIDTH = 120


class _Failed(click.ClickException):
    """Prints the message of a failed study, and ends the command with its exit code."""

    def __init__(self, failed: StudyFailed) -> None:
        super().__init__(str(failed))
        self.exit_code = failed.exit_code  # type: ignore[misc]

    def show(self, file: Any = None) -> None:
        """Prints the error message."""
        click.echo(f"error: {self.message}", err=True, file=file)


def format_event(event: dict[str, Any], metric: str = "accuracy") -> str:
    """Formats an event of a study as a line of text."""
    kind = event["event"]
    if kind == "study":
        done = event["runs"] - event["left"]
        return f"{count(event['runs'], 'run')}, {done} already finished: {event['folder']}"
    head = f"[{event['number']}/{event['of']}] {event['title']}"
    if kind == "begin":
        return head
    if kind == "failed":
        return f"{head}: failed: {event['error']}"
    value = f"{metric} {event['metric']:.4g}, " if event["metric"] is not None else ""
    remaining = f"; about {format_duration(event['left_s'])} left" if event["left_s"] else ""
    return f"{head}: {value}{event['seconds']:.1f} s{remaining}"


def format_duration(seconds: float) -> str:
    """Formats a duration, such as ``45 s`` or ``12 min``."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def show_study(
    path: Path,
    out: Path,
    *,
    jobs: int,
    folds: int | None = None,
    backend: str | None = None,
    as_json: bool,
) -> None:
    """Runs a study, prints its progress, and then its results as a table.

    ``as_json``: Whether to print events as JSON lines instead. ``backend``: The joblib backend that
    makes the runs, see ``vfl.jobs.open_pool``.
    """
    study, chains = load_study(path, folds=folds)
    errors = Console(stderr=True)

    def say(event: dict[str, Any]) -> None:
        if as_json:
            click.echo(to_json(event, compact=True))
        elif event["event"] != "begin" or errors.is_terminal:
            errors.print(
                format_event(event, study.metric), markup=False, highlight=False, soft_wrap=True
            )

    live = errors.is_terminal and not as_json and backend is None
    backend_jobs = contextlib.nullcontext() if backend is None else open_run_maker(jobs, backend)
    try:
        with backend_jobs as make:
            results = run_study(path, out, jobs=jobs, folds=folds, tell=say, live=live, make=make)
    except StudyFailed as failed:
        _show_results(study, chains, failed.results, out, as_json)
        raise _Failed(failed) from None
    _show_results(study, chains, results, out, as_json)


def _show_results(
    study: StudyFile,
    chains: Sequence[Pipeline],
    results: Sequence[FineTuned],
    out: Path,
    as_json: bool,
) -> None:
    compared = compare_methods(study, chains, results)
    if as_json or not results:
        for result in results:
            click.echo(to_json({"event": "result", **result.row()}, compact=True))
        for row in compared:
            click.echo(to_json({"event": "difference", **row.row()}, compact=True))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, PIPE_WIDTH)
    console.print()
    console.print(table(study, results))
    if compared:
        console.print()
        console.print(make_differences_table(study, compared))
    folder = out / study.name
    names = ["results.csv", "results.png"]
    names += ["differences.csv", "differences.png"] if compared else []
    click.echo("\n" + "\n".join(str(folder / name) for name in names))
