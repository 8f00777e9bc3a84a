"""Reads the folder of a finished run for tables and charts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vfl.summary.ends import End, find_end
from vfl.summary.rounds import History, PartyFolder, RoundLine
from vfl_common.bundle import Entry, read_entries
from vfl_common.errors import Code, InputError
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Summary, load_summary
from vfl_common.text import LINE, clean

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
