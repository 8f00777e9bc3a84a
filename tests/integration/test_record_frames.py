"""The record of a party tells what its peers have seen, and what the ledger has counted."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from pathlib import Path

import pandas as pd
import pytest

from tests.harness import cases
from tests.harness.recorded import of_ledger, of_record, recording
from tests.integration.test_examples import EXAMPLES, RECIPES
from vfl.simulation.inprocess import run_in_process
from vfl_common.bundle import load_entries
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe, divide, load_recipe
from vfl_leaks.recording import Recording
from vfl_party.record.book import folder_of
from vfl_party.record.history import RecordHistory

# ``VFL_RECORD_EXAMPLES=100`` takes all examples, which needs minutes.
EVERY = int(os.environ.get("VFL_RECORD_EXAMPLES", "1"))
# Rounds of an example; all of its exchanges come in one.
SHORT = {"epochs": 1, "trees": 2, "rounds": 1, "finetune_epochs": 1}


def test_what_left_about_a_person_is_what_the_peer_received(tmp_path: Path) -> None:
    """Five runs, each of other people; the frames are recorded where they arrive."""
    everybody = [f"person-{number}" for number in range(50)]
    seen, numbers = Counter[tuple[str, str]](), Counter[str]()
    with recording(tmp_path):
        for number in range(5):
            run = tmp_path / f"run-{number}"
            folder = tmp_path / f"frames-{number}"
            folder.mkdir()
            frames = Recording(folder)
            run_in_process(recipe(number), tables(tmp_path, number), run, attach=frames.attach)
            ids = frames.parties["p0"].prepared.table.ids
            for batch in frames.batches("p1", "p0", "embedding"):
                seen.update((run.name, ids[row]) for row in batch.rows)
                numbers[run.name] += batch.came.numel()
    history = RecordHistory(folder_of(tmp_path, "p1"))
    found = Counter(
        (each.way.run, person)
        for person in everybody
        for each in history.about([person], history.disclosures(kind="embedding"))
    )
    assert len(seen) > 100
    assert found == seen
    told = Counter[str]()
    for each in history.disclosures(kind="embedding"):
        told[each.way.run] += each.numbers
    assert told == numbers


def recipe(seed: int) -> Recipe:
    made = cases.recipe(
        2,
        seed=seed,
        task={"kind": "binary"},
        phase={"epochs": 2, "batch_size": 8},
        rows={"align": "psi", "validation": 0.0, "test": 0.2},
    )
    made["phases"].append({"kind": "evaluate", "splits": ["train", "test"]})
    return parse(Recipe, made, "recipe")


def tables(folder: Path, number: int) -> dict[str, DataSettings]:
    """Thirty people of fifty at each party, of whom some are at both."""
    found: dict[str, DataSettings] = {}
    for at, name in enumerate(("p0", "p1")):
        people = range(5 * (number % 3) + 4 * at, 5 * (number % 3) + 4 * at + 30)
        frame = pd.DataFrame({"id": [f"person-{each}" for each in people]})
        frame["x"] = [(each * 7 + at) % 11 for each in people]
        if not at:
            frame["label"] = [each % 2 for each in people]
        path = folder / f"{name}-{number}.csv"
        frame.sample(frac=1.0, random_state=number + at).to_csv(path, index=False)
        label = {} if at else {"label": "label"}
        found[name] = parse(DataSettings, {"source": str(path), "id": "id", **label}, "data")
    return found


@pytest.mark.parametrize(
    "path", [*islice(RECIPES, EVERY)], ids=lambda path: str(path.relative_to(EXAMPLES))
)
def test_of_every_example_that_trains_the_record_is_the_ledger(path: Path, tmp_path: Path) -> None:
    whole = load_recipe(path)
    phases = [
        {key: min(SHORT[key], value) if key in SHORT else value for key, value in each.items()}
        for each in whole.model_dump(exclude_unset=True)["phases"]
    ]
    short = parse(Recipe, {**whole.model_dump(exclude_unset=True), "phases": phases}, "recipe")
    with recording(tmp_path):
        run_in_process(short, divide(short, path.parent), tmp_path / "run")
    for name in (each.name for each in short.parties):
        ledger = of_ledger(load_entries(tmp_path / "run" / name / "ledger.json"))
        assert sum(ledger.values()) > 0
        assert of_record(tmp_path, name) == ledger
