"""What ``vfl prepare`` has written of data sets of columns trains: one round each, of small files in
official formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import vfl
from tests.unit.papers import made_tables as made
from vfl_papers.prepare import load

GIVEN: dict[str, dict[str, Any]] = {
    "avazu": {"train": 40, "test": 20, "buckets": 8},
    "criteo": {"train": 40, "test": 20},
    # Two parties are as good as ten.
    **{name: {"parties": 2} for name in ("gisette", "covtype", "ujiindoorloc", "superconduct")},
}
ONCE = {"phases.fedonce.epochs": 1, "phases.head.epochs": 1}
FEW = {"phases.fedhssl.rounds": 1, "phases.splitnn.steps": 2, "phases.splitnn.validate_every": 2}


@pytest.mark.parametrize("name", made.WRITERS)
def test_a_recipe_trains_on_what_was_prepared(tmp_path: Path, name: str) -> None:
    given, use = GIVEN.get(name, {}), load(name).uses[0]
    files = made.WRITERS[name](tmp_path)
    found = vfl.prepare(name, files, tmp_path / "out", **given)
    assert len(found.parties) == given.get("parties", use.parties)
    short = ONCE if use.paper == "FedOnce" else FEW
    recipe = vfl.Recipe.load(found.recipe).replace({"model.embedding_size": 4, **short})
    run = vfl.simulate(recipe, data=found.parties, quiet=True)
    assert run.metrics["test"]
