"""Reads the folder of a finished run for tables and charts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vfl.report.ends import End, end_of
from vfl.report.rounds import History, PartyFolder, RoundLine
from vfl_common.errors import Code, InputError
from vfl_common.ledger import Entry, read_entries
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Summary, load_summary
from vfl_common.text import LINE, clean

# The splits of a party's own losses; other metrics have "train", "validation" and "test".
OWN = ("local", "cross")
_INITIAL = {"secret": "secret", "recipe": "known to all parties, from the recipe's seed"}
# {round: {split: {metric: value}}}
Rounds = dict[int, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class RunRecord:
    """A run's folder and its summary. ``phases``: in the order of the recipe; empty without one."""

    folder: Path
    summary: Summary
    phases: tuple[str, ...]


def find(path: Path) -> RunRecord:
    """Reads a run from its folder, a party's folder in it, or its ``summary.json``.

    Raises InputError.
    """
    path = of_run(path)
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
    return RunRecord(file.parent, summary, _phases(file.parent, summary))


def _explain_missing(path: Path, file: Path) -> str:
    """Returns why a run has no summary ``file``, and what to do."""
    if (path / "results.csv").exists():
        return (
            f"{file}: this is the folder of a study, not of a run. See its results in results.csv "
            "and results.png."
        )
    if not path.is_dir():
        return f"{file}: no such run. Give the folder of a run."
    processes = [PartyFolder(file.parent) for file in sorted(path.glob("*/run.json"))]
    end = end_of(processes)
    if not any(map(_goes_on, processes)):
        return (
            f"{file}: no such file; only the server and the active party get it, at the end of a "
            "run. Use their folder."
        )
    if end.state == "unfinished":
        return (
            f"{file}: no such file yet: the run has not ended. Wait for its end, or give the "
            "folder of one process in it."
        )
    return f"{file}: no such file: {end.sentence}"


def of_run(path: Path) -> Path:
    """Returns the folder of the run if ``path`` is a party's folder in it, otherwise ``path``."""
    return path.resolve().parent if (path / "run.json").is_file() else path


def importance(path: Path) -> list[str]:
    """Returns each party's last logged note on the importance of its columns in trees.

    ``path``: the folder of a run or of one party, or the summary of a run.
    """
    folder = path if path.is_dir() else path.parent
    logs = (
        [folder / "log.jsonl"]
        if (folder / "run.json").is_file()
        else sorted(folder.glob("*/log.jsonl"))
    )
    return [note for log in logs if (note := _importance(log))]


def initial(path: Path) -> list[str]:
    """Returns a line on what the initial weights were derived from, for the parties whose folders
    are here.

    ``path``: the folder of a run or of one party, or the summary of a run.
    """
    folder = path if path.is_dir() else path.parent
    runs = (
        [folder / "run.json"]
        if (folder / "run.json").is_file()
        else sorted(folder.glob("*/run.json"))
    )
    parties: dict[str, list[str]] = {}
    for file in runs:
        source_of_weights = PartyFolder(file.resolve().parent).read("run.json").get("init")
        if source_of_weights in _INITIAL:
            parties.setdefault(source_of_weights, []).append(clean(file.resolve().parent.name))
    texts = [f"{_INITIAL[init]} ({', '.join(names)})" for init, names in sorted(parties.items())]
    return [f"initial weights: {'; '.join(texts)}"] if texts else []


def _importance(log: Path) -> str:
    """Returns the last note in a log; '' if it has none, or cannot be read."""
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
class Own:
    """The notes of one process on a run without a summary.

    ``role``: passive if the folder does not say. ``goes_on``: whether the run has not ended, or was
    interrupted; ``end``: how it ended. ``folder``: the folder of the process.
    """

    name: str
    role: str
    goes_on: bool
    entries: list[Entry]
    last: RoundLine | None
    end: End
    folder: Path


def own_notes(path: Path) -> Own | None:
    """Returns the notes of a process, from its folder or as the only one in the run's folder.

    Returns None if there is a summary, or no ledger yet. Raises InputError if the ledger is
    damaged.
    """
    folder = of_run(path)
    ledgers = (
        [path.resolve() / "ledger.json"] if folder != path else list(folder.glob("*/ledger.json"))
    )
    if (folder / "summary.json").exists() or len(ledgers) != 1 or not ledgers[0].exists():
        return None
    source = PartyFolder(ledgers[0].parent)
    rounds = history(source.folder)
    last = rounds[-1] if rounds else None
    return Own(
        source.party,
        role_of(source),
        _goes_on(source),
        read_entries(ledgers[0]),
        last,
        end_of([source]),
        source.folder,
    )


def role_of(source: PartyFolder) -> str:
    """Returns the role of the process by the recipe; passive if the recipe cannot be read."""
    try:
        recipe = RunFolder(source.folder, source.run_id).recipe()
    except InputError:
        return "passive"
    place = recipe.party(source.party)
    return (
        "server"
        if source.party == recipe.server
        else place.role
        if place is not None
        else "passive"
    )


def _goes_on(source: PartyFolder) -> bool:
    """Whether the process has begun a run and not logged its end."""
    return "run_id" in source.read("run.json") and not source.finished


def _phases(folder: Path, summary: Summary) -> tuple[str, ...]:
    """Reads the order of the phases from the copy of the recipe that each process keeps."""
    for party in summary.parties:
        try:
            recipe = json.loads((folder / party.name / "recipe.json").read_bytes())
            return tuple(str(phase["name"]) for phase in recipe["phases"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            continue
    return ()


def curves(run: RunRecord) -> dict[str, Rounds]:
    """Reads the active party's {phase: its rounds}; empty without its ``metrics.jsonl``."""
    active = next((party.name for party in run.summary.parties if party.role == "active"), "")
    return _read_rounds(run.folder / active)


def own_curves(run: RunRecord) -> dict[str, dict[str, Rounds]]:
    """Reads {phase: {party: its rounds}} of phases in which passive parties have their own losses,
    in roster order.

    The active party is included if it has such losses. A party without a folder here is left out.
    """
    rounds_by_phase: dict[str, dict[str, Rounds]] = {}
    roles = {party.name: party.role for party in run.summary.parties if party.role != "server"}
    for party in roles:
        for phase, rounds in _read_rounds(run.folder / party).items():
            if any("loss" in splits.get(split, {}) for splits in rounds.values() for split in OWN):
                rounds_by_phase.setdefault(phase, {})[party] = rounds
    return {
        phase: own
        for phase, own in rounds_by_phase.items()
        if any(roles[party] == "passive" for party in own)
    }


def _read_rounds(folder: Path) -> dict[str, Rounds]:
    """Reads one party's {phase: its rounds}; the last repetition of a round counts. Empty without
    the file.
    """
    rounds_by_phase: dict[str, Rounds] = {}
    for line in history(folder):
        rounds_by_phase.setdefault(line.phase, {})[line.round] = line.metrics
    return rounds_by_phase


def history(folder: Path) -> list[RoundLine]:
    """Reads one party's rounds in order; none without the file."""
    history = History(PartyFolder(folder))
    if history.source.has_rounds:
        history.update()
    return history.rounds
