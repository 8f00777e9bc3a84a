"""Reads the folder of a run for tables and charts, determines how a run without a summary ended,
and lists the runs in a folder of runs.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from vfl.summary.rounds import History, PartyFolder, RoundLine
from vfl_common.bundle import Entry, read_entries
from vfl_common.errors import Code, InputError
from vfl_common.process.logs import utc
from vfl_common.registry import make_sort_key
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Summary, load_summary
from vfl_common.text import LINE, clean, describe_method

# The events that can be the last line of a process's log.
_ENDS = ("failed", "stopped")
# The number of bytes to read at the end of a log to find its last line.
_TAIL = 65_536
# The error code of a process that stopped because another process failed.
_ABORTED = "ABORTED"
_ERROR = "error: "


@dataclass(frozen=True)
class End:
    """The end of a run.

    Args:
        state: ``set aside``, ``failed``, ``stopped``, or ``unfinished`` (the run is still running,
            or was killed).
        why: A sentence with the reason; empty if it is unknown.
        resumes: Whether the same commands resume the run. False for a simulation or a prediction.
    """

    state: str
    why: str = ""
    resumes: bool = True

    @property
    def sentence(self) -> str:
        """A sentence that says how the run ended."""
        if self.state == "unfinished":
            return "the run has not ended. If it was interrupted, resume it with the same commands."
        if self.state == "set aside":
            return f"the run was set aside and is never resumed ({self.why})"
        if self.state == "stopped":
            remedy = ". Resume it with the same commands." if self.resumes else ""
            return f"the run was stopped{remedy}"
        remedy = ". Fix the cause, and resume it with the same commands." if self.resumes else ""
        return f"the run has failed{f' ({self.why})' if self.why else ''}{remedy}"


def find_end(processes: Sequence[PartyFolder]) -> End:
    """Returns how a run without a summary ended, from the logs and standard error of its
    processes.
    """
    notes = [source.read("run.json").get("set_aside") for source in processes]
    if reasons := [str(note.get("why", "")) for note in notes if isinstance(note, dict)]:
        return End("set aside", clean(reasons[0], LINE), resumes=False)
    lines = [_read_last_record(source.folder / "log.jsonl") for source in processes]
    paths = {path for source in processes for path in source.folder.parent.glob("*/stderr")}
    last_lines = [
        line
        for line in (_read_last_line(path).decode("utf-8", "replace") for path in sorted(paths))
        if line
    ]
    errors = [line.removeprefix(_ERROR) for line in last_lines if line.startswith(_ERROR)]
    events = {str(line.get("event", "")) for line in lines} | ({"failed"} if errors else set())
    state = next((event for event in _ENDS if event in events), "unfinished")
    failed = [line for line in lines if line.get("event") == "failed"]
    # A process that was aborted because another process failed does not know the cause.
    failed.sort(key=lambda line: line.get("code") == _ABORTED)
    why = next(
        (str(line["message"]) for line in failed if line.get("message")),
        errors[0] if errors else "",
    )
    simulated = any((source.folder.parent / "federation").is_dir() for source in processes)
    resumes = not simulated and all(
        source.read("run.json").get("job") != "predict" for source in processes
    )
    return End(state, clean(why, LINE), resumes)


def _read_last_record(log: Path) -> dict[str, Any]:
    """Returns the last line of a log as JSON; an empty dict if the line is missing or damaged."""
    try:
        record = json.loads(_read_last_line(log))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def _read_last_line(path: Path) -> bytes:
    """Returns the last non-empty line of a file; b'' if the file cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
            return file.read().rstrip(b"\n").rpartition(b"\n")[2]
    except OSError:
        return b""


# The keys under which a party logs its own losses, in place of the splits of the rows.
OWN_SPLITS = ("local", "cross")
_INITIAL = {"secret": "secret", "recipe": "known to all parties, from the recipe's seed"}
# {round: {split: {metric: value}}}
Rounds = dict[int, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class RunRecord:
    """A finished run: its folder, its summary, and the names of its phases in recipe order."""

    folder: Path
    summary: Summary
    phases: tuple[str, ...]


def find(path: Path) -> RunRecord:
    """Reads a run from its folder, a party's folder in it, or its ``summary.json``.

    Raises InputError.
    """
    path = find_run_folder(path)
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = load_summary(file)
    except FileNotFoundError:
        raise InputError(Code.FILE_INVALID, _explain_missing(path, file)) from None
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{file}: cannot be read ({error.strerror}). Check its permissions.",
        ) from None
    except ValidationError:
        raise InputError(
            Code.FILE_INVALID, f"{file}: is not the summary of a run. Give the folder of a run."
        ) from None
    return RunRecord(file.parent, summary, _read_phases(file.parent, summary))


def _explain_missing(path: Path, file: Path) -> str:
    """Returns a message that says why the summary ``file`` of a run is missing, and what to do."""
    if (path / "results.csv").exists():
        return (
            f"{file}: this is the folder of a study, not of a run. See its results in results.csv "
            "and results.png."
        )
    if not path.is_dir():
        return f"{file}: no such run. Give the folder of a run."
    processes = [PartyFolder(file.parent) for file in sorted(path.glob("*/run.json"))]
    end = find_end(processes)
    if not any(map(_is_unfinished, processes)):
        return (
            f"{file}: no such file. Only the server and the active party get it, at the end of a "
            "run. Give the folder of one of them."
        )
    if end.state == "unfinished":
        return (
            f"{file}: no such file, because the run has not ended. Wait for its end, or give the "
            "folder of one process in it."
        )
    return f"{file}: no such file: {end.sentence}"


def find_run_folder(path: Path) -> Path:
    """Returns the folder of the run if ``path`` is a party's folder in it, otherwise ``path``."""
    return path.resolve().parent if (path / "run.json").is_file() else path


def read_importance(path: Path) -> list[str]:
    """Returns the last log message of each party on the importance of its columns in trees.

    ``path``: The folder of a run or of one party, or the summary of a run.
    """
    folder = path if path.is_dir() else path.parent
    logs = (
        [folder / "log.jsonl"]
        if (folder / "run.json").is_file()
        else sorted(folder.glob("*/log.jsonl"))
    )
    return [note for log in logs if (note := _read_importance(log))]


def describe_initial_weights(path: Path) -> list[str]:
    """Returns a line that says what each party's initial weights were derived from: a secret or the
    recipe's seed. Returns no line if no party's folder is on this machine.

    ``path``: The folder of a run or of one party, or the summary of a run.
    """
    folder = path if path.is_dir() else path.parent
    files = (
        [folder / "run.json"]
        if (folder / "run.json").is_file()
        else sorted(folder.glob("*/run.json"))
    )
    parties: dict[str, list[str]] = {}
    for file in files:
        source_of_weights = PartyFolder(file.resolve().parent).read("run.json").get("init")
        if source_of_weights in _INITIAL:
            parties.setdefault(source_of_weights, []).append(clean(file.resolve().parent.name))
    texts = [f"{_INITIAL[init]} ({', '.join(names)})" for init, names in sorted(parties.items())]
    return [f"initial weights: {'; '.join(texts)}"] if texts else []


def _read_importance(log: Path) -> str:
    """Returns the last message on importance in a log; '' if it has none, or cannot be read."""
    text = ""
    try:
        with log.open(errors="replace") as lines:
            for line in lines:
                if '"importance"' in line:
                    note = json.loads(line)
                    text = (
                        clean(str(note["message"]), LINE)
                        if note.get("event") == "importance"
                        else text
                    )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return text
    return text


@dataclass(frozen=True)
class ProcessNotes:
    """The records of one process about a run that has no summary.

    Args:
        name: The name of the party, or of the server.
        role: The role of the process; passive if its folder has no recipe.
        unfinished: Whether the process began a run and did not log its end.
        entries: The entries of the ledger.
        last_round: The last finished round.
        end: How the run ended.
        folder: The folder of the process.
    """

    name: str
    role: str
    unfinished: bool
    entries: list[Entry]
    last_round: RoundLine | None
    end: End
    folder: Path


def read_process_notes(path: Path) -> ProcessNotes | None:
    """Reads the records of one process, from its folder or from a run's folder with one process.

    Returns None if the run has a summary, or the process has no ledger yet. Raises InputError if
    the ledger is damaged.
    """
    folder = find_run_folder(path)
    ledgers = (
        [path.resolve() / "ledger.json"] if folder != path else list(folder.glob("*/ledger.json"))
    )
    if (folder / "summary.json").exists() or len(ledgers) != 1 or not ledgers[0].exists():
        return None
    source = PartyFolder(ledgers[0].parent)
    rounds = read_history(source.folder)
    last_round = rounds[-1] if rounds else None
    return ProcessNotes(
        source.party,
        find_role(source),
        _is_unfinished(source),
        read_entries(ledgers[0]),
        last_round,
        find_end([source]),
        source.folder,
    )


def find_role(source: PartyFolder) -> str:
    """Returns the role that the recipe gives to a process; passive if there is no recipe."""
    try:
        recipe = RunFolder(source.folder, source.run_id).recipe()
    except InputError:
        return "passive"
    party = recipe.party(source.party)
    return (
        "server"
        if source.party == recipe.server
        else party.role
        if party is not None
        else "passive"
    )


def _is_unfinished(source: PartyFolder) -> bool:
    """Returns whether the process began a run and did not log its end."""
    return "run_id" in source.read("run.json") and not source.finished


def _read_phases(folder: Path, summary: Summary) -> tuple[str, ...]:
    """Reads the names of the phases, in order, from the first copy of the recipe in the folder."""
    for party in summary.parties:
        try:
            recipe = json.loads((folder / party.name / "recipe.json").read_bytes())
            return tuple(str(phase["name"]) for phase in recipe["phases"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return ()


def read_curves(run: RunRecord) -> dict[str, Rounds]:
    """Reads {phase: rounds} of the active party; empty if it has no ``metrics.jsonl``."""
    active = next((party.name for party in run.summary.parties if party.role == "active"), "")
    return _read_rounds(run.folder / active)


def read_own_curves(run: RunRecord) -> dict[str, dict[str, Rounds]]:
    """Reads {phase: {party: rounds}} for the phases in which a passive party has its own loss. The
    parties are in roster order.

    The active party is included if it has such a loss. A party whose folder is not on this machine
    is left out.
    """
    rounds_by_phase: dict[str, dict[str, Rounds]] = {}
    roles = {party.name: party.role for party in run.summary.parties if party.role != "server"}
    for party in roles:
        for phase, rounds in _read_rounds(run.folder / party).items():
            if any(
                "loss" in splits.get(split, {})
                for splits in rounds.values()
                for split in OWN_SPLITS
            ):
                rounds_by_phase.setdefault(phase, {})[party] = rounds
    return {
        phase: parties
        for phase, parties in rounds_by_phase.items()
        if any(roles[party] == "passive" for party in parties)
    }


def _read_rounds(folder: Path) -> dict[str, Rounds]:
    """Reads {phase: rounds} of one party; empty if it has no file of rounds. Of a repeated round,
    the last repetition counts.
    """
    rounds_by_phase: dict[str, Rounds] = {}
    for line in read_history(folder):
        rounds_by_phase.setdefault(line.phase, {})[line.round] = line.metrics
    return rounds_by_phase


def read_history(folder: Path) -> list[RoundLine]:
    """Reads the rounds of one party in order; empty if it has no file of rounds."""
    history = History(PartyFolder(folder))
    if history.source.has_rounds:
        history.update()
    return history.rounds


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
