"""Lists the runs in a folder of runs, whatever else lies there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.text import Text

from vfl.report.ends import end_of
from vfl.report.rounds import Source
from vfl.report.table import PIPE_WIDTH, new_table, size, wide_console
from vfl_common.errors import Code, InputError
from vfl_common.process.logs import utc
from vfl_common.production.registry import when_began
from vfl_common.summary import Summary, load_summary
from vfl_common.text import clean, method_of

_MAIN = ("accuracy", "auc", "rmse")
# Characters of a line.
_WIDEST = 400
# Characters of a name that somebody else chose.
_MOST = 60


@dataclass(frozen=True)
class Listed:
    """One folder in a folder of runs.

    ``state``: ``finished``; ``failed`` or ``stopped``, if a process's log ends so; ``set aside``:
    nobody resumes it; ``unfinished``: it runs now, was killed, or was pruned; ``damaged``: its
    summary cannot be read; ``study``: it is a folder of ``runs`` more runs, of a study or of a
    search. ``began``: see ``when_began``.
    ``model``: the trained run, of a prediction. ``summary``: of a finished run, if it is here.
    """

    folder: Path
    state: str
    began: tuple[float, float, str]
    job: str = "train"
    method: str = ""
    seed: int | None = None
    runs: int = 0
    model: str = ""
    summary: Summary | None = field(default=None, repr=False)

    @property
    def began_s(self) -> float:
        """Unix time."""
        return self.began[0]

    @property
    def alone(self) -> bool:
        """Whether the run is known to have had one party only, as a baseline has."""
        return self.summary is not None and all(
            each.role != "passive" for each in self.summary.parties
        )

    def as_json(self) -> dict[str, Any]:
        """Returns what ``vfl runs --json`` prints; null for what is not known."""
        found: dict[str, Any] = {
            "run": self.folder.name,
            "folder": str(self.folder),
            "began": utc(self.began_s),
        }
        found |= {"state": self.state, "job": self.job, "method": self.method, "seed": self.seed}
        found |= {"model": self.model or None}
        if self.state == "study":
            return {**found, "runs": self.runs}
        summary = self.summary
        total = summary.bytes.total if summary is not None else None
        return found | {
            "metrics": {} if summary is None else summary.metrics,
            "payload_bytes": None if total is None else total.payload_bytes,
            "message_bytes": None if total is None else total.message_bytes,
            "seconds": None if summary is None else summary.wall_s,
        }


def find_runs(out: Path) -> tuple[list[Listed], list[Path]]:
    """Returns the runs in ``out``, newest first, and the folders that hold none. Raises
    InputError.
    """
    try:
        folders = sorted(
            each for each in out.iterdir() if each.is_dir() and not each.name.startswith(".")
        )
    except FileNotFoundError:
        raise InputError(
            Code.FILE_INVALID, f"{out}: no such folder; give the folder of runs with --out"
        ) from None
    except OSError as error:
        raise InputError(Code.FILE_INVALID, f"{out}: cannot be read ({error.strerror})") from None
    found = {folder: listed(folder) for folder in folders}
    runs = sorted(
        (each for each in found.values() if each is not None),
        key=lambda each: each.began,
        reverse=True,
    )
    return runs, [folder for folder, each in found.items() if each is None]


def listed(folder: Path) -> Listed | None:
    """Returns what a folder says of its run; None if it holds none."""
    processes = [Source(path.parent) for path in sorted(folder.glob("*/run.json"))]
    if not processes and not (folder / "summary.json").is_file():
        # A study has them in its folder, and a search in one below it.
        runs = {
            path.parents[1]
            for below in ("*/*/run.json", "runs/*/*/run.json")
            for path in folder.glob(below)
        }
        if not runs and not (folder / "results.csv").is_file():
            return None
        return Listed(folder, "study", when_began(folder.name, _time(folder)), runs=len(runs))
    facts = [each.read("run.json") for each in processes]
    recipe: dict[str, Any] = next(
        (each for each in (of.read("recipe.json") for of in processes) if each), {}
    )
    job = str(next((each["job"] for each in facts if "job" in each), "train"))
    began = began_of(folder)
    model = str(next((each["trained_run"] for each in facts if each.get("trained_run")), ""))
    seed = recipe.get("seed") if isinstance(recipe.get("seed"), int) else None
    try:
        summary = load_summary(folder / "summary.json")
    except FileNotFoundError:
        state = (
            "finished" if all(each.get("finished") for each in facts) else end_of(processes).state
        )
        return Listed(folder, state, began, job, _method(recipe), seed, model=model)
    except (OSError, ValueError, RecursionError):
        return Listed(folder, "damaged", began, job, _method(recipe), seed, model=model)
    return Listed(
        folder,
        "finished",
        began,
        summary.job,
        summary.method,
        summary.seed,
        model=model,
        summary=summary,
    )


def newest(out: Path) -> Listed:
    """Returns the newest finished training run of a federation in ``out``; if there is none, the
    newest of one party.

    Raises InputError if there is none at all.
    """
    runs = find_runs(out)[0] if out.is_dir() else []
    found = [each for each in runs if each.state == "finished" and each.job == "train"]
    if not found:
        raise InputError(
            Code.FILE_INVALID, f"{out}: holds no finished run; give RUN, or run one first: vfl demo"
        )
    return next((each for each in found if not each.alone), found[0])


def show_runs(runs: list[Listed], others: list[Path], console: Console | None = None) -> None:
    """Prints the runs as a table, with the metrics of the test rows."""
    table = new_table("Runs, with metrics of the test rows")
    shown = [name for name in _MAIN if any(name in _tested(each) for each in runs)]
    for heading in ("run", "began (UTC)", "method", "seed", "state"):
        table.add_column(heading, no_wrap=True)
    for heading in (*shown, "bytes", "seconds"):
        table.add_column(heading, no_wrap=True, justify="right")
    for each in runs:
        table.add_row(*_row(each, shown))
    parts: list[Any] = [table] if runs else [Text("no runs")]
    if any(each.state == "unfinished" for each in runs):
        parts += [
            Text("unfinished: it runs now, was killed, or was pruned or failed in a search", "dim")
        ]
    if others:
        names = ", ".join(clean(path.name, _MOST) for path in others)
        parts += [Text(f"no run in {names}", "dim")]
    console = console or wide_console()
    whole = console.measure(table, options=console.options.update(max_width=_WIDEST)).maximum
    # A narrow terminal folds the lines; names and numbers stay.
    console.width = max(console.width, PIPE_WIDTH, whole)
    console.print(Group(*parts))


def _tested(each: Listed) -> dict[str, float]:
    return each.summary.metrics.get("test", {}) if each.summary is not None else {}


def _row(each: Listed, shown: list[str]) -> tuple[str, ...]:
    began = utc(each.began_s)[:16].replace("T", " ")
    name = clean(each.folder.name, _MOST)
    if each.state == "study":
        return (f"{name}/", began, "", "", f"{each.runs} runs")
    method = clean(each.method, _MOST)
    if each.job == "predict":
        method = f"prediction with {clean(each.model, _MOST)}" if each.model else "prediction"
    start = (name, began, method, "" if each.seed is None else str(each.seed), each.state)
    if each.summary is None:
        return start
    metrics = [f"{_tested(each)[name]:.4g}" if name in _tested(each) else "" for name in shown]
    return (
        *start,
        *metrics,
        size(each.summary.bytes.total.message_bytes),
        f"{each.summary.wall_s:.1f}",
    )


def began_of(folder: Path) -> tuple[float, float, str]:
    """Returns when the run in a folder began, see ``when_began``."""
    written_s = min(map(_time, folder.glob("*/recipe.json")), default=_time(folder))
    return when_began(folder.name, written_s)


def _method(recipe: Mapping[str, Any]) -> str:
    """Returns the method of a recipe as a run's folder keeps it; '' if it cannot be read."""
    try:
        return method_of(phase["kind"] for phase in recipe["phases"])
    except (KeyError, TypeError):
        return str(recipe.get("method", ""))


def _time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
