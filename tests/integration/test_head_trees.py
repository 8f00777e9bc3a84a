"""A head of boosted trees on representations that are uploaded once: scikit-learn's own trees on the
same matrix, bit for bit; between processes, after kills, in predictions and while it is served.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

import vfl
from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import Federation
from tests.harness.memory import run_here
from tests.harness.online import Online
from tests.harness.present import present
from tests.harness.served import NAMES, federation_of, trained_run
from tests.integration.test_resume import (
    HANDSHAKE_BYTES,
    assert_equal,
    held,
    kill,
    parameters,
    server_events,
)
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed, split_rows
from vfl_party.data import Labels, Preprocessor, load_table
from vfl_party.data.inputs.weights import row_weights
from vfl_party.models.row_blocks import in_blocks
from vfl_party.models.trees import BoostedTrees
from vfl_party.phases.course import Course

TASKS: dict[str, dict[str, Any]] = {
    "binary": {"kind": "binary", "class_weight": "balanced"},
    "multiclass": {"kind": "multiclass", "classes": 10},
    "regression": {"kind": "regression"},
}
LIMIT, WIDTH = 300, 4


def recipe(parties: int, task: str, **top: Any) -> dict[str, Any]:
    trees = {"kind": "gbdt", "trees": 25, "lr": 0.2, "min_rows": 8, "l2": 1.0} | top
    tables = cases.recipe(parties, task=TASKS[task], model={"embedding_size": WIDTH, "top": trees})
    tables["phases"] = [
        {"kind": "fedonce", "objective": "pca"},
        {"kind": "head"},
        {"kind": "evaluate"},
    ]
    return tables


def data(parties: int, task: str) -> dict[str, dict[str, Any]]:
    if task == "multiclass":
        return cases.digits(parties, limit=LIMIT)
    source = "breast_cancer" if task == "binary" else "diabetes"
    return cases.columns(f"sklearn:{source}", parties, limit=LIMIT)


def by_sklearn(
    tables: dict[str, Any], data: dict[str, dict[str, Any]], weights: dict[str, dict[str, Tensor]]
) -> tuple[Tensor, Any, list[Any]]:
    """Grows the trees with scikit-learn alone, from the tables and the passive encoders as they
    were learnt. Returns the matrix of all rows, the model, and its scores after each round.
    """
    made = Recipe.model_validate(tables)
    columns = []
    for party in made.parties:
        settings = DataSettings(**data[party.name])
        table = load_table(settings, with_label=party.role == "active")
        splits = split_rows(
            made.seed, len(table.ids), validation=made.rows.validation, test=made.rows.test
        )
        fitted = Preprocessor.fit(
            table, splits["train"], one_hot=True, flatten=True, settings=settings
        )
        x = fitted.transform(table).x
        if party.role == "active":
            train, validation = splits["train"], splits["validation"]
            labels = Labels.fit(present(table.labels), made.task, train, source="reference")
            columns.append(x)
            continue
        own = list(weights[party.name].values())
        matrix, bias = sorted(own, key=lambda each: -each.dim())
        # A product of whole blocks of rows rounds each row alike.
        columns.append(in_blocks(partial(F.linear, weight=matrix, bias=bias), None, x))
    whole = load_table(DataSettings(**data[cases.ACTIVE]), with_label=True)
    targets = labels.encode(present(whole.labels))
    y = targets.reshape(-1).double().numpy()
    found = row_weights(made.task, labels, targets, None, train)
    w = None if found is None else found.double().numpy()
    x = torch.cat(columns, dim=1)
    top: Any = made.model.top
    regression = made.task.kind == "regression"
    of = HistGradientBoostingRegressor if regression else HistGradientBoostingClassifier
    stops = top.early_stopping is not None
    model = of(
        max_iter=top.trees,
        learning_rate=top.lr,
        max_leaf_nodes=top.leaves,
        min_samples_leaf=top.min_rows,
        l2_regularization=top.l2,
        early_stopping=stops,
        n_iter_no_change=top.early_stopping or 10,
        scoring="loss",
        random_state=derive_seed(made.seed, "head") % 2**31,
    )
    more: dict[str, Any] = {"sample_weight": None if w is None else w[train]}
    if stops:
        more |= {"X_val": x.numpy()[validation], "y_val": y[validation]}
        more |= {} if w is None else {"sample_weight_val": w[validation]}
    model.fit(x.numpy()[train], y[train], **more)
    staged = model.staged_predict if regression else model.staged_decision_function
    return x, model, list(staged(x.numpy()))


def trees_of(tensors: dict[str, Tensor], outputs: int) -> BoostedTrees:
    """The top model of a checkpoint."""
    top = BoostedTrees(outputs)
    kept = {
        name.removeprefix("top."): each for name, each in tensors.items() if name.startswith("top.")
    }
    top.load_state_dict(kept)
    return top


@pytest.mark.parametrize("early_stopping", [None, 2])
@pytest.mark.parametrize("task", list(TASKS))
def test_trees_and_scores_are_those_of_scikit_learn(
    task: str, early_stopping: int | None, tmp_path: Path
) -> None:
    tables, tables_of = recipe(2, task, early_stopping=early_stopping), data(2, task)
    summary, here = run_here(tmp_path, tables, tables_of)
    weights = parameters(here)
    x, model, scores = by_sklearn(tables, tables_of, weights)
    top = trees_of(weights["p0"], TASKS[task].get("classes", 1))
    rounds = 25 if early_stopping is None else int(np.argmax(model.validation_score_))
    assert len(top.roots) == rounds
    nodes = np.concatenate([tree.nodes for each in model._predictors[:rounds] for tree in each])
    leaves = nodes["is_leaf"].astype(bool)
    assert torch.equal(top.value[torch.from_numpy(leaves)], torch.tensor(nodes["value"][leaves]))
    assert torch.equal(
        top.threshold[torch.from_numpy(~leaves)], torch.tensor(nodes["num_threshold"][~leaves])
    )
    want = torch.from_numpy(scores[rounds - 1]).reshape(len(x), -1).float()
    assert torch.equal(top(x), want)
    name = "rmse" if task == "regression" else "accuracy"
    assert name in summary["metrics"]["test"]
    # One upload, of the validation rows, too, if they end the growth; no gradient.
    rows = 240 if early_stopping is None else 270
    head = summary["bytes"]["by_phase"]["head"]
    assert head["payload_bytes"] == 4 * rows * WIDTH
    kinds = {each.kind for each in here.ledger("p1") if each.peer == "p0"}
    assert "gradient" not in kinds


def test_processes_and_three_parties_give_the_same(tmp_path: Path) -> None:
    tables, tables_of = recipe(3, "binary", early_stopping=3), data(3, "binary")
    with Federation(tmp_path / "apart", tables, tables_of) as apart:
        apart.start_all()
        summary = apart.finish()
    want, here = run_here(tmp_path / "here", tables, tables_of)
    assert_equal(parameters(apart), parameters(here))
    assert summary["metrics"] == want["metrics"]
    log = (apart.run_folder / "p0" / "log.jsonl").read_text()
    [line] = [each for each in log.splitlines() if "share of the gain" in each]
    assert all(f"{name} " in line for name in apart.names)
    columns = {
        name: load_table(DataSettings(**each), with_label=False).numeric_names
        for name, each in tables_of.items()
    }
    assert any(f"p0.{column} " in line for column in columns["p0"])
    assert not any(column in line for name in ("p1", "p2") for column in columns[name])
    x, _, scores = by_sklearn(tables, tables_of, parameters(here))
    top = trees_of(parameters(here)["p0"], 1)
    assert torch.equal(top(x)[:, 0], torch.from_numpy(scores[len(top.roots) - 1]).float())


def test_a_fault_in_the_middle_of_the_upload_changes_nothing(tmp_path: Path) -> None:
    tables, tables_of = recipe(2, "binary", early_stopping=3), data(2, "binary")
    tables["phases"][0] = {"kind": "fedonce", "objective": "reconstruction", "epochs": 1}
    tables["parties"][1]["embedding_size"] = 512
    _, whole = run_here(tmp_path / "whole", tables, tables_of)
    sent = HANDSHAKE_BYTES + 4 * 512 * 270 // 2
    with held(tmp_path / "killed", tables, tables_of, sent=sent) as (federation, proxy):
        kill(federation, proxy, "p0")
        assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), parameters(whole))


def test_a_party_that_is_killed_while_it_grows_trees_grows_the_same(tmp_path: Path) -> None:
    tables, tables_of = recipe(2, "multiclass", trees=400), data(2, "multiclass")
    tables["phases"] = tables["phases"][:2]
    with Federation(tmp_path / "killed", tables, tables_of) as federation:
        server = federation.start_server()
        for name in federation.names:
            federation.start_party(name)
        assert federation.programs["p1"].wait() == 0
        server.wait_for("left")
        assert federation.programs["p0"].process.poll() is None
        assert "completed" not in {event["event"] for event in server.events}
        federation.programs["p0"].kill()
        server.wait_for("interrupted")
        federation.start_party("p0")
        federation.finish()
        started = [event["checkpoint"] for event in server_events(federation, "started")]
        assert len(started) == 2
        assert started[1].endswith("head.1")
        got = parameters(federation)
    _, whole = run_here(tmp_path / "whole", tables, tables_of)
    assert_equal(got, parameters(whole))


@pytest.fixture(scope="module", params=["sklearn", "lightgbm"])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> vfl.Run:
    """Three parties' tables of two numbers each; the trees have seen rows without each party."""
    folder = tmp_path_factory.mktemp("trees")
    tables = cases.recipe(
        3,
        task={"kind": "binary"},
        model={
            "embedding_size": 2,
            "top": {"kind": "gbdt", "library": request.param, "trees": 20, "min_rows": 5},
        },
    )
    tables["phases"] = [
        {"kind": "fedonce", "objective": "pca"},
        {"kind": "head", "party_dropout": 0.3},
        {"kind": "evaluate", "subsets": True, "resamples": 2, "importance": True, "repeats": 2},
    ]
    with federation_of(folder, tables) as federation:
        return trained_run(federation, tables)


def test_a_served_score_is_that_of_a_prediction(ran: vfl.Run) -> None:
    want = ran.predict()
    online = Online.of(ran.folder)
    try:
        scores = online.score(*want["id"])
        assert scores.columns["score_1"].tolist() == want["score_1"]
        at = online.score(want["id"][5])
        assert at.columns["score_1"].tolist() == [want["score_1"][5]]
        # Without a party: missing numbers, as in a prediction without it.
        some = ran.predict(without=["p1"])
        online.away["p1"] = ("away", 0)
        assert online.score(*want["id"]).columns["score_1"].tolist() == some["score_1"]
    finally:
        online.close()
    assert some["score_1"] != want["score_1"]


def test_sets_of_parties_are_measured_with_missing_numbers(ran: vfl.Run) -> None:
    found = present(ran.summary.worth)
    of = {frozenset(each.parties): each.test for each in found.subsets}
    assert of[frozenset({"p0", "p2"})] == ran.metrics["test without p1"]["auc"]
    assert of[frozenset({"p0", "p1"})] == ran.metrics["test without p2"]["auc"]
    alone = present(of[frozenset({"p0"})])
    assert of[frozenset(NAMES)] == ran.metrics["test"]["auc"] > alone
    # No report of the growth tells the server of labels before they are evaluated.
    assert "train" not in ran.metrics


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "split training": ({}, {"kind": "splitnn", "epochs": 1}),
    "epochs": ({}, {"kind": "head", "epochs": 3}),
    "trained encoder": ({}, {"kind": "head", "own_encoder": "trained"}),
    "deadline": ({}, {"kind": "head", "deadline_s": 3.0}),
    "mean": ({"model": {"combine": "mean"}}, {"kind": "head"}),
    "ranking": ({"task": {"kind": "ranking"}, "rows": {"split": "grouped"}}, {"kind": "head"}),
    "smoothing": ({"task": {"kind": "binary", "label_smoothing": 0.1}}, {"kind": "head"}),
    "a network": ({"model": {"top": {"hidden": [4]}}}, {"kind": "head"}),
    "a student": ({}, {"kind": "student", "epochs": 1, "top": {"kind": "gbdt"}}),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_what_trees_cannot_do_is_one_error(what: str) -> None:
    change, phase = REFUSED[what]
    tables = recipe(2, "binary")
    for key, value in change.items():
        tables[key] = {**(tables[key] if key != "task" else {}), **value}
    tables["phases"][1] = phase
    with raises(InputError, Code.CONFIG_INVALID):
        Course(Recipe.model_validate(tables)).check()


def test_early_stopping_needs_validation_rows(tmp_path: Path) -> None:
    tables = recipe(2, "binary", early_stopping=3)
    tables["rows"]["validation"] = 0.0
    with raises(InputError, Code.CONFIG_INVALID, names=("model.top", "rows.validation")):
        run_here(tmp_path, tables, data(2, "binary"))
