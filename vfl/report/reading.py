"""Reads a finished run's folder for tables and charts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vfl.report.ends import End, end_of
from vfl.report.rounds import History, RoundLine, Source
from vfl_common.errors import Code, InputError
from vfl_common.ledger import Entry, read_entries
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Summary, load_summary
from vfl_common.text import LINE, clean

# The splits of a party's own losses; other metrics have "train", "validation", "test".
OWN = ("local", "cross")
_INITIAL = {"secret": "secret", "recipe": "known to all parties, from the recipe's seed"}
# Round -> split -> name -> value.
Rounds = dict[int, dict[str, dict[str, float]]]


@dataclass(frozen=True)
class RunRecord:
    """A run's folder and its summary. ``phases``: in the recipe's order; empty if there is no
    recipe.
    """

    folder: Path
    summary: Summary
    phases: tuple[str, ...]


def find(path: Path) -> RunRecord:
    """Reads a run from its folder, a party's folder in it, or its ``summary.json``. Raises
    InputError.
    """
    path = of_run(path)
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = load_summary(file)
    except FileNotFoundError:
        what = "no such run"
        if path.is_dir():
            what = "no such file; only the server and the active party get it, at the end of a run"
            processes = [Source(each.parent) for each in sorted(path.glob("*/run.json"))]
            end = end_of(processes)
            if any(map(_goes_on, processes)):
                what = (
                    "no such file yet: the run has not ended; wait for its end, or give one "
                    "process's folder in it"
                )
                what = what if end.state == "unfinished" else f"no such file: {end.said}"
        if (path / "results.csv").exists():
            what = (
                "this is a study's folder, not a run's; its results are results.csv and "
                "results.png beside it"
            )
        raise InputError(Code.FILE_INVALID, f"{file}: {what}") from None
    except OSError as error:
        raise InputError(Code.FILE_INVALID, f"{file}: cannot be read ({error.strerror})") from None
    except ValidationError:
        raise InputError(Code.FILE_INVALID, f"{file}: is not the summary of a run") from None
    return RunRecord(file.parent, summary, _phases(file.parent, summary))


def of_run(path: Path) -> Path:
    """Returns the run's folder if ``path`` is a party's folder in it, which is what the party's
    program names.
    """
    return path.resolve().parent if (path / "run.json").is_file() else path


def importance(path: Path) -> list[str]:
    """Returns what each party whose log is here has noted last of what its columns do in trees.

    ``path``: of a run, of its summary, or of one party, whose note alone is returned.
    """
    folder = path if path.is_dir() else path.parent
    logs = (
        [folder / "log.jsonl"]
        if (folder / "run.json").is_file()
        else sorted(folder.glob("*/log.jsonl"))
    )
    return [note for log in logs if (note := _importance(log))]


def initial(path: Path) -> list[str]:
    """Returns a line about what the initial weights followed from, of the parties whose folders are
    here.

    ``path``: of a run, of its summary, or of one party.
    """
    folder = path if path.is_dir() else path.parent
    runs = (
        [folder / "run.json"]
        if (folder / "run.json").is_file()
        else sorted(folder.glob("*/run.json"))
    )
    found: dict[str, list[str]] = {}
    for each in runs:
        noted = Source(each.resolve().parent).read("run.json").get("init")
        if noted in _INITIAL:
            found.setdefault(noted, []).append(clean(each.resolve().parent.name))
    said = [f"{_INITIAL[init]} ({', '.join(names)})" for init, names in sorted(found.items())]
    return [f"initial weights: {'; '.join(said)}"] if said else []


def _importance(log: Path) -> str:
    """Returns the last note in a log; '' if it has none, or cannot be read."""
    found = ""
    try:
        with log.open(errors="replace") as lines:
            for line in lines:
                if '"importance"' in line:
                    note = json.loads(line)
                    found = (
                        clean(str(note["message"]), LINE)
                        if note.get("event") == "importance"
                        else found
                    )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return found
    return found


@dataclass(frozen=True)
class Own:
    """What one process has noted of a run of which there is no summary.

    ``role``: passive if its folder does not say. ``goes_on``: the run has not ended, or was
    interrupted; ``end``: how. ``folder``: its own.
    """

    name: str
    role: str
    goes_on: bool
    entries: list[Entry]
    last: RoundLine | None
    end: End
    folder: Path


def own_notes(path: Path) -> Own | None:
    """Returns what a process has noted, from its folder or as the only one in the run's folder;
    None with a summary.

    None, too, if it has counted nothing yet. Raises InputError if its ledger is damaged.
    """
    folder = of_run(path)
    ledgers = (
        [path.resolve() / "ledger.json"] if folder != path else list(folder.glob("*/ledger.json"))
    )
    if (folder / "summary.json").exists() or len(ledgers) != 1 or not ledgers[0].exists():
        return None
    source = Source(ledgers[0].parent)
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


def role_of(source: Source) -> str:
    """Returns the role that the run's recipe gives to the process; passive if the copy of it cannot
    be read.
    """
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


def _goes_on(source: Source) -> bool:
    """Whether the process has begun a run and has not noted its end."""
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
    """Reads the active party's {phase: its rounds}; empty if its ``metrics.jsonl`` is not in the
    folder.
    """
    active = next((party.name for party in run.summary.parties if party.role == "active"), "")
    return _noted(run.folder / active)


def own_curves(run: RunRecord) -> dict[str, dict[str, Rounds]]:
    """Reads {phase: {party: its rounds}} of phases in which passive parties have their own losses,
    in roster order.

    The active party is included if it has such losses. A party whose folder is not here is left
    out.
    """
    found: dict[str, dict[str, Rounds]] = {}
    roles = {party.name: party.role for party in run.summary.parties if party.role != "server"}
    for party in roles:
        for phase, rounds in _noted(run.folder / party).items():
            if any("loss" in splits.get(split, {}) for splits in rounds.values() for split in OWN):
                found.setdefault(phase, {})[party] = rounds
    return {
        phase: own
        for phase, own in found.items()
        if any(roles[party] == "passive" for party in own)
    }


def _noted(folder: Path) -> dict[str, Rounds]:
    """Reads one party's {phase: its rounds}; after a rollback the repeated round counts. Empty
    without the file.
    """
    found: dict[str, Rounds] = {}
    for each in history(folder):
        found.setdefault(each.phase, {})[each.round] = each.metrics
    return found


def history(folder: Path) -> list[RoundLine]:
    """Reads one party's rounds in order; none without the file."""
    history = History(Source(folder))
    if history.source.has_rounds:
        history.update()
    return history.rounds
