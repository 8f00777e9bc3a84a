"""What was measured of a model with some of its parties, and of the active party alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import pages
from vfl_common.config.recipe import Recipe, read_recorded_recipe
from vfl_common.summary import Worth
from vfl_party.predict.run import Quality, better_alone, read_quality


def made(
    folder: Path, auc: float, parties: tuple[str, ...] = ("bank", "shop"), **more: Any
) -> tuple[Path, Recipe]:
    """Writes a trained run with an AUC of its test rows; ``more``: keys of its summary."""
    tables = pages.recipe_of("binary", parties)
    pages.finished_run(folder, parties=parties, recipe=tables)
    for name in parties:
        facts = {"run_id": folder.name, "job": "train", "trained": True, "finished": True}
        (folder / name / "run.json").write_text(json.dumps(facts))
    summary = json.loads((folder / "summary.json").read_text())
    summary["metrics"]["test"] = {"auc": auc}
    (folder / "summary.json").write_text(json.dumps(summary | more))
    return folder, read_recorded_recipe(tables, "recipe")


def test_a_run_without_sets_of_parties_was_measured_with_all(tmp_path: Path) -> None:
    found = read_quality(*made(tmp_path / "run", 0.9))
    assert (found.metric, found.of(["bank", "shop"]), found.of(["bank"])) == ("auc", 0.9, None)
    assert not found.by_party
    # Of a run without a summary nothing is known.
    (tmp_path / "run" / "summary.json").unlink()
    recipe = read_recorded_recipe(pages.recipe_of("binary", ("bank", "shop")), "recipe")
    assert read_quality(tmp_path / "run", recipe) == Quality()


@pytest.mark.parametrize(("alone", "better"), [(0.72, True), (0.67, False), (0.6, False)])
def test_the_active_party_alone_is_named_where_it_is_better(
    alone: float, tmp_path: Path, *, better: bool
) -> None:
    subsets: list[Any] = [{"parties": ["bank"], "test": 0.67}]
    subsets += [{"parties": ["bank", "shop"], "test": 0.9}]
    worth = Worth(metric="auc", absent="mean", split="test", subsets=subsets)
    run, recipe = made(tmp_path / "joint", 0.9, worth=worth.model_dump())
    quality = read_quality(run, recipe)
    assert quality.by_party
    value = quality.of(["bank"])
    assert better_alone(value, quality, recipe, tmp_path) == ""
    made(tmp_path / "baseline", alone, ("bank",))
    said = better_alone(value, quality, recipe, tmp_path)
    assert bool(said) is better
    if better:
        assert "auc 0.6700, and bank alone 0.7200 on its own test rows (run baseline)" in said
    assert better_alone(None, quality, recipe, tmp_path) == ""
