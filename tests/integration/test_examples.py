"""Every recipe and study in examples/ can be run as it lies there: its phases make sense to all
parties.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import vfl
from tests.harness.here import one_launcher
from tests.unit.repository.test_documents import NOTEBOOK, README, REPO, blocks
from vfl_common.config.recipe import Recipe, divide, load_recipe
from vfl_lab.searching.search import is_search, load_search
from vfl_lab.studies.plan import load_study, read_study_recipe
from vfl_party.assembly.models import encoder_settings
from vfl_party.assembly.trial import try_party

EXAMPLES = Path(__file__).parents[2] / "examples"
# The plug-in's needs the plug-in: test_plugins.py.
RECIPES = sorted(
    path
    for path in EXAMPLES.glob("**/*.toml")
    if "[simulate" in path.read_text() and path.parent.name != "plugin"
)
EVERY_STUDY = sorted((EXAMPLES / "study").glob("*.toml"))
SEARCHES = [path for path in EVERY_STUDY if is_search(path)]
STUDIES = [path for path in EVERY_STUDY if path not in SEARCHES]


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
            make_phases(run.recipe, read_study_recipe(path, study)[1])


@pytest.mark.parametrize("path", SEARCHES, ids=lambda path: path.name)
def test_every_search_can_be_made(path: Path, tmp_path: Path) -> None:
    plan = load_search(path, tmp_path)
    make_phases(plan.recipe.settings, plan.recipe.base)


def test_the_lines_of_python_in_the_readme_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (code,) = blocks(README.read_text(), "python")
    assert len([line for line in code.splitlines() if line.strip()]) <= 6
    (tmp_path / "examples").symlink_to(REPO / "examples")
    monkeypatch.chdir(tmp_path)
    with one_launcher():
        exec(code, {})  # noqa: S102 - our own document
    before, after = capsys.readouterr().out.splitlines()
    assert before.split()[0] == after.split()[0]
    assert float(after.split()[-1]) > 0.95
    assert (tmp_path / "curves.png").stat().st_size > 10_000


def test_the_tutorial_of_frames_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    with one_launcher():
        for code in blocks(NOTEBOOK.read_text(), "python"):
            exec(code, names)  # noqa: S102 - our own document
    assert names["auc"] > 0.95
    assert names["gain"] > 0.0
    assert isinstance(names["run"], vfl.Run)
    scores: pd.DataFrame = names["scores"]
    assert len(scores) == 60
    assert set(scores["state"]) == {"scored"}
