"""The forecast of the examples beside the ledgers of their runs, to the byte.

Of each recipe a few rounds are counted, which have the same messages as a whole run. Recipes whose
phases are of the same kinds, and for which the same is forecast, differ in what is computed and not
in what is sent: one of them is run, and of each method one by processes: a run in this process has
the same ledger (test_in_process.py). ``benchmarks/forecast.py`` runs every recipe, in full.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.harness.federation import launcher
from vfl.library.simulate import run_files
from vfl.simulation.live import View
from vfl.simulation.run import run_federation
from vfl_common.config.base import parse, read_toml
from vfl_common.config.recipe import Recipe
from vfl_common.summary import load_summary
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger

EXAMPLES = Path(__file__).parents[2] / "examples"
# The plug-in's is in test_plugins.py.
RECIPES = sorted(
    path
    for path in EXAMPLES.glob("**/*.toml")
    if "[simulate" in path.read_text() and path.parent.name != "plugin"
)
# Of steps: a round of two epochs and one of one.
SHORT = {"epochs": 2, "rounds": 2, "steps": 6, "validate_every": 2}

RUN = [
    "breast-cancer.toml",
    "diabetes.toml",
    "digits.toml",
    "fedcvt-breast-cancer.toml",
    "fedcvt-digits.toml",
    "fedonce/breast-cancer-l1.toml",
    "fedonce/diabetes.toml",
    "fedonce/digits.toml",
    "mocosfl/digits.toml",
    "own-files/recipe.toml",
    "ssl/breast-cancer.toml",
    "ssl/fedcssl-byol.toml",
    "ssl/fedcssl-moco.toml",
    "ssl/fedhssl-byol.toml",
    "ssl/fedhssl-moco.toml",
    "ssl/fedlocal-byol.toml",
    "ssl/fedlocal-pma-simsiam.toml",
    "ssl/fedsplitnn.toml",
    "ssl/ssvfl-c-moco.toml",
    "ssl/ssvfl-i-moco.toml",
]

BY_PROCESSES = {
    "diabetes.toml",
    "fedcvt-digits.toml",
    "fedonce/breast-cancer-l1.toml",
    "mocosfl/digits.toml",
    "ssl/fedhssl-moco.toml",
    "ssl/ssvfl-c-moco.toml",
}

# The data decide how many nodes a tree has: test_forecast_trees.py.
BOUNDED = {"secureboost-breast-cancer.toml"}


def shortened(path: Path) -> dict[str, Any]:
    tables = read_toml(path)
    for phase in tables["phases"]:
        phase.update({key: min(most, phase[key]) for key, most in SHORT.items() if key in phase})
        if phase["kind"] == "probe":
            phase["least_steps"] = 1
    data = tables["simulate"].get("data", {})
    if data.get("source") == "sklearn:digits":
        # Of 1,797.
        data["limit"] = 1000
    return tables


def distinct() -> dict[str, list[Path]]:
    """{name: recipes of the same kinds of phases with the same forecast}."""
    groups: dict[object, list[Path]] = {}
    for path in RECIPES:
        recipe = parse(Recipe, shortened(path), str(path))
        said = forecast(outlook_of(recipe, path.parent))
        groups.setdefault((said.links, tuple(phase.kind for phase in recipe.phases)), []).append(
            path
        )
    return {str(paths[0].relative_to(EXAMPLES)): paths for paths in groups.values()}


def test_every_example_can_be_forecast() -> None:
    groups = distinct()
    assert sorted(path for paths in groups.values() for path in paths) == RECIPES
    # A new example with messages of its own belongs there.
    assert set(groups) - BOUNDED == set(RUN)


@pytest.mark.slow
@pytest.mark.parametrize("name", RUN)
def test_the_ledger_is_as_forecast(name: str, tmp_path: Path) -> None:
    path = EXAMPLES / name
    tables = shortened(path)
    recipe = parse(Recipe, tables, str(path))
    said = forecast(outlook_of(recipe, path.parent))
    if name in BY_PROCESSES:
        run_federation(tables, recipe, path.parent, tmp_path / "run", View(recipe), launcher())
    else:
        run_files(tables, path.parent, tmp_path / "run")
    summary = load_summary(tmp_path / "run" / "summary.json")
    assert summary.bytes.agrees
    links = compare_with_ledger(said, summary.bytes)
    assert {link.phase for link in links} <= {phase.name for phase in said.phases}
    for link in links:
        assert link.forecast == link.counted, link
    assert {each for each in said.links if each.message_bytes} == {
        each for each in summary.bytes.by_link if each.phase != "control"
    }
