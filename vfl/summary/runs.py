"""Lists the runs in a folder of runs. Other files in the folder are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.summary.ends import find_end
from vfl.summary.rounds import PartyFolder
from vfl_common.errors import Code, InputError
from vfl_common.process.logs import utc
from vfl_common.registry import make_sort_key
from vfl_common.summary import Summary, load_summary
from vfl_common.text import describe_method


@dataclass(frozen=True)
class ListedRun:
    """One folder in a folder of runs.

    Args:
        folder: The path of the folder.
        state: ``finished``, ``failed``, ``stopped``, ``set aside`` (never resumed), ``unfinished``
            (running, killed or pruned), ``damaged`` (unreadable summary), or ``study`` (the folder
            of a study or search).
        began: The time when the run began, as a sort key from ``when_began``.
        job: ``train`` or ``predict``.
        method: The name of the method.
        seed: The seed in the recipe.
        runs: The number of runs in a study or search.
        model: For a prediction, the id of the run that trained the model.
        summary: The summary of a finished run; None if it is not in the folder.
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
        """The Unix time when the run began."""
        return self.began[0]

    @property
    def alone(self) -> bool:
        """Whether the summary says that the run had only one party, like a baseline."""
        return self.summary is not None and all(
            party.role != "passive" for party in self.summary.parties
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the JSON object that ``vfl runs --json`` prints. Unknown values are null."""
        facts: dict[str, Any] = {
            "run": self.folder.name,
            "folder": str(self.folder),
            "began": utc(self.began_s),
        }
        facts |= {"state": self.state, "job": self.job, "method": self.method, "seed": self.seed}
        facts |= {"model": self.model or None}
        if self.state == "study":
            return {**facts, "runs": self.runs}
        summary = self.summary
        total = summary.bytes.total if summary is not None else None
        return facts | {
            "metrics": {} if summary is None else summary.metrics,
            "payload_bytes": None if total is None else total.payload_bytes,
            "message_bytes": None if total is None else total.message_bytes,
            "seconds": None if summary is None else summary.wall_s,
        }


def find_runs(out: Path) -> tuple[list[ListedRun], list[Path]]:
    """Returns the runs in ``out``, newest first, and the folders that contain no run.

    Raises InputError.
    """
    try:
        folders = sorted(
            path for path in out.iterdir() if path.is_dir() and not path.name.startswith(".")
        )
    except FileNotFoundError:
        raise InputError(
            Code.FILE_INVALID, f"{out}: no such folder. Give the folder of runs with --out."
        ) from None
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{out}: cannot be read ({error.strerror}). Check its permissions."
        ) from None
    by_folder = {folder: read_listed_run(folder) for folder in folders}
    runs = sorted(
        (run for run in by_folder.values() if run is not None),
        key=lambda run: run.began,
        reverse=True,
    )
    return runs, [folder for folder, run in by_folder.items() if run is None]


def read_listed_run(folder: Path) -> ListedRun | None:
    """Reads the run, study or search in a folder. Returns None if the folder has none."""
    processes = [PartyFolder(path.parent) for path in sorted(folder.glob("*/run.json"))]
    if not processes and not (folder / "summary.json").is_file():
        # A study has its runs directly in its folder, and a search in the subfolder runs.
        runs = {
            path.parents[1]
            for pattern in ("*/*/run.json", "runs/*/*/run.json")
            for path in folder.glob(pattern)
        }
        if not runs and not (folder / "results.csv").is_file():
            return None
        return ListedRun(
            folder, "study", make_sort_key(folder.name, _get_write_time(folder)), runs=len(runs)
        )
    facts = [process.read("run.json") for process in processes]
    recipe: dict[str, Any] = next(
        (tables for tables in (process.read("recipe.json") for process in processes) if tables), {}
    )
    job = str(next((content["job"] for content in facts if "job" in content), "train"))
    began = find_begin_time(folder)
    model = str(
        next((content["trained_run"] for content in facts if content.get("trained_run")), "")
    )
    seed = recipe.get("seed") if isinstance(recipe.get("seed"), int) else None
    try:
        summary = load_summary(folder / "summary.json")
    except FileNotFoundError:
        state = (
            "finished"
            if all(content.get("finished") for content in facts)
            else find_end(processes).state
        )
        return ListedRun(folder, state, began, job, _get_method(recipe), seed, model=model)
    except (OSError, ValueError, RecursionError):
        return ListedRun(folder, "damaged", began, job, _get_method(recipe), seed, model=model)
    return ListedRun(
        folder,
        "finished",
        began,
        summary.job,
        summary.method,
        summary.seed,
        model=model,
        summary=summary,
    )


def find_newest_run(out: Path) -> ListedRun:
    """Returns the newest finished training run of a federation in ``out``. If there is none,
    returns the newest finished training run of one party.

    Raises InputError if there is no finished training run.
    """
    runs = find_runs(out)[0] if out.is_dir() else []
    finished = [run for run in runs if run.state == "finished" and run.job == "train"]
    if not finished:
        raise InputError(
            Code.FILE_INVALID,
            f"{out}: contains no finished run. Give RUN, or make a run first, for example with "
            "`vfl demo`.",
        )
    return next((run for run in finished if not run.alone), finished[0])


def find_begin_time(folder: Path) -> tuple[float, float, str]:
    """Returns the time when the run in a folder began, as a sort key from ``when_began``."""
    written_s = min(
        map(_get_write_time, folder.glob("*/recipe.json")), default=_get_write_time(folder)
    )
    return make_sort_key(folder.name, written_s)


def _get_method(recipe: Mapping[str, Any]) -> str:
    """Returns the name of the method in a recipe's tables; '' if they lack it."""
    try:
        return describe_method(phase["kind"] for phase in recipe["phases"])
    except (KeyError, TypeError):
        return str(recipe.get("method", ""))


def _get_write_time(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
