"""What a finished run left in its folder, read for tables and charts."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from vfl.report.rounds import FILE, History, Source
from vfl_common.errors import Code, InputError
from vfl_common.ledger import Entry, load_entries
from vfl_common.summary import Summary, load_summary

OWN = ("local", "cross")  # what a party tells of losses of its own, where others use "train", "validation", "test"
Rounds = dict[int, dict[str, dict[str, float]]]  # round -> split -> name -> value


@dataclass(frozen=True)
class Run:
    """A run's folder and its summary. ``phases``: in the recipe's order, empty where the recipe is not there."""

    folder: Path
    summary: Summary
    phases: tuple[str, ...]


def find(path: Path) -> Run:
    """The run of a folder, or of its ``summary.json``. Raises InputError."""
    file = path / "summary.json" if path.is_dir() else path
    try:
        summary = load_summary(file)
    except FileNotFoundError:
        what = "no such run"
        if path.is_dir():
            what = "no such file; the server and the active party have it, at the end of a run"
        if (path / "results.csv").exists():
            what = "this is a study's folder, not a run's; its results are results.csv and results.png beside it"
        raise InputError(Code.FILE_INVALID, f"{file}: {what}") from None
    except OSError as error:
        raise InputError(Code.FILE_INVALID, f"{file}: cannot be read ({error.strerror})") from None
    except ValidationError:
        raise InputError(Code.FILE_INVALID, f"{file}: is not the summary of a run") from None
    return Run(file.parent, summary, _phases(file.parent, summary))


def own_ledger(path: Path) -> tuple[str, list[Entry]] | None:
    """(party, what it has counted) of a folder in which a single party's ledger is, and no summary; None elsewhere."""
    ledgers = list(path.glob("*/ledger.json")) if not (path / "summary.json").exists() else []
    if len(ledgers) != 1:
        return None
    try:
        return ledgers[0].parent.name, load_entries(ledgers[0])
    except (OSError, ValueError, KeyError, TypeError):
        raise InputError(Code.FILE_INVALID, f"{ledgers[0]}: is not a party's ledger") from None


def _phases(folder: Path, summary: Summary) -> tuple[str, ...]:
    """The order of the phases, from the copy of the recipe that each process keeps."""
    for party in summary.parties:
        try:
            recipe = json.loads((folder / party.name / "recipe.json").read_bytes())
            return tuple(str(phase["name"]) for phase in recipe["phases"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return ()


def curves(run: Run) -> dict[str, Rounds]:
    """{phase: its rounds}, as the active party noted them; empty where its ``metrics.jsonl`` is not in the folder."""
    active = next((party.name for party in run.summary.parties if party.role == "active"), "")
    return _noted(run.folder / active)


def own_curves(run: Run) -> dict[str, dict[str, Rounds]]:
    """{phase: {party: its rounds}} of phases in which passive parties have losses of their own, in the roster's order.

    The active party is there too where it has some. What a party noted is here only where its folder is.
    """
    found: dict[str, dict[str, Rounds]] = {}
    roles = {party.name: party.role for party in run.summary.parties if party.role != "server"}
    for party in roles:
        for phase, rounds in _noted(run.folder / party).items():
            if any("loss" in splits.get(split, {}) for splits in rounds.values() for split in OWN):
                found.setdefault(phase, {})[party] = rounds
    return {phase: own for phase, own in found.items() if any(roles[party] == "passive" for party in own)}


def _noted(folder: Path) -> dict[str, Rounds]:
    """{phase: its rounds} of one party; after a rollback what came later counts. Empty where it noted none here."""
    found: dict[str, Rounds] = {}
    if (folder / FILE).is_file():
        history = History(Source(folder))
        history.update()
        for each in history.rounds:
            found.setdefault(each.phase, {})[each.round] = each.metrics
    return found
