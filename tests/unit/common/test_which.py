"""A file of another kind than the wanted one: a sentence that says what it is, and what to give."""

from __future__ import annotations

from pathlib import Path

import pytest

import vfl
from tests.harness.errors import raises
from vfl.forecasting.show import count_forecast
from vfl.new.flow import new_party
from vfl.new.options import Flags
from vfl.simulation.run import simulate
from vfl_common.config.base import detect_kind, read_tables
from vfl_common.config.party import load_party
from vfl_common.config.recipe import load_recipe
from vfl_common.errors import Code, InputError
from vfl_lab.studies.plan import load_study

PARTY = 'name = "bank"\nrecipe = "../shared/recipe.toml"\nserver = "127.0.0.1:7000"\n'
METHOD = '[[methods]]\nname = "plain"\nfinetune = [{ kind = "splitnn" }]\n'
STUDY = 'name = "compare"\nrecipe = "recipe.toml"\nseeds = [1]\n'
RECIPE = 'name = "churn"\nphases = [{ kind = "splitnn" }]\n'


@pytest.fixture
def bank(tmp_path: Path) -> Path:
    (tmp_path / "bank").mkdir()
    path = tmp_path / "bank" / "bank.toml"
    path.write_text(PARTY)
    return path


def test_every_command_that_wants_a_recipe_names_that_of_a_party_file(
    bank: Path, tmp_path: Path
) -> None:
    tmp_path / "shared" / "recipe.toml"
    with raises(InputError, Code.CONFIG_INVALID, names=("bank.toml", "recipe.toml")):
        # `vfl-server run` and `vfl-server health` read it so.
        load_recipe(bank)
    with raises(InputError, Code.CONFIG_INVALID, names=("bank.toml", "recipe.toml")):
        vfl.leaks(bank)
    with raises(InputError, Code.CONFIG_INVALID, names="bank.toml"):
        vfl.forecast(bank)
    with raises(InputError, Code.CONFIG_INVALID, names=("bank.toml", "recipe.toml")):
        new_party(Flags("shop.csv", (), None, (), None, None, tmp_path, force=False), bank, "shop")
    study = tmp_path / "study.toml"
    study.write_text(STUDY.replace("recipe.toml", "bank/bank.toml") + METHOD)
    with raises(InputError, Code.CONFIG_INVALID, names=("bank.toml", "recipe.toml")):
        load_study(study)
    bank.write_text(PARTY.replace('"../shared/recipe.toml"', "3"))
    with raises(InputError, Code.CONFIG_INVALID, names="bank.toml"):
        load_recipe(bank)


def test_a_study_is_no_recipe(tmp_path: Path) -> None:
    study = tmp_path / "study.toml"
    study.write_text(STUDY)
    with raises(InputError, Code.CONFIG_INVALID, names=("study.toml", "recipe.toml")):
        simulate(study, tmp_path / "runs")
    with raises(InputError, Code.CONFIG_INVALID, names=("study.toml", "recipe.toml")):
        count_forecast(study)
    assert not (tmp_path / "runs").exists()


def test_a_recipe_is_neither_party_file_nor_study(bank: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(RECIPE)
    with raises(InputError, Code.CONFIG_INVALID, names="recipe.toml"):
        load_party(recipe)
    with raises(InputError, Code.CONFIG_INVALID, names="recipe.toml"):
        load_study(recipe)
    with raises(InputError, Code.CONFIG_INVALID, names="bank.toml"):
        load_study(bank)


def test_a_file_that_tells_nothing_is_left_to_the_check_of_its_keys(tmp_path: Path) -> None:
    assert detect_kind({"name": "bank"}) is None
    path = tmp_path / "odd.toml"
    path.write_text('name = "bank"\n')
    assert read_tables(path, "recipe") == {"name": "bank"}
    with raises(InputError, Code.CONFIG_INVALID, names="odd.toml"):
        load_recipe(path)
