"""Optimizers of single parties, schedules, widths and folds, in every method that has them: equal
to one process, resumed bit for bit, forecast to the byte, and refused where they mean nothing.

Split training itself is in test_exact.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.datasets import load_breast_cancer
from torch import nn

import vfl
from tests.harness import (
    cases,
    reference_fedcvt,
    reference_fedhssl,
    reference_fedonce,
    reference_ssvfl,
)
from tests.harness.errors import raises
from tests.harness.federation import Federation
from tests.harness.memory import in_memory, in_process
from tests.integration import test_fedcvt, test_fedhssl, test_fedonce
from tests.integration.test_exact import TOLERANCE, largest_deviation
from tests.integration.test_in_process import sized
from tests.integration.test_ssl_phases import check_kill
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import split_rows
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger
from vfl_party.methods.head.upload import zero_late_weights
from vfl_party.phases.course import Course

STEPS = {
    "kind": "adamw",
    "lr": 0.01,
    "weight_decay": 0.1,
    "schedule": "step",
    "step_epochs": 1,
    "factor": 0.5,
    "warmup_epochs": 1,
}
OWN = {"p1": {"kind": "sgd", "lr": 0.05, "momentum": 0.5, "clip_norm": 0.5, "schedule": "cosine"}}
# A bias before batch norm has a gradient of zero but for rounding, which Adam makes large.
SGD_STEPS = STEPS | {"kind": "sgd", "lr": 0.05}
BINARY: dict[str, Any] = {"kind": "binary"}
TABLE = cases.columns("sklearn:breast_cancer", 3, limit=120)


@pytest.mark.usefixtures("float64")
def test_fedcvt_of_one_process(tmp_path: Path) -> None:
    tables = test_fedcvt.recipe(optimizer=STEPS, optimizers=OWN)
    data = test_fedcvt.DATA["binary"]
    in_process(tmp_path / "run", tables, data)
    (*_, want), _ = reference_fedcvt.train(tables, data)
    for name in data:
        got = test_fedcvt.parameters(tmp_path / "run", name)
        wanted = {key: want[name][key] for key in got}
        assert largest_deviation({name: got}, {name: wanted}) <= TOLERANCE


@pytest.mark.usefixtures("float64")
def test_fedonce_and_its_head_of_one_process(tmp_path: Path) -> None:
    tables = sized(
        test_fedonce.recipe(2, "binary", optimizer=STEPS, optimizers=OWN), {"p0": 4, "p1": 2}
    )
    tables["phases"][1] |= {"optimizer": STEPS}
    data = test_fedonce.data(2, "binary")
    got = in_memory(tmp_path, tables, data)
    assert got["p0"]["top.0.weight"].shape[1] == 6
    want = reference_fedonce.train(tables, data)
    assert largest_deviation(got, want) <= TOLERANCE


@pytest.mark.usefixtures("float64")
def test_fedhssl_of_one_process(tmp_path: Path) -> None:
    encoder = {"kind": "mlp", "hidden": [24]}
    tables = test_fedhssl.recipe(2, "simsiam", encoder, optimizers=OWN | {"p0": SGD_STEPS})
    data = cases.digits(2, limit=220)
    got = in_memory(tmp_path, tables, data)
    want = reference_fedhssl.pretrain(tables, data, test_fedhssl.TOP["mlp"])
    worst = largest_deviation(test_fedhssl.without_tops(got), test_fedhssl.encoders_only(want[-1]))
    assert worst <= TOLERANCE


@pytest.mark.usefixtures("float64")
def test_contrastive_learning_and_a_head_of_one_process(tmp_path: Path) -> None:
    tables = sized(cases.recipe(2), {"p0": 6, "p1": 5})
    first = {"kind": "contrastive", "ssl": "simclr", "rounds": 3, "batch_size": 24}
    first |= {"projector": [16, 12], "temperature": 0.2, "optimizers": OWN | {"p0": SGD_STEPS}}
    head = {"kind": "head", "epochs": 4, "batch_size": 16, "optimizer": STEPS}
    tables["phases"] = [first, head, {"kind": "evaluate"}]
    data = cases.digits(2)
    got, want = in_memory(tmp_path, tables, data), reference_ssvfl.train(tables, data)
    assert largest_deviation(got, want) <= TOLERANCE


@pytest.mark.parametrize("victim", ["p0", "p1"])
def test_a_killed_party_changes_nothing_bit_for_bit(victim: str, tmp_path: Path) -> None:
    phase = {"epochs": 6, "optimizer": STEPS, "optimizers": {"p0": {"kind": "adamw"}}}
    rows = {"test": 0.2, "folds": 5, "fold": 2, "split": "stratified"}
    tables = cases.recipe(2, task=BINARY, phase=phase, model={"embedding_size": 64}, rows=rows)
    data = cases.columns("sklearn:breast_cancer", 2, limit=200)
    check_kill(tmp_path, sized(tables, {"p0": 7}), data, victim)


@pytest.mark.parametrize("victim", ["p0", "p1"])
def test_plateaus_are_remembered(victim: str, tmp_path: Path) -> None:
    """The rate falls after the second epoch, the crash is in a later one, and the last are best."""
    falls = {"lr": 0.1, "schedule": "plateau", "plateau_patience": 1, "factor": 0.1}
    phase = {"epochs": 12, "optimizer": falls, "early_stopping": {"patience": 11}}
    model = {"embedding_size": 64, "encoder": {"kind": "mlp", "hidden": [8], "dropout": 0.3}}
    tables = cases.recipe(
        2, seed=1, task=BINARY, phase=phase, model=model, rows={"validation": 0.3}
    )
    data = cases.columns("sklearn:breast_cancer", 2, limit=200)
    check_kill(tmp_path, tables, data, victim)
    whole = Federation(tmp_path / "whole", tables, data)
    tables["phases"][0]["optimizer"] = {"lr": 0.1}
    other = in_memory(tmp_path / "constant", tables, data)
    assert largest_deviation({"p1": whole.parameters("p1")}, {"p1": other["p1"]}) > 1e-3


@pytest.mark.parametrize(
    "phases",
    [
        [{"kind": "splitnn", "epochs": 3, "batch_size": 24, "checkpoint_steps": 2}],
        [{"kind": "splitnn", "epochs": 9, "batch_size": 24, "max_bytes": 30_000}],
        [
            {"kind": "fedonce", "epochs": 1, "batch_size": 24},
            {"kind": "head", "epochs": 1, "batch_size": 24},
        ],
    ],
    ids=["split training", "so many bytes", "one upload"],
)
def test_different_widths_are_forecast_to_the_byte(
    phases: list[dict[str, Any]], tmp_path: Path
) -> None:
    tables = sized(cases.recipe(3, task=BINARY), {"p0": 3, "p2": 5})
    tables |= {"phases": [*phases, {"kind": "evaluate"}]}
    data = {"source": "sklearn:breast_cancer", "limit": 120, "label": "target"}
    said = forecast(
        outlook_of(Recipe.model_validate(tables | {"simulate": {"data": data}}), tmp_path)
    )
    summary = in_process(tmp_path / "run", tables, TABLE)
    assert summary.bytes.agrees
    links = [link for link in compare_with_ledger(said, summary.bytes) if link.phase != "control"]
    sent = {link.sender: link.counted for link in links if link.phase == phases[-1]["kind"]}
    # Eight numbers a row and five.
    assert 1.2 < sent["p1"] / sent["p2"] < 1.6
    for link in links:
        assert link.forecast == link.counted, link
    if "max_bytes" in phases[0]:
        # Training rows: 96. Both ways, of eight and five numbers of four bytes.
        assert summary.steps < 9 * 4
        embeddings = [
            link.payload_bytes
            for link in summary.bytes.by_link
            if link.phase == "splitnn" and link.kind == "gradient"
        ]
        assert 30_000 / 2 <= sum(embeddings) < 30_000 / 2 + 24 * 4 * (8 + 5)


def test_a_late_party_of_its_own_width_has_no_weights_in_the_top_model() -> None:
    recipe = Recipe.model_validate(sized(cases.recipe(3), {"p0": 3, "p2": 5}))
    first = nn.Linear(3 + 8 + 5, 2)
    nn.init.ones_(first.weight)
    top = nn.Sequential(first)
    zero_late_weights(top, recipe, ["p1"])
    assert first.weight.tolist() == [[1.0] * 3 + [0.0] * 8 + [1.0] * 5] * 2


def test_a_prediction_with_different_widths_scores_the_rows_of_a_fold_as_the_run_did(
    tmp_path: Path,
) -> None:
    bunch = load_breast_cancer()
    x, y, n = bunch.data[:120], bunch.target[:120], 120
    ids = [f"{row:03d}" for row in range(n)]
    parts = np.split(x, [4, 10], axis=1)
    frames = {
        f"p{place}": pd.DataFrame(
            {"id": ids, **{f"c{j}": each[:, j] for j in range(each.shape[1])}}
        )
        for place, each in enumerate(parts)
    }
    data = {name: vfl.Data(each, id="id") for name, each in frames.items()}
    data["p0"] = vfl.Data(frames["p0"].assign(y=y), id="id", label="y")
    rows = {"test": 0.2, "folds": 4, "fold": 2}
    tables = sized(cases.recipe(3, task=BINARY, rows=rows), {"p0": 3, "p2": 5})
    tables["phases"].append({"kind": "evaluate"})
    run = vfl.simulate(tables, data, out=tmp_path, quiet=True)
    found = pd.DataFrame(run.predict(frames)).sort_values("id")
    tested = split_rows(tables["seed"], n, validation=0.1, test=0.2, folds=4, fold=2)["test"]
    assert len(tested) == 30
    right = (found["class"].to_numpy() == y)[tested].mean()
    assert right == pytest.approx(run.metrics["test"]["accuracy"], abs=1e-6)


REFUSED: dict[str, dict[str, Any]] = {
    "a plateau without early stopping": {"optimizer": {"schedule": "plateau"}},
    "a plateau that is longer than the patience": {
        "optimizers": {"p1": {"schedule": "plateau", "plateau_patience": 5}},
        "early_stopping": {"patience": 5},
    },
    "a plateau in another method": {
        "kind": "fedcvt",
        "epochs": 1,
        "optimizers": {"p0": {"schedule": "plateau"}},
    },
    "optimizers of a head": {"kind": "head", "epochs": 1, "optimizers": {"p0": {}}},
    "optimizers of a probe": {"kind": "probe", "optimizers": {"p0": {}}},
    "a clip with dp": {
        "kind": "fedonce",
        "matching": False,
        "dp": {"epsilon": 1.0},
        "optimizers": {"p1": {"clip_norm": 1.0}},
    },
    "a setting of an optimizer": {"optimizers": {"p1": {"momentum": 0.9}}},
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_means_nothing_is_refused(what: str) -> None:
    phase = {"kind": "splitnn", "epochs": 3} | REFUSED[what]
    recipe = Recipe.model_validate(cases.recipe(2) | {"phases": [phase]})
    with raises(InputError, Code.CONFIG_INVALID):
        _ = Course(recipe).phases[0].settings


@pytest.mark.parametrize(
    "phase",
    [
        {"kind": "splitnn", "epochs": 1},
        {"kind": "fedcvt", "epochs": 1, "unlabelled_batch_size": 8, "own_batch_size": 8},
        {"kind": "fedonce"},
        {"kind": "contrastive"},
        {"kind": "fedhssl", "ssl": "simsiam"},
    ],
    ids=lambda phase: phase["kind"],
)
def test_an_optimizer_of_nobody_is_refused(phase: dict[str, Any], tmp_path: Path) -> None:
    rows = {"aligned": 0.6, "labelled": 40} if phase["kind"] == "fedcvt" else {}
    tables = cases.recipe(2, rows=rows) | {"phases": [phase | {"optimizers": {"p2": {}}}]}
    with raises(InputError, Code.CONFIG_INVALID, names=("p2", "p0")):
        in_process(tmp_path / "run", tables, cases.digits(2))


def test_a_schedule_of_batches_has_no_epochs(tmp_path: Path) -> None:
    tables = cases.own_rows_recipe(2, preset="released", optimizer=STEPS)
    with raises(InputError, Code.CONFIG_INVALID, names=("warmup_epochs", "bottom_optimizer")):
        in_process(tmp_path / "run", tables, cases.own_rows(2))


@pytest.mark.parametrize(
    ("kind", "combine", "name", "features"),
    [
        ("splitnn", "sum", "p1", True),
        ("splitnn", "concat", "p0", False),
        ("fedhssl", "concat", "p1", True),
    ],
    ids=["a sum", "no features", "one width"],
)
def test_widths_that_cannot_be_are_refused(
    kind: str, combine: str, name: str, features: bool
) -> None:
    tables = cases.recipe(2, model={"combine": combine}, active_features=features)
    phase = {"kind": kind, **({"ssl": "simsiam"} if kind == "fedhssl" else {"epochs": 1})}
    with raises(InputError, Code.CONFIG_INVALID, names="embedding_size"):
        Course(parsed(sized(tables | {"phases": [phase]}, {name: 3}))).check()


def parsed(tables: dict[str, Any]) -> Recipe:
    return parse(Recipe, tables, "recipe")
