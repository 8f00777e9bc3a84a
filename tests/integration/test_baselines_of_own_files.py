"""Baselines over the parties' own data: the same rows, each party's columns prepared as the party
does for itself.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

import vfl
from tests.harness.errors import assert_names, raises
from tests.harness.federation import toml
from tests.harness.here import one_launcher
from tests.harness.present import present
from vfl.cli import cli
from vfl.simulation import BASELINES
from vfl.simulation.baselines import baseline, make_from_party_file
from vfl.simulation.federation import Origin
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_lab.production.upkeep import models, show_models
from vfl_lab.studies.plan import load_study
from vfl_lab.studies.run import run_study
from vfl_party.assembly.party import Assembled
from vfl_party.assembly.trial import try_parties
from vfl_party.predict.prediction import Alone
from vfl_party.predict.results import Output
from vfl_party.predict.run import load_joint, load_trained, prediction_data

ROWS = 120
NUMBERS = np.random.default_rng(7)
IDS = np.array([f"c{number:03d}" for number in range(ROWS)])
AGE, SIZE = NUMBERS.normal(50, 9, ROWS), NUMBERS.normal(0, 1, ROWS)
LEFT = np.where((AGE - 50) / 9 + 1.5 * SIZE > 0, "yes", "no")
BANK = pd.DataFrame(
    {"id": IDS, "left": LEFT, "age": AGE, "colour": NUMBERS.choice(["red", "blue"], ROWS)}
)
# Two columns have names of the bank's, one value in ten is missing.
SHOP = pd.DataFrame(
    {
        "id": IDS,
        "age": np.where(NUMBERS.random(ROWS) < 0.1, np.nan, 3 * SIZE),
        "colour": NUMBERS.integers(0, 3, ROWS),
        "secret": LEFT,
    }
)
OWN: dict[str, dict[str, Any]] = {
    "bank": {"source": "bank.csv", "id": "id", "label": "left", "scale": "minmax"},
    "shop": {
        "source": "shop.csv",
        "id": "id",
        "missing": "median",
        "categorical": ["colour"],
        "drop": ["secret"],
    },
}
PHASES: list[dict[str, Any]] = [
    {"kind": "splitnn", "epochs": 8, "batch_size": 16},
    {"kind": "evaluate"},
]


def recipe(**changes: Any) -> dict[str, Any]:
    return {
        "name": "own",
        "seed": 3,
        "task": {"kind": "binary"},
        "parties": [{"name": "bank", "role": "active"}, {"name": "shop", "role": "passive"}],
        "rows": {"validation": 0.2, "test": 0.25},
        "model": {"embedding_size": 8, "encoder": {"kind": "mlp", "hidden": [8]}},
        "phases": PHASES,
        "simulate": {"parties": OWN},
        **changes,
    }


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A folder with the parties' files, of which one is in another order."""
    BANK.to_csv(tmp_path / "bank.csv", index=False)
    SHOP.sample(frac=1.0, random_state=1).to_csv(tmp_path / "shop.csv", index=False)
    (tmp_path / "own.toml").write_text(toml(recipe()))
    return tmp_path


def made(kind: str, folder: Path, given: dict[str, Any] | None = None) -> Recipe:
    return Recipe.model_validate(baseline(given or recipe(), kind, folder, "here"))


def features(party: Assembled) -> torch.Tensor:
    found = present(party.prepared.features)
    whole = (
        found.x
        if found.categories is None
        else torch.cat([found.x, found.categories.float()], dim=1)
    )
    # Columns in an order that follows from their values.
    return whole[:, np.lexsort(whole.numpy())]


@pytest.mark.parametrize("encoder", ["mlp", "tabular"])
def test_rows_labels_and_columns_are_those_of_the_federation(encoder: str, here: Path) -> None:
    given = recipe(model={"embedding_size": 8, "encoder": {"kind": encoder}})
    parties = try_parties(Recipe.model_validate(given), here)
    bank, shop = parties["bank"], parties["shop"]
    both = np.concatenate([features(bank), features(shop)], axis=1)
    for kind in BASELINES:
        (one,) = try_parties(made(kind, here, given), here).values()
        assert one.prepared.table.ids == bank.prepared.table.ids == shop.prepared.table.ids
        for split, rows in bank.prepared.splits.items():
            assert np.array_equal(one.prepared.splits[split], rows), (kind, split)
        assert torch.equal(present(one.prepared.targets), present(bank.prepared.targets))
        wanted = features(bank).numpy() if kind.endswith("alone") else both[:, np.lexsort(both)]
        assert np.array_equal(features(one).numpy(), wanted), kind


def test_columns_are_named_after_their_party(here: Path) -> None:
    (one,) = try_parties(made("combined", here), here).values()
    table = one.prepared.table
    assert table.numeric_names == ("bank:age", "shop:age")
    assert table.categorical_names == ("bank:colour", "shop:colour")
    assert table.source == "the joined tables of bank, shop"


def test_the_columns_of_one_party_alone_keep_their_names(here: Path) -> None:
    given = recipe(rows=recipe()["rows"] | {"align": "psi"})
    (one,) = try_parties(made("alone", here, given), here).values()
    assert one.prepared.table.numeric_names == ("age",)
    assert one.prepared.table.categorical_names == ("colour",)


@pytest.mark.parametrize("align", ["digest", "psi"])
def test_the_active_party_s_baseline_stands_in_for_the_others(align: str, here: Path) -> None:
    """``predict.alone`` names the run that ``vfl report --baselines`` has made."""
    (here / "own.toml").write_text(toml(recipe(rows=recipe()["rows"] | {"align": align})))
    alone, joint = (
        vfl.simulate(here / "own.toml", baseline=kind, out=here / "runs", quiet=True)
        for kind in ("alone", None)
    )
    found = load_joint(joint.folder, "bank")
    own = DataSettings.model_validate(OWN["bank"]).absolute(here)
    stand_in = Alone.load(alone.folder, found, "bank", own, None, None)
    stand_in.write([Output(here / "away.csv")], torch.device("cpu"))
    scores = pd.read_csv(here / "away.csv").set_index("id")["score_yes"]
    assert len(scores) == ROWS
    kept = pd.DataFrame(alone.predictions).set_index("id")["score_yes"]
    np.testing.assert_allclose(scores[kept.index], kept, atol=1e-6)
    # Both have the recipe's name.
    marked = {each.run: each.alone for each in models(here / "runs")}
    assert marked == {alone.folder.name: True, joint.folder.name: False}
    told = Console(file=io.StringIO(), width=200)
    show_models(models(here / "runs"), told)
    lines = told.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert ["(one party)" in line for line in lines if "-own" in line] == [
        each.alone for each in models(here / "runs")
    ]


def test_parties_whose_names_begin_alike_keep_their_columns_apart(here: Path) -> None:
    parties = [{"name": "b", "role": "active"}, {"name": "b.a", "role": "passive"}]
    given = recipe(parties=parties, simulate={"parties": {"b": OWN["bank"], "b.a": OWN["shop"]}})
    (one,) = try_parties(made("combined", here, given), here).values()
    (other,) = try_parties(made("combined", here), here).values()
    assert torch.equal(features(one), features(other))


def test_an_active_party_with_labels_only_gives_the_labels(here: Path) -> None:
    given = recipe()
    given["parties"] = [{"name": "bank", "role": "active", "features": False}, given["parties"][1]]
    (one,) = try_parties(made("combined", here, given), here).values()
    assert torch.equal(
        features(one), features(try_parties(Recipe.model_validate(given), here)["shop"])
    )
    with raises(InputError, Code.CONFIG_INVALID, names="bank"):
        made("alone", here, given)


def test_one_party_may_share_a_data_set_and_another_have_its_own(tmp_path: Path) -> None:
    """The ids of a named set are the numbers of its rows, with zeros before them."""
    pd.DataFrame({"n": [f"{number:03d}" for number in range(60)], "x": np.arange(60.0)}).to_csv(
        tmp_path / "more.csv", index=False
    )
    shared = {"source": "sklearn:breast_cancer", "label": "target", "limit": 60}
    simulate = {"data": shared, "parties": {"more": {"source": "more.csv", "id": "n"}}}
    parties = [*recipe()["parties"], {"name": "more", "role": "passive"}]
    given = recipe(parties=parties, simulate=simulate)
    whole = try_parties(Recipe.model_validate(given), tmp_path)
    (one,) = try_parties(made("combined", tmp_path, given), tmp_path).values()
    assert features(one).shape[1] == sum(features(each).shape[1] for each in whole.values()) == 31
    assert torch.equal(present(one.prepared.targets), whole["bank"].prepared.targets)  # type: ignore[arg-type]


def test_what_crosses_between_parties_is_no_part_of_a_baseline(here: Path) -> None:
    phase = PHASES[0] | {
        "codec": "float16",
        "transforms": [{"kind": "gaussian", "exchange": "embedding", "sigma": 1}],
    }
    given = recipe(
        phases=[phase, PHASES[1]], start={"run": "before"}, wire=[{"codec": "bits", "bits": 4}]
    )
    alone = made("alone", here, given)
    assert (alone.phases, alone.start, alone.wire) == (
        Recipe.model_validate(recipe()).phases,
        None,
        (),
    )
    try_parties(alone, here)


def test_trees_take_the_recipe_s_own_phase_or_stop_early(here: Path) -> None:
    given = recipe()
    given["model"] = given["model"] | {"precision": "bfloat16"}
    assert [(each.kind, each.settings) for each in made("gbdt", here, given).phases] == [
        ("gbdt", {"early_stopping": 50})
    ]
    assert made("gbdt", here, given).model.precision == "float32"
    assert made("gbdt-alone", here, recipe(rows={"validation": 0.0})).phases[0].settings == {}
    own = made("gbdt", here, recipe(phases=[{"kind": "gbdt", "trees": 7}]))
    assert [each.settings for each in own.phases] == [{"trees": 7}]


# -- what cannot be


@pytest.mark.parametrize("kind", BASELINES)
def test_a_recipe_of_trees_without_a_model_has_each_baseline(kind: str, here: Path) -> None:
    tables = recipe(phases=[{"kind": "secureboost", "encryption": "none"}])
    del tables["model"]
    made = Recipe.model_validate(baseline(tables, kind, here, "recipe.toml"))
    assert [phase.kind for phase in made.phases] == [
        "gbdt" if kind.startswith("gbdt") else "secureboost"
    ]


def test_what_cannot_be_joined_is_one_sentence(here: Path) -> None:
    def told(given: dict[str, Any], kind: str = "combined") -> str:
        with raises(InputError, Code.CONFIG_INVALID, Code.DATA_INVALID) as refused:
            try_parties(made(kind, here, given), here)
        return str(refused.value)

    limited = {"parties": OWN | {"shop": OWN["shop"] | {"limit": 100}}}
    told(recipe(simulate=limited))
    SHOP.assign(id=[f"d{number:03d}" for number in range(ROWS)]).to_csv(
        here / "shop.csv", index=False
    )
    told(recipe())
    images = {
        "parties": {
            "bank": {"source": "sklearn:breast_cancer", "limit": 50},
            "shop": {"source": "sklearn:digits"},
        }
    }
    told(recipe(simulate=images))
    names = [{"name": "combined", "role": "active"}, {"name": "shop", "role": "passive"}]
    named = {"parties": {"combined": OWN["bank"], "shop": OWN["shop"]}}
    told(recipe(parties=names, simulate=named))
    told(recipe(), "best")


def test_the_command_knows_the_baselines(here: Path) -> None:
    refused = CliRunner().invoke(cli, ["simulate", str(here / "own.toml"), "--baseline", "best"])
    assert refused.exit_code == 2
    assert_names(refused.output, "--baseline", "best")


def test_a_party_file_gives_the_baseline_of_its_own_table(here: Path) -> None:
    whole = {key: each for key, each in recipe().items() if key != "simulate"}
    (here / "recipe.toml").write_text(toml(whole))
    tls = {"ca": "ca.pem", "certificate": "bank.pem", "key": "bank.key"}
    file = {
        "name": "bank",
        "recipe": "recipe.toml",
        "server": "127.0.0.1:1",
        "threads": 2,
        "tls": tls,
    }
    more = BANK.assign(id=[f"d{number:03d}" for number in range(ROWS)])
    pd.concat([BANK, more]).to_csv(here / "own.csv", index=False)
    own = {"source": "own.csv", "id": "id", "label": "left"}
    (here / "bank.toml").write_text(toml(file | {"data": own}))
    found = Recipe.model_validate(make_from_party_file(here / "bank.toml", "alone"))
    assert [(each.name, each.role) for each in found.parties] == [("bank", "active")]
    assert present(found.simulate).threads == 2
    assert found.rows.align == "digest"
    (party,) = try_parties(found, here).values()
    # Its own rows, also those that the shop lacks.
    assert len(party.prepared.table.ids) == 2 * ROWS

    def refused(place: str, kind: str | None, **changes: Any) -> None:
        (here / place).write_text(toml(file | {"data": own} | changes))
        with raises(InputError, Code.CONFIG_INVALID):
            make_from_party_file(here / place, kind)

    refused("bank.toml", None)
    refused("bank.toml", "combined")
    refused("shop.toml", "alone", name="shop")
    features = {
        "parties": [
            {"name": "bank", "role": "active", "features": False},
            {"name": "shop", "role": "passive"},
        ]
    }
    (here / "bare.toml").write_text(toml(whole | features))
    refused("none.toml", "alone", recipe="bare.toml")


# -- the library

DATA = {
    "bank": vfl.Data(BANK, label="left", settings={"scale": "minmax"}),
    "shop": vfl.Data(
        SHOP, settings={"missing": "median", "categorical": ["colour"], "drop": ["secret"]}
    ),
}


def run(kind: str | None, data: Any = DATA, **more: Any) -> vfl.Run:
    return vfl.simulate(recipe(simulate={}), data, baseline=kind, quiet=True, **more)


@pytest.fixture(scope="module")
def combined() -> vfl.Run:
    return run("combined")


def test_all_columns_say_more_than_the_bank_s(combined: vfl.Run) -> None:
    auc = {"combined": combined.metrics["test"]["auc"]}
    auc |= {kind: run(kind).metrics["test"]["auc"] for kind in ("alone", "gbdt", "gbdt-alone")}
    assert min(auc["combined"], auc["gbdt"]) > max(auc["alone"], auc["gbdt-alone"])
    assert combined.folder.name.rpartition("-")[0].endswith("-own-combined")
    assert [party.name for party in combined.summary.parties] == ["server", "combined"]
    assert combined.bytes.total.payload_bytes == 0


def test_files_and_frames_give_the_same_baseline(here: Path, combined: vfl.Run) -> None:
    assert (
        vfl.simulate(here / "own.toml", baseline="combined", quiet=True).metrics == combined.metrics
    )


def test_a_baseline_of_joined_columns_predicts_from_each_party_s_rows(combined: vfl.Run) -> None:
    new = {
        "bank": BANK.drop(columns="left").tail(20)[::-1],
        "shop": SHOP.drop(columns="secret").tail(20),
    }
    found = combined.predict(new)
    assert found["id"] == new["bank"]["id"].tolist()
    whole = combined.predict({"bank": BANK, "shop": SHOP})
    assert found["score_yes"] == pytest.approx(whole["score_yes"][-20:][::-1], rel=1e-5)
    with raises(InputError, Code.DATA_INVALID, names="shop"):
        combined.predict({"bank": BANK})


def test_tables_are_joined_by_the_ids_that_the_rules_make(combined: vfl.Run) -> None:
    shop = vfl.Data(SHOP.assign(id=" " + SHOP["id"].str.upper()), settings=DATA["shop"].settings)
    spelt = recipe(simulate={}, rows=recipe()["rows"] | {"id_rules": ["trim", "casefold"]})
    found = vfl.simulate(spelt, DATA | {"shop": shop}, baseline="combined", quiet=True)
    assert found.metrics == combined.metrics
    new = {
        "bank": BANK.drop(columns="left").tail(9),
        "shop": shop.frame.drop(columns="secret").tail(9),
    }
    assert found.predict(new)["id"] == BANK["id"].tail(9).tolist()


def test_one_file_cannot_stand_for_joined_tables(combined: vfl.Run) -> None:
    trained = load_trained(combined.folder, "combined")
    settings = Origin.of(combined.folder).data["combined"]
    with raises(InputError, Code.CONFIG_INVALID):
        prediction_data(settings, "new.csv", trained.state)
    # New rows may have more columns, and need no label.
    read = prediction_data(settings, None, trained.state)
    assert {name: (part.columns, part.label) for name, part in read.parts.items()} == {
        "bank": (("age", "colour"), None),
        "shop": (("age", "colour"), None),
    }


def test_the_settings_of_joined_tables_are_kept_with_the_run(combined: vfl.Run) -> None:
    origin = Origin.of(combined.folder)
    assert list(origin.data["combined"].parts) == list(origin.parts()) == ["bank", "shop"]
    with raises(InputError, Code.DATA_INVALID, names=("bank", "shop")):
        combined.predict()


@pytest.mark.slow
def test_processes_compute_the_same_baseline_from_frames(combined: vfl.Run) -> None:
    with one_launcher():
        found = run("combined", processes=True)
    assert found.metrics == combined.metrics
    assert found.predict({"bank": BANK, "shop": SHOP}) == combined.predict(
        {"bank": BANK, "shop": SHOP}
    )


def test_a_study_of_the_library_compares_baselines(combined: vfl.Run) -> None:
    found = vfl.study(
        recipe(simulate={}), {"baseline": [None, "combined"]}, DATA, seeds=[3], quiet=True
    )
    columns = found.columns()
    assert columns["baseline"] == [None, "combined"]
    assert columns["test auc"] == [
        run(None).metrics["test"]["auc"],
        combined.metrics["test"]["auc"],
    ]
    axes = found.plot("test auc").axes[0]
    assert [label.get_text() for label in axes.get_xticklabels()] == ["federation", "combined"]
    # Nothing lies between two names.
    assert all(line.get_linestyle() == "None" for line in axes.get_lines())
    with raises(InputError, Code.CONFIG_INVALID, names="best"):
        vfl.study(recipe(simulate={}), {"baseline": ["best"]}, DATA)


# -- vfl study


def study(folder: Path, **changes: Any) -> Path:
    trees = [{"kind": "gbdt", "trees": 20, "min_rows": 5}]
    methods = [
        {"name": "federation"},
        {"name": "alone", "alone": "bank"},
        {"name": "combined", "combined": True},
        {"name": "gbdt", "combined": True, "finetune": trees},
    ]
    tables = {
        "name": "worth",
        "recipe": "own.toml",
        "seeds": [3],
        "finetune": PHASES,
        "methods": methods,
        **changes,
    }
    (folder / "study.toml").write_text(toml(tables))
    return folder / "study.toml"


def test_the_study_s_phases_keep_their_codec_but_in_a_baseline(here: Path) -> None:
    phases = [PHASES[0] | {"codec": "float16"}, PHASES[1]]
    codecs = {
        chain.finetune[0].method: chain.finetune[0].recipe.phases[0].codec
        for chain in load_study(study(here, finetune=phases))[1]
    }
    assert codecs == {
        "federation": "float16",
        "alone": "identity",
        "combined": "identity",
        "gbdt": "identity",
    }


@pytest.mark.slow
def test_a_study_over_own_files_has_federation_and_baselines_in_one_table(
    here: Path, combined: vfl.Run
) -> None:
    with one_launcher():
        results = run_study(study(here, metric="auc"), here / "out")
    assert [result.method for result in results] == ["federation", "alone", "combined", "gbdt"]
    assert results[2].metrics["test"] == combined.metrics["test"]
    lines = (here / "out" / "worth" / "results.csv").read_text().splitlines()
    assert [line.split(",")[1] for line in lines[1:]] == ["federation", "alone", "combined", "gbdt"]
    assert (here / "out" / "worth" / "results.png").stat().st_size > 0
