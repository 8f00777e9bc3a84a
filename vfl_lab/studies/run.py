"""Runs the federations of a study, for ``vfl study``. A finished run is never repeated.

The folder ``<out>/<study name>/`` gets a folder for each run, ``results.csv`` and ``results.png``.
If there are enough runs to compare, it also gets ``differences.csv`` and ``differences.png``. A run
with a summary is finished, so the same command resumes a study that was killed.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

import click
from rich.console import Console

from vfl.launcher.forks import Launcher, run_launcher
from vfl.library.simulate import open_run_maker
from vfl.simulation.live import View, make_view
from vfl.simulation.run import run_federation
from vfl_common.config.recipe import read_recorded_recipe
from vfl_common.config.spelling import find_first_difference
from vfl_common.errors import Code, InputError, VflError
from vfl_common.files import lock_file, require_folder
from vfl_common.summary import Summary, load_summary
from vfl_common.text import count, to_json
from vfl_lab.studies.comparison import compare_methods, make_differences_table, write_differences
from vfl_lab.studies.plan import Pipeline, PlannedRun, StudyFile, load_study, read_study_recipe
from vfl_lab.studies.report import Cost, FineTuned, compute_cost, table, write_csv

# Called with an event of the study, a dict of JSON values.
Tell = Callable[[dict[str, Any]], None]
# Makes a run. Its arguments: the recipe's tables, the folder of relative paths, the run's folder.
Make = Callable[[dict[str, Any], Path, Path], None]
SILENT: Tell = lambda _event: None  # noqa: E731


@dataclass(frozen=True)
class Failure:
    """A failed run. ``sentence`` is the error message."""

    title: str
    sentence: str
    code: Code = Code.INTERNAL
    exit_code: int = 1


class StudyFailed(VflError):  # noqa: N818 - a public name
    """Some runs of a study failed. The message has a line for each failed run. The code and exit
    code are those of the first failed run.

    ``results``: The results of the runs that did not fail.
    """

    def __init__(self, failures: Sequence[Failure], results: list[FineTuned]) -> None:
        lines = [f"{failure.title}: {failure.sentence}" for failure in failures]
        what = "1 run failed" if len(lines) == 1 else f"{len(lines)} runs failed"
        super().__init__(
            failures[0].code, "\n  ".join([f"{what}. Run the same command to try again:", *lines])
        )
        self.results, self._exit_code = results, failures[0].exit_code

    @property
    def exit_code(self) -> int:
        """The exit code of the first failure."""
        return self._exit_code


def run_study(
    path: Path,
    out: Path,
    *,
    jobs: int = 1,
    folds: int | None = None,
    tell: Tell = SILENT,
    live: bool = False,
    make: Make | None = None,
) -> list[FineTuned]:
    """Runs the unfinished runs of a study. Returns the results of all runs, in the plan's order.

    Args:
        path: The path of the study file.
        out: The folder in which the study gets its own folder.
        jobs: The number of federations to run at the same time.
        folds: The number of folds of a cross-validation, instead of the number in the file.
        tell: A function that is called with an event when a run begins, ends or fails.
        live: Whether to show the progress of the current federation at a terminal.
        make: A function that makes a run, for example with all parties in one process. Up to
            ``jobs`` threads call it at the same time. By default, each party gets a process.

    Raises InputError if the study cannot be run, and StudyFailed at the end if some runs failed.
    """
    study, chains = load_study(path, folds=folds)
    require_folder(out)
    folder = out / study.name
    with _lock_study(folder):
        running = StudyRunner(
            study,
            read_study_recipe(path, study)[1],
            folder,
            chains,
            tell,
            jobs,
            live and jobs == 1,
            make,
        )
        running.begin()
        if running.left:
            running.try_out()
            threads = next(
                run.recipe.simulate.threads
                for run in running.runs
                if run.recipe.simulate is not None
            )
            with run_launcher(threads) if make is None else contextlib.nullcontext() as launcher:
                running.run(launcher)
        running.record()
        if running.results:
            from vfl_lab.studies.chart import draw_differences, draw_study

            draw_study(study, running.results, folder / "results.png")
            compared = compare_methods(study, chains, running.results)
            write_differences(folder / "differences.csv", compared)
            draw_differences(study, compared, folder / "differences.png")
    if running.failures:
        raise StudyFailed(running.failures, running.results)
    return running.results


@contextlib.contextmanager
def _lock_study(folder: Path) -> Iterator[None]:
    """Locks a study's folder for the block. Raises InputError if another process has locked it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: cannot be written ({error.strerror}). Give another --out.",
        ) from None
    with lock:
        has_lock = False
        with contextlib.suppress(OSError):
            has_lock = lock_file(lock, wait=False)
        if not has_lock:
            raise InputError(
                Code.FILE_INVALID,
                f"{folder}: another study is running in this folder. Wait for its end, or give "
                "another --out.",
            )
        yield


def read_finished(folder: Path, run: PlannedRun) -> Summary | None:
    """Returns the summary of a run, or None if the run is not finished. Raises InputError if the
    run had a different recipe.
    """
    try:
        summary = load_summary(folder / run.run_id / "summary.json")
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return None
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder / run.run_id / 'summary.json'}: cannot be read ({error.strerror}). Make "
            "the file readable.",
        ) from None
    if summary.recipe_digest != run.recipe.digest():
        other_recipe = _read_recipe(folder / run.run_id, run.recipe.active.name)
        difference = (
            find_first_difference(run.recipe.canonical_json(), other_recipe)
            if other_recipe is not None
            else None
        )
        if other_recipe is None or difference is not None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{folder / run.run_id}: was run with a different recipe than that of method "
                f"{run.method} (different key: "
                f"{difference[0] if difference is not None else 'unknown'}). Delete that folder, "
                "or give another --out.",
            )
    return summary


def _read_recipe(folder: Path, party: str) -> str | None:
    """Reads the recipe in a run's folder as canonical JSON, with defaults for keys that it lacks.
    Returns None if it cannot be read.
    """
    path = folder / party / "recipe.json"
    try:
        return read_recorded_recipe(json.loads(path.read_text()), str(path)).canonical_json()
    except (OSError, ValueError, RecursionError, InputError):
        return None


def estimate_left_s(
    done: Sequence[tuple[PlannedRun, float]], left: Sequence[PlannedRun], jobs: int = 1
) -> float | None:
    """Estimates the seconds that the remaining runs will take; None if no run is finished.

    The estimate for a run is the mean of the finished runs of the same method and stage. Without
    such runs, it is the mean of the same stage, or otherwise of all finished runs.

    ``done``: [(finished run, seconds)]. ``left``: The remaining runs.
    """
    if not done:
        return None

    def estimate_s(run: PlannedRun) -> float:
        same = [s for other, s in done if (other.method, other.stage) == (run.method, run.stage)]
        same_stage = [s for other, s in done if other.stage == run.stage]
        return mean(same or same_stage or [s for _, s in done])

    return sum(estimate_s(run) for run in left) / jobs


@dataclass
class StudyRunner:
    """Runs a study, and keeps its state."""

    study: StudyFile
    # The folder that relative paths in the recipe start from.
    base: Path
    folder: Path
    chains: list[Pipeline]
    tell: Tell
    jobs: int
    live: bool
    make: Make | None = None
    failures: list[Failure] = field(default_factory=list)
    _summaries: dict[str, Summary] = field(default_factory=dict)
    # The ids of runs that failed in this process.
    _failed: set[str] = field(default_factory=set)
    _durations_s: list[tuple[PlannedRun, float]] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _stop: threading.Event = field(default_factory=threading.Event)

    @property
    def runs(self) -> list[PlannedRun]:
        """All runs, in the plan's order."""
        return list({run.run_id: run for chain in self.chains for run in chain.runs}.values())

    @property
    def left(self) -> int:
        """The number of runs that are not finished."""
        return len(self.runs) - len(self._summaries)

    @property
    def results(self) -> list[FineTuned]:
        """The results of the finished fine-tuning runs, in the plan's order."""
        return [
            self._make_result(chain, run)
            for chain in self.chains
            for run in chain.finetune
            if run.run_id in self._summaries
        ]

    def begin(self) -> None:
        """Finds the finished runs. Raises InputError if a finished run had a different recipe."""
        for run in self.runs:
            summary = read_finished(self.folder, run)
            if summary is not None:
                self._check_metric(run, summary)
                self._summaries[run.run_id] = summary
                self._durations_s.append((run, summary.wall_s))
        self.tell(
            {
                "event": "study",
                "folder": str(self.folder),
                "runs": len(self.runs),
                "left": self.left,
            }
        )

    def try_out(self) -> None:
        """Checks the plan: sets up the parties of unfinished runs without training.

        One run is checked for each method and stage, whatever its seed. If the study has several
        label counts, the smallest and the largest are checked. Raises InputError with the error of
        a party.
        """
        # This import is late because the module imports torch.
        from vfl_party.assembly.trial import Tried, try_all

        label_counts = (
            {min(self.study.labels), max(self.study.labels)} if self.study.labels else {None}
        )
        left = [run for run in self.runs if run.run_id not in self._summaries]
        kinds = {(run.method, run.stage, run.labels): run for run in reversed(left)}
        tried = [
            run
            for run in reversed(kinds.values())
            if run.stage == "pretrain" or run.labels in label_counts
        ]
        try:
            try_all(
                [Tried(run.title, run.recipe, run.stage == "finetune") for run in tried],
                self.base,
            )
        except InputError as error:
            raise InputError(error.code, f"{error} No run was started.") from None

    def run(self, launcher: Launcher | None) -> None:
        """Runs the unfinished runs. After a failure, the other runs continue."""
        if self.jobs == 1:
            for chain in self.chains:
                self._run_pipeline(chain, launcher)
            return
        # Pipelines that share a pretraining run one after the other.
        groups: dict[str, list[Pipeline]] = {}
        for chain in self.chains:
            groups.setdefault(chain.runs[0].run_id, []).append(chain)

        def run_group(chains: list[Pipeline]) -> None:
            for chain in chains:
                self._run_pipeline(chain, launcher)

        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                for future in as_completed(
                    [pool.submit(run_group, chains) for chains in groups.values()]
                ):
                    future.result()
            except BaseException:
                # An exception such as Ctrl-C also stops the current runs.
                self._stop.set()
                pool.shutdown(cancel_futures=True)
                raise

    def record(self) -> None:
        """Writes ``results.csv``, and deletes the checkpoints of finished fine-tuning runs. The
        checkpoints of pretraining runs are kept, because fine-tuning runs start from them.
        """
        results = self.results
        if results:
            write_csv(self.folder / "results.csv", results)
        for result in results:
            for checkpoints in (self.folder / result.finetune.run).glob("*/checkpoints"):
                shutil.rmtree(checkpoints, ignore_errors=True)

    def _run_pipeline(self, chain: Pipeline, launcher: Launcher | None) -> None:
        for run in chain.runs:
            if run.run_id in self._summaries or run.run_id in self._failed or self._stop.is_set():
                continue
            if (
                run.stage == "finetune"
                and chain.pretrain is not None
                and chain.pretrain.run_id not in self._summaries
            ):
                self._fail(Failure(run.title, "its pretraining failed"), run)
                continue
            self.tell(
                {"event": "begin", "run": run.run_id, "title": run.title, **self._get_position()}
            )
            began_s = time.monotonic()
            try:
                self._run_federation(run, launcher)
                summary = load_summary(self.folder / run.run_id / "summary.json")
            except VflError as error:
                if self._stop.is_set():
                    return
                self._fail(Failure(run.title, str(error), error.code, error.exit_code), run)
                continue
            self._check_metric(run, summary)
            self._record_result(run, summary, time.monotonic() - began_s)

    def _check_metric(self, run: PlannedRun, summary: Summary) -> None:
        """Raises InputError if a finished run does not have the study's metric, because then no
        other run of the study will have it.
        """
        metrics = summary.metrics.get("test", {})
        if run.stage == "finetune" and self.study.metric not in metrics:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{run.title}: the test rows have no metric {self.study.metric!r}. Choose one "
                f"of {', '.join(metrics)}."
                if metrics
                else f"{run.title}: the test rows have no metric {self.study.metric!r}. Add a "
                "phase to [[finetune]] that evaluates them.",
            )

    def _run_federation(self, run: PlannedRun, launcher: Launcher | None) -> None:
        folder = self.folder / run.run_id
        # An earlier attempt that did not finish may have left files.
        shutil.rmtree(folder, ignore_errors=True)
        if self.make is not None:
            self.make(run.tables, self.base, folder)
            return
        with make_view(run.recipe) if self.live else View(run.recipe) as screen:
            run_federation(
                run.tables, run.recipe, self.base, folder, screen, launcher, stop=self._stop
            )

    def _get_position(self) -> dict[str, int]:
        return {"number": len(self._summaries) + len(self.failures) + 1, "of": len(self.runs)}

    def _record_result(self, run: PlannedRun, summary: Summary, seconds: float) -> None:
        with self._lock:
            position = self._get_position()
            self._summaries[run.run_id] = summary
            self._durations_s.append((run, seconds))
            left = [
                r
                for r in self.runs
                if r.run_id not in self._summaries and r.run_id not in self._failed
            ]
            value = summary.metrics.get("test", {}).get(self.study.metric)
            self.tell(
                {
                    "event": "done",
                    "run": run.run_id,
                    "title": run.title,
                    **position,
                    "seconds": round(seconds, 3),
                    "metric": value if run.stage == "finetune" else None,
                    "left_s": estimate_left_s(self._durations_s, left, self.jobs),
                }
            )
            self.record()

    def _fail(self, failure: Failure, run: PlannedRun) -> None:
        with self._lock:
            position = self._get_position()
            self.failures.append(failure)
            self._failed.add(run.run_id)
            self.tell(
                {
                    "event": "failed",
                    "run": run.run_id,
                    "title": run.title,
                    **position,
                    "error": failure.sentence,
                }
            )

    def _make_result(self, chain: Pipeline, run: PlannedRun) -> FineTuned:
        summary = self._summaries[run.run_id]
        pretrain_cost = (
            compute_cost(self._summaries[chain.pretrain.run_id])
            if chain.pretrain is not None
            else Cost()
        )
        name, preset = self.study.name, summary.preset
        return FineTuned(
            name,
            run.method,
            run.seed,
            preset,
            run.labels,
            summary.metrics,
            pretrain_cost,
            compute_cost(summary),
            run.fold,
            next(method.group for method in self.study.methods if method.name == run.method),
        )


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
    makes the runs, see ``vfl.jobs``.
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
