"""Recipes of one party: what a study makes of a federation's, and what such a recipe may not ask
for.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import toml
from tests.harness.present import present
from vfl.simulation.baselines import COMBINED, adapt_phases, alone, combine_columns
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe, divide
from vfl_common.errors import Code, InputError
from vfl_lab.studies.plan import load_study
from vfl_party.assembly.models import encoder_settings
from vfl_party.data import load_table
from vfl_party.data.rows import Prepared, prepare
from vfl_party.phases.context import Party
from vfl_party.phases.course import Course
from vfl_party.phases.rows import PartyData

HERE = Path("/")
TABLE = {"source": "sklearn:breast_cancer", "label": "target", "limit": 100}
DIGITS = {"source": "sklearn:digits", "label": "target", "limit": 60}
OWN = {name: {"source": f"{name}.csv", "id": "id"} for name in ("p0", "p1", "p2")}
OWN["p0"] |= {"label": "y"}


def tables(count: int = 3, *, task: str = "binary", **simulate: Any) -> dict[str, Any]:
    made = cases.recipe(count, task=None if task == "multiclass" else {"kind": task})
    return made | {"simulate": simulate or {"data": TABLE}}


def prepared(recipe: Recipe) -> dict[str, Prepared]:
    """Every party's rows and features, as its program makes them."""
    found = {}
    for name, settings in divide(recipe, Path("/")).items():
        party = present(recipe.party(name))
        table = load_table(settings, with_label=party.role == "active")
        found[name] = prepare(recipe, name, table, settings, encoder_settings(recipe, name, None))
    return found


def features(found: Prepared) -> torch.Tensor:
    return present(found.features).x


@pytest.mark.parametrize("name", ["p0", "p1", "p2"])
def test_a_solo_party_has_the_columns_and_rows_of_the_federation(name: str) -> None:
    given = tables()
    recipe = Recipe.model_validate(given)
    solo = Recipe.model_validate(alone(given, recipe, name, HERE, "here"))
    assert [(party.name, party.role) for party in solo.parties] == [(name, "active")]
    whole, own = prepared(recipe), prepared(solo)[name]
    assert torch.equal(features(own), features(whole[name]))
    assert own.table.ids == whole[name].table.ids
    assert own.table.numeric_names == whole[name].table.numeric_names
    for split, rows in whole["p0"].splits.items():
        assert np.array_equal(own.splits[split], rows), split
    assert torch.equal(present(own.targets), present(whole["p0"].targets))


def test_the_combined_party_has_all_columns_in_the_roster_s_order() -> None:
    given = tables()
    recipe = Recipe.model_validate(given)
    whole = prepared(recipe)
    one = prepared(Recipe.model_validate(combine_columns(given, recipe, HERE, "here")))["combined"]
    assert torch.equal(features(one), torch.cat([features(each) for each in whole.values()], dim=1))
    for split, rows in whole["p0"].splits.items():
        assert np.array_equal(one.splits[split], rows), split


def test_quadrants_become_whole_images_or_stay_quadrants() -> None:
    given = tables(4, task="multiclass", scheme="quadrants", data=DIGITS) | {
        "model": {"embedding_size": 8, "encoder": {"kind": "cnn"}}
    }
    recipe = Recipe.model_validate(given)
    one = prepared(Recipe.model_validate(combine_columns(given, recipe, HERE, "here")))["combined"]
    solo = prepared(Recipe.model_validate(alone(given, recipe, "p3", HERE, "here")))["p3"]
    assert features(one).shape == (60, 1, 8, 8)
    assert torch.equal(features(solo), features(prepared(recipe)["p3"]))


def test_a_solo_party_keeps_its_encoder_and_device_and_the_combined_one_has_the_recipe_s() -> None:
    given = tables(data=TABLE, devices={"p0": "cuda:1", "p2": "cuda:0"})
    given["parties"][2]["encoder"] = {"kind": "mlp", "hidden": [7]}
    recipe = Recipe.model_validate(given)
    solo = Recipe.model_validate(alone(given, recipe, "p2", HERE, "here"))
    one = Recipe.model_validate(combine_columns(given, recipe, HERE, "here"))
    assert solo.active.encoder == recipe.parties[2].encoder
    assert (present(solo.simulate).devices, present(one.simulate).devices) == (
        {"p2": "cuda:0"},
        {"combined": "cuda:1"},
    )
    assert one.active.encoder is None
    # A study tells a run of one from another's.
    assert len({recipe.digest(), solo.digest(), one.digest()}) == 3


def test_a_solo_party_keeps_its_optimizer_and_its_width() -> None:
    given, own = tables(), {"kind": "sgd", "lr": 0.1}
    given["parties"][1]["embedding_size"] = 5
    given["phases"][0] |= {"optimizer": {"lr": 0.5}, "optimizers": {"p1": own}}
    made = alone(given, parse(Recipe, given, "recipe"), "p1", HERE, "study")
    assert made["model"]["embedding_size"] == 5
    (phase,) = adapt_phases(made["phases"], "p1")
    assert (phase["optimizer"], "optimizers" in phase) == (own, False)
    assert parse(Recipe, made | {"phases": [phase]}, "recipe").embedding_size("p1") == 5
    for name in ("p0", COMBINED):
        (phase,) = adapt_phases(given["phases"], name)
        assert (phase["optimizer"], "optimizers" in phase) == ({"lr": 0.5}, False)


@pytest.mark.parametrize("key", [{"subsets": True}, {"party_dropout": 0.3}])
def test_who_is_alone_learns_to_do_without_nobody(key: dict[str, Any]) -> None:
    evaluate = {"kind": "evaluate", "subsets": True}
    given = tables() | {"phases": [{"kind": "splitnn", "epochs": 3, **key}, evaluate]}
    given["model"] = {"combine": "mean", "embedding_size": 8}
    made = alone(given, parse(Recipe, given, "recipe"), "p0", HERE, "study")
    phases = adapt_phases(made["phases"], "p0")
    assert phases == [{"kind": "splitnn", "epochs": 3}, evaluate]
    assert Course(parse(Recipe, made | {"phases": phases}, "recipe")).learns == ""


def test_the_active_party_may_be_alone_with_a_file_of_its_own() -> None:
    given = tables(parties=OWN)
    solo = Recipe.model_validate(alone(given, Recipe.model_validate(given), "p0", HERE, "here"))
    assert [each.source for each in present(solo.simulate).parties.values()] == ["/p0.csv"]


def with_methods(folder: Path, methods: list[dict[str, Any]], given: dict[str, Any]) -> Path:
    (folder / "base.toml").write_text(toml(given))
    phases = [{"kind": "splitnn", "epochs": 1}, {"kind": "evaluate"}]
    study = {
        "name": "s",
        "recipe": "base.toml",
        "seeds": [1],
        "finetune": phases,
        "methods": methods,
    }
    (folder / "study.toml").write_text(toml(study))
    return folder / "study.toml"


def test_a_study_makes_these_recipes_after_the_overrides(tmp_path: Path) -> None:
    methods: list[dict[str, Any]] = [
        {"name": "Solo", "alone": "p1", "overrides": {"simulate.data.limit": 50}},
        {
            "name": "Linear",
            "combined": True,
            "overrides": {"model.encoder": {"kind": "mlp", "hidden": []}},
        },
    ]
    solo, linear = [
        chain.finetune[0].recipe
        for chain in load_study(with_methods(tmp_path, methods, tables()))[1]
    ]
    assert (solo.method, solo.seed, solo.active.name) == ("splitnn", 1, "p1")
    assert divide(solo, tmp_path)["p1"].limit == 50
    assert linear.model.encoder.hidden == ()  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "method"),
    [
        (tables(), {"alone": "p9"}),
        (tables(parties=OWN), {"alone": "p1"}),
        (tables(), {"combined": True, "alone": "p0"}),
        (
            tables(data=TABLE | {"view": {"scheme": "columns", "part": 0, "parts": 2}}),
            {"combined": True},
        ),
    ],
)
def test_what_cannot_be_alone_is_told_in_one_sentence(
    given: dict[str, Any], method: dict[str, Any], tmp_path: Path
) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        load_study(with_methods(tmp_path, [{"name": "A", **method}], given))


def test_pretraining_is_shared_only_between_the_same_parties(tmp_path: Path) -> None:
    first = {"name": "A", "pretrain": [{"kind": "contrastive", "ssl": "simclr", "rounds": 1}]}
    path = with_methods(
        tmp_path, [first, {"name": "B", "pretrain_of": "A", "alone": "p0"}], tables()
    )
    with raises(InputError, Code.CONFIG_INVALID, names=("study.toml", "pretrain_of")):
        load_study(path)


# --- phases of a party that is alone


def party_of(given: dict[str, Any], phases: list[dict[str, Any]]) -> Party:
    recipe = Recipe.model_validate(given | {"phases": phases})
    (name,) = (party.name for party in recipe.parties)
    own = prepared(recipe)[name]
    models: dict[str, torch.nn.Module] = {
        "encoder": torch.nn.Linear(30, 8),
        "top": torch.nn.Linear(8, 1),
    }
    data = PartyData(own.splits, own.features, own.labels, own.targets)
    return Party(name, Course(recipe), torch.device("cpu"), models, data)


@pytest.mark.parametrize(
    "phase",
    [
        {"kind": "fedhssl", "ssl": "simsiam", "rounds": 1},
        {"kind": "fedhssl", "ssl": "simsiam", "rounds": 1, "cross": False},
        {"kind": "splitnn", "epochs": 1, "max_bytes": 10},
    ],
)
def test_steps_that_need_a_peer_are_refused_before_training(phase: dict[str, Any]) -> None:
    party = party_of(tables(1), [phase])
    with raises(InputError, Code.CONFIG_INVALID, names="p0"):
        party.course.build(party)


def test_differential_privacy_of_parties_that_are_not_there_costs_nothing() -> None:
    party = party_of(tables(1), [{"kind": "fedonce", "dp": {"epsilon": 1.0}}])
    assert len(party.course.build(party)) == 1


def test_a_party_alone_needs_features() -> None:
    with raises(ValueError, names="p0"):
        Recipe.model_validate(cases.recipe(1, active_features=False))


# --- boosted trees


def test_trees_are_the_only_phase() -> None:
    phases: list[dict[str, Any]] = [{"kind": "gbdt"}, {"kind": "evaluate"}]
    both = party_of(tables(1), phases)
    with raises(InputError, Code.CONFIG_INVALID, names="gbdt"):
        both.course.build(both)
    start = {"run": "earlier", "phases": phases[:1]}
    later = party_of(tables(1) | {"start": start}, phases[:1])
    with raises(InputError, Code.CONFIG_INVALID, names="gbdt"):
        later.course.build(later)


def test_only_a_phase_with_a_model_of_its_own_needs_no_table_model() -> None:
    lacks = {key: each for key, each in tables(1).items() if key != "model"}
    with raises(InputError, Code.CONFIG_INVALID, names="x.toml"):
        parse(
            Recipe,
            lacks | {"phases": [{"kind": "splitnn", "epochs": 1}, {"kind": "evaluate"}]},
            "x.toml",
        )
    for phase, fits in (({"kind": "gbdt"}, True), ({"kind": "splitnn", "epochs": 1}, False)):
        course = Course(parse(Recipe, lacks | {"phases": [phase]}, ""))
        if fits:
            course.check()
            assert course.recipe.model.embedding_size == 1
            written = parse(Recipe, lacks | {"phases": [phase], "model": {"embedding_size": 1}}, "")
            assert course.recipe.digest() == written.digest()
        else:
            with raises(InputError, Code.CONFIG_INVALID):
                course.check()


def test_without_lightgbm_the_command_that_installs_it_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "lightgbm", None)
    party = party_of(tables(1), [{"kind": "gbdt"}])
    with raises(InputError, Code.CONFIG_INVALID, names="sys.modules"):
        party.course.build(party)


def test_early_stopping_keeps_the_trees_up_to_the_best() -> None:
    """The metrics are those of a forest of so many trees, grown without early stopping."""
    party = party_of(tables(1), [{"kind": "gbdt", "min_rows": 2, "early_stopping": 3}])
    stopped = party.course.build(party)[0].run_round(0)
    kept = int(stopped.note.split()[1])
    assert 0 < kept < 500
    party = party_of(tables(1), [{"kind": "gbdt", "min_rows": 2, "trees": kept}])
    assert party.course.build(party)[0].run_round(0).metrics == stopped.metrics
    party = party_of(tables(1), [{"kind": "gbdt", "min_rows": 2, "trees": kept + 3}])
    assert party.course.build(party)[0].run_round(0).metrics != stopped.metrics


@pytest.mark.parametrize(
    ("task", "source", "metric", "own", "combined_"),
    [
        ("multiclass", "digits", "accuracy", 0.3, 0.7),
        ("regression", "diabetes", "rmse", 77.0, 70.0),
    ],
)
def test_trees_learn_other_tasks_and_more_from_all_columns(
    task: str, source: str, metric: str, own: float, combined_: float
) -> None:
    """Digits: a fifth of the pixels, then all. Diabetes, of which a mean is wrong by about 77: half
    of the columns.
    """
    given = tables(5 if task == "multiclass" else 2, task=task)
    given |= {
        "simulate": {"data": {"source": f"sklearn:{source}", "label": "target", "limit": 300}}
    }
    given["rows"] = {"validation": 0.2, "test": 0.2}
    recipe, found = Recipe.model_validate(given), []
    for made in (
        alone(given, recipe, "p0", HERE, "here"),
        combine_columns(given, recipe, HERE, "here"),
    ):
        party = party_of(made, [{"kind": "gbdt", "early_stopping": 10}])
        found.append(party.course.build(party)[0].run_round(0).metrics["test"][metric])
    sign = 1 if metric == "accuracy" else -1
    assert sign * found[0] > sign * own
    assert sign * found[1] > sign * combined_
