"""Every recipe and study in examples/ can be run as it lies there: its phases make sense to all
parties.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from vfl.studies.plan import load_study
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe, load_recipe
from vfl_party.assembly.party import encoder_settings
from vfl_party.assembly.trial import try_party

EXAMPLES = Path(__file__).parents[2] / "examples"
# The plug-in's needs the plug-in: test_plugins.py.
RECIPES = sorted(
    path
    for path in EXAMPLES.glob("**/*.toml")
    if "[simulate" in path.read_text() and path.parent.name != "plugin"
)
STUDIES = sorted((EXAMPLES / "study").glob("*.toml"))


def make_phases(recipe: Recipe, folder: Path) -> None:
    for name, data in divide(recipe, folder).items():
        party = try_party(recipe, name, data, encoder_settings(recipe, name, None))
        assert [phase.name for phase in party.phases] == [phase.name for phase in recipe.phases]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_every_party_can_make_its_models_and_phases(path: Path) -> None:
    make_phases(load_recipe(path), path.parent)


@pytest.mark.parametrize("path", STUDIES, ids=lambda path: path.name)
def test_every_run_of_a_study_can_be_made(path: Path) -> None:
    study, chains = load_study(path)
    # Of one seed.
    for chain in chains[: len(study.methods)]:
        for run in chain.runs:
            make_phases(run.recipe, (path.parent / study.recipe).parent)
