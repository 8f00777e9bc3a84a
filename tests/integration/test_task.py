"""Losses, weights, thresholds and kinds of tasks: what parties compute is what one process computes,
from their definitions.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as parquet
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

import vfl
from tests.harness import cases, reference, reference_fedonce, reference_pipe
from tests.harness.errors import raises
from tests.harness.memory import in_memory, in_process, parameters, run_here
from tests.harness.reference_task import c_index_of, losses_of_rows, threshold_of
from tests.integration.test_exact import ROUNDING, TOLERANCE, federated, largest_deviation
from tests.integration.test_resume import held, kill
from vfl.simulation import baselines
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings, ThresholdRule
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import split_rows

ROWS = 120
MLP = {"kind": "mlp", "hidden": [12]}
ADAM = {"kind": "adam", "lr": 0.01}
LABELS = ["yes", "often", "late"]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a table for each of three parties; p0 has labels of every kind, and weights."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(5)
    x_NF = rng.normal(size=(ROWS, 6)).round(4)
    pull = x_NF @ rng.normal(size=6) + rng.normal(size=ROWS)
    columns = {
        "class": np.array(["no", "perhaps", "yes"])[np.digitize(pull, [1.0, 3.0])],
        "yes": (pull > 2.0).astype(int),
        "often": np.where(x_NF[:, 0] + pull > 0, "true", "false"),
        "late": (x_NF[:, 5] > 0.3).astype(int),
        "amount": (10 + 4 * pull).round(3),
        "count": rng.poisson(np.exp(0.5 * pull.clip(-2, 2))),
        "w": rng.uniform(0, 3, ROWS).round(2),
        # Whole days, so that some are the same.
        "days": np.ceil(rng.exponential(20 * np.exp(-0.5 * pull.clip(-3, 3)))).astype(int),
        "died": rng.random(ROWS) < 0.7,
    }
    ids = [f"r{row:03d}" for row in range(ROWS)]
    for party in range(3):
        own = {f"x{party}{k}": x_NF[:, 2 * party + k] for k in range(2)}
        own |= columns if party == 0 else {}
        lines = [f"id,{','.join(own)}"]
        lines += [
            ",".join([name, *(str(values[row]) for values in own.values())])
            for row, name in enumerate(ids)
        ]
        (folder / f"p{party}.csv").write_text("\n".join(lines) + "\n")
    return folder


def data(folder: Path, parties: int = 3, **own: Any) -> dict[str, dict[str, Any]]:
    label = own.get("label") or own.get("labels", [""])[0]
    used = {label, *own.get("labels", ()), own.get("weight"), own.get("event")}
    others = {"class", "yes", "often", "late", "amount", "count", "w", "days", "died"} - used
    found: dict[str, dict[str, Any]] = {
        f"p{party}": {"source": str(folder / f"p{party}.csv"), "id": ["id"]}
        for party in range(parties)
    }
    found["p0"] |= {"drop": sorted(others)} | own
    return found


def recipe(task: dict[str, Any], parties: int = 3, **phase: Any) -> dict[str, Any]:
    # Cox's loss is the same if all outputs move alike: then a bias's gradient is rounding, of which
    # Adam makes a whole step.
    optimizer = {"kind": "sgd", "lr": 0.1} if task["kind"] == "survival" else ADAM
    made = cases.recipe(
        parties,
        task=task,
        model={"encoder": MLP, "top": {"hidden": [6]}},
        phase={"optimizer": optimizer} | phase,
    )
    return made | {"phases": [*made["phases"], {"kind": "evaluate"}]}


Table = dict[str, Any]


def known(weights: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """Leaves out the last bias of a top model with one output.

    Cox's loss does not depend on it: see ``recipe``.
    """
    return {
        party: {name: each for name, each in of.items() if each.shape != (1,)}
        for party, of in weights.items()
    }


BINARY: Table = {"kind": "binary"}
CLASSES: Table = {"kind": "multiclass", "classes": 3}
REGRESSION: Table = {"kind": "regression"}
YES: Table = {"label": "yes"}
CLASS: Table = {"label": "class"}
AMOUNT: Table = {"label": "amount"}
COUNT: Table = {"label": "count"}
W: Table = {"weight": "w"}
SURVIVAL: Table = {"kind": "survival"}
DIED: Table = {"label": "days", "event": "died"}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "focal, two classes": (BINARY | {"loss": "focal"}, YES),
    "focal, three classes": (CLASSES | {"loss": {"kind": "focal", "gamma": 0.7}}, CLASS),
    "smooth, two classes": (BINARY | {"label_smoothing": 0.1}, YES),
    "smooth, three classes": (CLASSES | {"label_smoothing": 0.2}, CLASS),
    "balanced": (BINARY | {"class_weight": "balanced"}, YES),
    "balanced, three classes": (CLASSES | {"class_weight": "balanced"}, CLASS),
    "a number a class": (BINARY | {"class_weight": {"1": 6.0}, "positive": 0}, YES),
    "a number a class of text": (CLASSES | {"class_weight": {"no": 0.2, "yes": 3}}, CLASS),
    "a weight a row": (BINARY, YES | W),
    "all weights, smooth": (
        CLASSES | {"class_weight": "balanced", "label_smoothing": 0.1},
        CLASS | W,
    ),
    "focal, a weight a row": (BINARY | {"loss": "focal", "class_weight": "balanced"}, YES | W),
    "a regression, a weight a row": (REGRESSION, AMOUNT | W),
    "quantile": (REGRESSION | {"loss": {"kind": "quantile", "q": 0.9}}, AMOUNT),
    "huber": (REGRESSION | {"loss": {"kind": "huber", "delta": 0.5}}, AMOUNT | W),
    "mae": (REGRESSION | {"loss": "mae"}, AMOUNT),
    "poisson": (REGRESSION | {"loss": "poisson"}, COUNT),
    "several labels": ({"kind": "multilabel", "classes": 3}, {"labels": LABELS}),
    "several labels, focal, weights": (
        {"kind": "multilabel", "classes": 3, "loss": "focal"},
        {"labels": LABELS} | W,
    ),
    "survival": (SURVIVAL, DIED),
    "several labels, smooth": (
        {"kind": "multilabel", "classes": 2, "label_smoothing": 0.1},
        {"labels": LABELS[:2]},
    ),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("name", list(SETTINGS))
def test_parties_learn_what_one_process_learns(name: str, tables: Path, tmp_path: Path) -> None:
    task, own = SETTINGS[name]
    made, of = recipe(task), data(tables, **own)
    got, want = in_memory(tmp_path, made, of), reference.train(made, of)
    assert largest_deviation(got, want) <= TOLERANCE
    # It changes what is learnt; the kinds of labels do not matter to a loss of their own.
    plain: Table = {key: task[key] for key in ("kind", "classes", "positive") if key in task}
    if task != plain or "weight" in own:
        without = {key: value for key, value in own.items() if key != "weight"}
        assert largest_deviation(want, reference.train(recipe(plain), data(tables, **without))) > (
            100 * ROUNDING
        )


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "name", ["all weights, smooth", "poisson", "several labels, focal, weights", "survival"]
)
def test_processes_learn_what_one_process_learns(name: str, tables: Path, tmp_path: Path) -> None:
    task, own = SETTINGS[name]
    made, of = recipe(task), data(tables, **own)
    got = federated(tmp_path / "theirs", made, of)
    assert largest_deviation(got, in_memory(tmp_path / "ours", made, of)) == 0.0
    assert largest_deviation(got, reference.train(made, of)) <= TOLERANCE


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "more",
    [
        {"micro_batches": 3, "batch_size": 20},
        {"in_flight": 3, "micro_batches": 2},
        {"local_updates": 3},
        {"cache": {"batches": 2, "uses": 3, "threshold": 0.5}, "in_flight": 2},
    ],
)
def test_weights_are_those_of_a_row_whatever_batch_or_part_it_is_in(
    more: dict[str, Any], tables: Path, tmp_path: Path
) -> None:
    made = recipe(
        CLASSES | {"class_weight": "balanced", "label_smoothing": 0.1},
        optimizer={"kind": "sgd", "lr": 0.05},
        **more,
    )
    of = data(tables, **CLASS, **W)
    got, want = in_memory(tmp_path, made, of), reference_pipe.train(made, of)
    assert largest_deviation(got, want) <= TOLERANCE


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    "name", ["all weights, smooth", "huber", "focal, a weight a row", "survival"]
)
def test_a_head_learns_with_them(name: str, tables: Path, tmp_path: Path) -> None:
    task, own = SETTINGS[name]
    made, of = recipe(task), data(tables, **own)
    made["model"]["embedding_size"] = 3
    adam = {"kind": "adam", "lr": 3e-3}
    # See ``recipe``.
    optimizer = made["phases"][0]["optimizer"] if name == "survival" else adam
    made["phases"] = [
        {"kind": "fedonce", "epochs": 2, "batch_size": 24, "optimizer": adam},
        {"kind": "head", "epochs": 3, "batch_size": 24, "own_encoder": "trained"}
        | {"optimizer": optimizer},
    ]
    got, want = known(in_memory(tmp_path, made, of)), known(reference_fedonce.train(made, of))
    assert largest_deviation(got, want) <= TOLERANCE


@pytest.mark.parametrize("victim", ["p0", "p2"])
def test_a_run_that_is_disturbed_ends_as_if_it_were_not(
    victim: str, tables: Path, tmp_path: Path
) -> None:
    task = BINARY | {"class_weight": "balanced", "loss": "focal", "threshold": "f1"}
    made, of = recipe(task, epochs=6, checkpoint_steps=2), data(tables, **YES, **W)
    want, _ = run_here(tmp_path / "ours", made, of)
    undisturbed = {name: parameters(tmp_path / "ours" / "runs" / "here" / name) for name in of}
    with held(tmp_path / "theirs", made, of, received=12_000) as (federation, proxy):
        kill(federation, proxy, victim)
        got = federation.finish()
        ends = {name: federation.parameters(name) for name in of}
    assert got["interruptions"] == 1
    assert largest_deviation(ends, undisturbed) == 0.0
    assert got["metrics"] == want["metrics"]


def test_the_loss_of_validation_is_that_of_training_and_all_else_counts_rows_once(
    tables: Path, tmp_path: Path
) -> None:
    task = BINARY | {
        "class_weight": "balanced",
        "metrics": ["log_loss", "brier", "ks", "gini", "precision", "recall", "average_precision"],
    }
    made, of = recipe(task), data(tables, **YES, **W)
    summary = in_process(tmp_path / "run", made, of)
    kept = parquet.read_table(tmp_path / "run" / "p0" / "predictions.parquet").to_pydict()
    at = np.array(kept["split"]) == "test"
    p, y = np.array(kept["score_1"])[at], np.array(kept["truth"])[at]
    found = summary.metrics["test"]
    assert found["log_loss"] == pytest.approx(sk.log_loss(y, p))
    assert found["brier"] == pytest.approx(sk.brier_score_loss(y, p))
    assert found["accuracy"] == pytest.approx(((p > 0.5) == y).mean())
    assert found["gini"] == pytest.approx(2 * sk.roc_auc_score(y, p) - 1)
    # The weights of the table, with those of the classes, of mean 1 over the training rows.
    lines = [line.split(",") for line in (tables / "p0.csv").read_text().splitlines()]
    head = lines[0]
    w, label = (
        np.array([line[head.index(name)] for line in lines[1:]], float) for name in ("w", "yes")
    )
    rows = split_rows(7, ROWS, validation=0.1, test=0.1)
    share = np.bincount(label[rows["train"]].astype(int))
    w = w / share[label.astype(int)]
    w = w / w[rows["train"]].mean()
    each = -np.where(y == 1, np.log(p), np.log(1 - p))
    ids = [int(name[1:]) for name in np.array(kept["id"])[at]]
    assert found["loss"] == pytest.approx((w[ids] * each).mean(), rel=1e-5)


RULES: list[Any] = [
    0.2,
    "f1",
    {"rule": "rate", "rate": 0.3},
    {"rule": "cost", "false_positive": 1, "false_negative": 4},
]


@pytest.mark.parametrize("threshold", RULES, ids=["number", "f1", "rate", "cost"])
def test_a_threshold_is_chosen_by_validation_rows_and_decides_from_then_on(
    threshold: Any, tables: Path, tmp_path: Path
) -> None:
    made = recipe(BINARY | {"threshold": threshold, "metrics": ["precision", "recall"]})
    # The other rows are chosen by, whatever the order in which splits are evaluated.
    made["phases"][1]["splits"] = ["test", "validation"]
    made["rows"] = {"validation": 0.25, "test": 0.25}
    _, ran = run_here(tmp_path, made, data(tables, **YES))
    kept = parquet.read_table(ran.run_folder / "p0" / "predictions.parquet").to_pydict()
    split, p, y = (np.array(kept[name]) for name in ("split", "score_1", "truth"))
    held_out = split == "validation"
    want = (
        threshold
        if isinstance(threshold, float)
        else threshold_of(
            ThresholdRule.model_validate(
                threshold if isinstance(threshold, dict) else {"rule": threshold}
            ),
            p[held_out],
            y[held_out],
        )
    )
    assert want != 0.5
    found = json.loads((ran.run_folder / "summary.json").read_text())["metrics"]["test"]
    assert found["threshold"] == pytest.approx(want, abs=1e-12)
    guess, truth = (p > want)[split == "test"], y[split == "test"]
    assert found["accuracy"] == pytest.approx((guess == truth).mean())
    assert found["f1"] == pytest.approx(sk.f1_score(truth, guess))
    assert found["precision"] == pytest.approx(sk.precision_score(truth, guess, zero_division=0))
    assert found["recall"] == pytest.approx(sk.recall_score(truth, guess))
    assert kept["class"] == (p > want).astype(int).tolist()


def test_trees_of_one_party_are_those_of_lightgbm(tables: Path, tmp_path: Path) -> None:
    lightgbm = pytest.importorskip("lightgbm")
    trees_of: list[tuple[Table, Table]] = [
        (BINARY | {"class_weight": "balanced"}, YES | W),
        (REGRESSION | {"loss": {"kind": "quantile", "q": 0.8}}, AMOUNT),
        (REGRESSION | {"loss": "mae"}, AMOUNT | W),
        (REGRESSION | {"loss": {"kind": "huber", "delta": 0.5}}, AMOUNT),
        (REGRESSION | {"loss": "poisson", "metrics": ["mae", "r2"]}, COUNT),
    ]
    for number, (task, own) in enumerate(trees_of):
        made, of = recipe(task, parties=1), data(tables, 1, **own)
        made["phases"] = [{"kind": "gbdt", "trees": 5, "min_rows": 5}]
        found = in_process(tmp_path / f"run{number}", made, of).metrics["test"]
        party = reference.OneParty(
            Recipe.model_validate(made), "p0", DataSettings(**of["p0"]), {}, {}
        )
        assert party.features is not None
        x, y, train = party.features.x.numpy(), party.targets[:, 0].numpy(), party.splits["train"]
        w = None if party.weights is None else party.weights.numpy()[train]
        loss = task.get("loss")
        kind = loss["kind"] if isinstance(loss, dict) else loss
        names = {None: "binary", "mae": "l1", "poisson": "poisson"}
        given = {"objective": names.get(kind, kind), "min_data_in_leaf": 5, "verbosity": -1}
        given |= {"alpha": loss.get("q", loss.get("delta"))} if isinstance(loss, dict) else {}
        trees = lightgbm.train(given, lightgbm.Dataset(x[train], y[train], weight=w), 5)
        test = party.splits["test"]
        p = trees.predict(x[test])
        if task["kind"] == "binary":
            assert found["auc"] == pytest.approx(sk.roc_auc_score(y[test], p))
        else:
            error = sk.root_mean_squared_error(y[test], p)
            assert found["rmse_scaled"] == pytest.approx(error, rel=1e-5)


@pytest.mark.parametrize(
    ("task", "own", "phases"),
    [
        (BINARY | {"loss": "focal"}, YES, [{"kind": "secureboost", "trees": 2}]),
        (BINARY, YES | W, [{"kind": "secureboost", "trees": 2}]),
        ({"kind": "multilabel", "classes": 3}, {"labels": LABELS}, [{"kind": "secureboost"}]),
        (BINARY | {"label_smoothing": 0.1}, YES, [{"kind": "gbdt"}]),
        (BINARY | {"loss": "focal"}, YES, [{"kind": "gbdt"}]),
        (BINARY | {"class_weight": "balanced"}, YES, [{"kind": "fedcvt", "epochs": 1}]),
        (BINARY | {"threshold": "f1"}, YES, [{"kind": "splitnn", "epochs": 1}]),
        (BINARY | {"class_weight": {"2": 3}}, YES, [{"kind": "splitnn", "epochs": 1}]),
        (BINARY, YES | {"weight": "class"}, [{"kind": "splitnn", "epochs": 1}]),
        (BINARY, YES | {"weight": "amount"}, [{"kind": "splitnn", "epochs": 1}]),
        (BINARY, YES | {"weight": "nothing"}, [{"kind": "splitnn", "epochs": 1}]),
        (REGRESSION | {"loss": "poisson"}, AMOUNT, [{"kind": "splitnn", "epochs": 1}]),
        (
            REGRESSION | {"loss": "poisson"},
            COUNT | {"label_scale": "minmax"},
            [{"kind": "splitnn", "epochs": 1}],
        ),
        ({"kind": "multilabel", "classes": 2}, {"labels": LABELS}, [{"kind": "head", "epochs": 1}]),
        (
            {"kind": "multilabel", "classes": 2},
            {"labels": ["yes", "class"]},
            [{"kind": "splitnn", "epochs": 1}],
        ),
        ({"kind": "multilabel", "classes": 2}, YES, [{"kind": "splitnn", "epochs": 1}]),
        (BINARY, {"labels": LABELS}, [{"kind": "splitnn", "epochs": 1}]),
        (SURVIVAL, {"label": "days"}, [{"kind": "splitnn", "epochs": 1}]),
        (SURVIVAL, DIED | W, [{"kind": "splitnn", "epochs": 1}]),
        (SURVIVAL, DIED | {"label": "class"}, [{"kind": "splitnn", "epochs": 1}]),
        (SURVIVAL, DIED | {"label": "amount"}, [{"kind": "splitnn", "epochs": 1}]),
        (SURVIVAL, DIED | {"event": "count"}, [{"kind": "splitnn", "epochs": 1}]),
        (SURVIVAL, DIED, [{"kind": "splitnn", "epochs": 1, "micro_batches": 2}]),
        (SURVIVAL, DIED, [{"kind": "splitnn", "epochs": 1, "cache": {}}]),
        (SURVIVAL, DIED, [{"kind": "secureboost", "trees": 2}]),
        (SURVIVAL, DIED, [{"kind": "gbdt"}]),
        (REGRESSION, DIED, [{"kind": "splitnn", "epochs": 1}]),
        (
            SURVIVAL,
            DIED,
            [
                {"kind": "fedonce", "epochs": 1, "dp": {"noise_multiplier": 1.0}},
                {"kind": "head", "epochs": 1, "dp": {"noise_multiplier": 1.0}},
            ],
        ),
        (
            BINARY,
            YES | W,
            [
                {"kind": "fedonce", "epochs": 1, "dp": {"noise_multiplier": 1.0}},
                {"kind": "head", "epochs": 1, "dp": {"noise_multiplier": 1.0}},
            ],
        ),
    ],
)
def test_what_a_phase_does_not_follow_is_refused(
    task: dict[str, Any],
    own: dict[str, Any],
    phases: list[dict[str, Any]],
    tables: Path,
    tmp_path: Path,
) -> None:
    parties = 1 if phases[0]["kind"] == "gbdt" else 2
    made = recipe(task, parties=parties) | {"phases": phases}
    with raises(InputError, Code.CONFIG_INVALID, Code.DATA_INVALID):
        in_process(tmp_path / "run", made, data(tables, parties, **own))


def test_weights_are_no_feature_and_a_prediction_needs_none(tables: Path, tmp_path: Path) -> None:
    made, of = recipe(BINARY), data(tables, **YES, **W)
    got = in_memory(tmp_path, made, of)
    assert got["p0"]["encoder.1.weight"].shape[1] == 2
    assert all(torch.isfinite(each).all() for each in got["p0"].values())


def frames(folder: Path, parties: int = 2) -> dict[str, Any]:
    return {f"p{party}": pd.read_csv(folder / f"p{party}.csv") for party in range(parties)}


def test_a_prediction_decides_by_the_threshold_of_the_run(tables: Path, tmp_path: Path) -> None:
    made = recipe(BINARY | {"threshold": {"rule": "rate", "rate": 0.3}}, parties=2)
    of, rows = data(tables, 2, **YES, **W), frames(tables)
    given = {
        name: vfl.Data(
            rows[name],
            id="id",
            label=table.get("label"),
            settings={key: table[key] for key in ("drop", "weight") if key in table},
        )
        for name, table in of.items()
    }
    run = vfl.simulate(vfl.Recipe.from_dict(made), given, out=tmp_path, quiet=True)
    threshold = run.metrics["test"]["threshold"]
    assert threshold != pytest.approx(0.5, abs=1e-3)
    # New rows need neither label nor weight.
    new = rows | {"p0": rows["p0"][["id", "x00", "x01"]]}
    found = run.predict(new)
    chosen = [int(each) for each in found["class"]]
    assert chosen == [int(p > threshold) for p in found["score_1"]]
    assert 0 < sum(chosen) < ROWS


def test_several_labels_are_predicted_and_kept(tables: Path, tmp_path: Path) -> None:
    made = recipe({"kind": "multilabel", "classes": 3, "metrics": ["ks"]})
    made["phases"][0]["early_stopping"] = {"metric": "f1", "patience": 2}
    summary = in_process(tmp_path / "run", made, data(tables, labels=LABELS))
    assert {"loss", "accuracy", "f1", "auc", "ks"} <= summary.metrics["test"].keys()
    kept = parquet.read_table(tmp_path / "run" / "p0" / "predictions.parquet").to_pydict()
    test = np.array(kept["split"]) == "test"
    right = [
        ((np.array(kept[f"score_{name}"]) > 0.5) == np.array(kept[f"truth_{name}"]))[test].mean()
        for name in LABELS
    ]
    assert summary.metrics["test"]["accuracy"] == pytest.approx(np.mean(right))


@pytest.mark.parametrize("joined", [True, False])
def test_a_baseline_counts_the_same_rows_as_much(
    joined: bool, tables: Path, tmp_path: Path
) -> None:
    """All columns in one place, or the active party alone: with the weights that it has."""
    made = recipe(CLASSES | {"class_weight": "balanced"}, parties=2)
    of = data(tables, 2, **CLASS, **W)
    whole = made | {"simulate": {"parties": of}}
    read = Recipe.model_validate(whole)
    one = (
        baselines.combine_columns(whole, read, tmp_path, "test")
        if joined
        else baselines.alone(whole, read, "p0", tmp_path, "test")
    )
    (name,) = one["simulate"]["parties"]
    got = in_process(
        tmp_path / "run",
        {k: v for k, v in one.items() if k != "simulate"},
        one["simulate"]["parties"],
    )
    unweighted = json.loads(json.dumps(one["simulate"]["parties"]))
    (table,) = unweighted.values()
    del table["weight"]
    for part in [*table.get("parts", {}).values()][:1] or [table]:
        part.pop("weight", None)
        part["drop"] = [*part.get("drop", ()), "w"]
    other = in_process(
        tmp_path / "other", {k: v for k, v in one.items() if k != "simulate"}, unweighted
    )
    assert got.metrics["test"]["loss"] != other.metrics["test"]["loss"]
    if not joined:
        want = reference.train(one, of)["p0"]
        found = parameters(tmp_path / "run" / name)
        assert largest_deviation({"p0": found}, {"p0": want}) <= ROUNDING


def test_risks_of_survival_are_kept_and_measured(tables: Path, tmp_path: Path) -> None:
    stops = {"metric": "c_index", "patience": 3}
    made = recipe(SURVIVAL, early_stopping=stops, epochs=8, optimizer=ADAM)
    made["rows"] = {"validation": 0.2, "test": 0.3}
    summary = in_process(tmp_path / "run", made, data(tables, **DIED))
    kept = parquet.read_table(tmp_path / "run" / "p0" / "predictions.parquet").to_pydict()
    test = np.array(kept["split"]) == "test"
    risk, times, events = (np.array(kept[name])[test] for name in ("risk", "truth", "event"))
    found = summary.metrics["test"]
    assert found["c_index"] == pytest.approx(c_index_of(risk, times, events))
    # The table's columns tell who dies early.
    assert found["c_index"] > 0.6
    both = torch.from_numpy(np.stack([times, events], axis=1))
    want = losses_of_rows(TaskSettings(kind="survival"), torch.from_numpy(risk)[:, None], both)
    assert found["loss"] == pytest.approx(want.mean().item())
