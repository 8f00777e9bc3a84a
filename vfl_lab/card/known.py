"""Reads the facts for a model card from the files of a run.

A card is public, so it contains only counts and facts that all parties know. It contains no name,
category, statistic or value of a column.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.simulation.baselines import BASELINES
from vfl.summary.reading import find, find_run_folder, read_history
from vfl.summary.rounds import PartyFolder
from vfl.summary.runs import find_runs
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.ledger import load_entries
from vfl_common.run_folder import RunFolder
from vfl_common.summary import Summary


@dataclass(frozen=True)
class CardFacts:
    """The facts of a trained run from its files.

    ``party``: the party whose folder was read; '' if all folders of the run were read.
    ``summary``: the run's summary, which only the server and the active party have. ``sent``:
    {(receiver, phase, kind): bytes} from the party's ledger. ``own``: {phase: {split: {metric:
    value}}} from the party's last round of each phase. ``baselines``: {kind: the newest baseline
    with the same recipe name and seed}.
    """

    folder: Path
    recipe: Recipe
    party: str = ""
    summary: Summary | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    sent: Mapping[tuple[str, str, str], int] = field(default_factory=dict)
    own: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    baselines: Mapping[str, Summary] = field(default_factory=dict)


def read_run(path: Path, party: str | None) -> CardFacts:
    """Reads a run from its folder, or from a party's folder in it.

    Args:
        path: the folder of the run, or of a party in it.
        party: the party of the card; None: the party of the folder, or the only party.

    Raises InputError if the folder has no run that was trained to its end.
    """
    folder = find_run_folder(path)
    names = sorted(file.parent.name for file in folder.glob("*/run.json"))
    if not names:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: does not contain a run. Give the folder OUT/RUN-ID, or a party's folder in "
            "it.",
        )
    name = party or (path.resolve().name if folder != path else "")
    if not name and len(names) == 1:
        name = names[0]
    if name and name not in names:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: has no folder of party {name}. Choose one of {', '.join(names)}.",
        )
    source = PartyFolder(folder / (name or names[0]))
    facts = source.read("run.json")
    if facts.get("job") != "train" or not facts.get("finished"):
        raise InputError(
            Code.FILE_INVALID,
            f"{source.folder}: is not from a finished training run. Give the folder of a finished "
            "training run.",
        )
    recipe = RunFolder(source.folder, source.run_id).recipe()
    has_summary = (folder / "summary.json").is_file()
    any_summary = find(folder).summary if has_summary else None
    # Without a simulation, a passive party's machine has no summary, so its card does not use it.
    passive = {other.name for other in recipe.passives}
    summary = None if name in passive else any_summary
    return CardFacts(
        folder,
        recipe,
        name,
        summary,
        facts,
        _sum_sent_bytes(source.folder),
        _read_last_metrics(source.folder),
        _find_baselines(folder, summary) if summary is not None else {},
    )


def _sum_sent_bytes(folder: Path) -> dict[tuple[str, str, str], int]:
    totals: dict[tuple[str, str, str], int] = {}
    for entry in load_entries(folder / "ledger.json"):
        if entry.direction == "sent":
            key = (entry.peer, entry.phase, entry.kind)
            totals[key] = totals.get(key, 0) + entry.message_bytes
    return totals


def _read_last_metrics(folder: Path) -> dict[str, Mapping[str, Mapping[str, float]]]:
    """Returns {phase: the metrics of its last round}, for the phases in which the party has
    metrics.
    """
    return {line.phase: line.metrics for line in read_history(folder) if line.metrics}


def _find_baselines(folder: Path, summary: Summary) -> dict[str, Summary]:
    baselines: dict[str, Summary] = {}
    for run in find_runs(folder.parent)[0]:
        for kind in BASELINES:
            baseline_name = f"{summary.name}-{kind}"
            if run.summary is None or run.summary.seed != summary.seed or not run.alone:
                continue
            # The name of a folder is YYYYmmdd-HHMMSS-<name>-<kind>-xxxx.
            if run.folder.name[16:-5] == baseline_name:
                baselines.setdefault(kind, run.summary)
    return baselines
