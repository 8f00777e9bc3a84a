"""What the files of a run say that belongs into a card, at whichever process they are.

A card is passed on, so it has no name, category, statistic or value of a column: only what all
parties know, and counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.report.reading import find, history, of_run
from vfl.report.rounds import Source
from vfl.report.runs import find_runs
from vfl.simulation.baselines import BASELINES
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.ledger import load_entries
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Summary


@dataclass(frozen=True)
class Known:
    """A trained run, as far as the files say.

    ``party``: whose folder it is told from; '' if it is all of the run that is here. ``summary``:
    only the server and the active party have it. ``sent``: {(receiver, phase, kind): bytes} of
    ``party``'s own ledger. ``own``: {phase: {split: {metric: value}}} of its last rounds.
    ``baselines``: {kind: the newest of the same recipe's name and seed}.
    """

    folder: Path
    recipe: Recipe
    party: str = ""
    summary: Summary | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    sent: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    baselines: Mapping[str, Summary] = field(default_factory=dict)


def known(path: Path, party: str | None) -> Known:
    """Reads a run from its folder, or from a party's folder in it.

    ``party``: whose card it is; if not given, the party whose folder it is, or the only one that is
    here. Raises InputError if the run was not trained to its end, or is not here.
    """
    folder = of_run(path)
    names = sorted(each.parent.name for each in folder.glob("*/run.json"))
    if not names:
        text = f"{path}: holds no run; give the folder OUT/RUN-ID, or a party's folder in it"
        raise InputError(Code.FILE_INVALID, text)
    name = party or (path.resolve().name if folder != path else "")
    if not name and len(names) == 1:
        name = names[0]
    if name and name not in names:
        text = f"{folder}: has no folder of {name} (there are {', '.join(names)})"
        raise InputError(Code.FILE_INVALID, text)
    told = Source(folder / (name or names[0]))
    facts = told.read("run.json")
    if facts.get("job") != "train" or not facts.get("finished"):
        text = f"{told.folder}: is not of a training run that has finished; give one that has"
        raise InputError(Code.FILE_INVALID, text)
    recipe = RunFolder(told.folder, told.run_id).recipe()
    has_summary = (folder / "summary.json").is_file()
    whole = find(folder).summary if has_summary else None
    # A passive party on the machine of a simulation has no more than it would have on its own.
    passive = {each.name for each in recipe.passives}
    summary = None if name in passive else whole
    return Known(
        folder,
        recipe,
        name,
        summary,
        facts,
        _sent(told.folder),
        _last(told.folder),
        _baselines(folder, summary) if summary is not None else {},
    )


def _sent(folder: Path) -> dict[tuple[str, str, str], int]:
    found: dict[tuple[str, str, str], int] = {}
    for each in load_entries(folder / "ledger.json"):
        if each.direction == "sent":
            key = (each.peer, each.phase, each.kind)
            found[key] = found.get(key, 0) + each.message_bytes
    return found


def _last(folder: Path) -> dict[str, Mapping[str, Mapping[str, float]]]:
    """Returns {phase: the metrics of its last round}, of phases in which the party has any."""
    return {each.phase: each.metrics for each in history(folder) if each.metrics}


def _baselines(folder: Path, summary: Summary) -> dict[str, Summary]:
    found: dict[str, Summary] = {}
    # The newest first.
    for each in find_runs(folder.parent)[0]:
        for kind in BASELINES:
            its_name = f"{summary.name}-{kind}"
            if each.summary is None or each.summary.seed != summary.seed or not each.alone:
                continue
            # YYYYmmdd-HHMMSS-<name>-<kind>-xxxx.
            if each.folder.name[16:-5] == its_name:
                found.setdefault(kind, each.summary)
    return found
