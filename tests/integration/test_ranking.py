"""Rankings: what parties compute from the rows of a query is what one process computes, from its
definition; and the rows of a query stay in one split.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as parquet
import pytest
import torch

from tests.harness import cases, reference, reference_fedonce
from tests.harness.errors import raises
from tests.harness.memory import in_memory, in_process, parameters, run_here
from tests.harness.reference_task import losses_of_rows, ndcg_of
from tests.integration.test_exact import ROUNDING, TOLERANCE, largest_deviation
from tests.integration.test_resume import held, kill
from vfl.simulation import baselines
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import split_rows

ROWS, QUERIES, SEED = 150, 30, 7
SGD = {"kind": "sgd", "lr": 0.5}
Tables = dict[str, Any]


@pytest.fixture(scope="module")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parties with two columns each; p0 has relevances from 0 to 3 and the query of a row."""
    folder, rng = tmp_path_factory.mktemp("tables"), np.random.default_rng(11)
    x_NF = rng.normal(size=(ROWS, 4)).round(4)
    # What a query lifts for all of its rows tells nothing of their order.
    query_N = rng.integers(0, QUERIES, ROWS)
    pull = x_NF @ [1.0, -0.5, 1.0, 0.7] + 0.3 * rng.normal(size=ROWS)
    relevance_N = np.digitize(pull, [0.0, 1.0, 2.0])
    half_N = np.where(np.arange(ROWS) < ROWS // 2, "train", "test")
    for party in range(2):
        own: dict[str, Any] = {f"x{party}{k}": x_NF[:, 2 * party + k] for k in range(2)}
        if party == 0:
            own |= {"relevance": relevance_N, "query": np.char.add("q", query_N.astype(str))}
            own |= {"number": query_N, "half": half_N, "text": np.char.add("t", half_N)}
            own |= {"large": 2**60 + query_N, "below": relevance_N - 1}
        lines = [",".join(["id", *own])]
        lines += [
            ",".join([f"r{row:03d}", *(str(values[row]) for values in own.values())])
            for row in range(ROWS)
        ]
        (folder / f"p{party}.csv").write_text("\n".join(lines) + "\n")
    return folder


def recipe(task: Tables | None = None, **more: Any) -> Tables:
    made = cases.recipe(
        2,
        task={"kind": "ranking"} | (task or {}),
        model={"encoder": {"kind": "mlp", "hidden": [8]}, "top": {"hidden": [6]}},
        phase={"epochs": 3, "batch_size": 60, "optimizer": SGD} | more,
        rows={"split": "grouped", "validation": 0.2, "test": 0.2},
    )
    return made | {"phases": [*made["phases"], {"kind": "evaluate"}]}


def data(folder: Path, **own: Any) -> dict[str, Tables]:
    found: dict[str, Tables] = {
        f"p{party}": {"source": str(folder / f"p{party}.csv"), "id": ["id"]} for party in range(2)
    }
    found["p0"] |= {"columns": ["x00", "x01"], "label": "relevance", "group": "query"} | own
    return found


def column(folder: Path, name: str) -> np.ndarray[Any, Any]:
    lines = [line.split(",") for line in (folder / "p0.csv").read_text().splitlines()]
    return np.array([line[lines[0].index(name)] for line in lines[1:]])


def whole_queries(folder: Path) -> dict[str, np.ndarray[Any, Any]]:
    """{split: rows}, by dividing the sorted names of the queries as rows are divided."""
    of_row = column(folder, "query")
    names = sorted(set(of_row.tolist()))
    chosen = split_rows(SEED, len(names), validation=0.2, test=0.2)
    return {
        split: np.array([row for row, name in enumerate(of_row) if names.index(name) in each])
        for split, each in ((key, set(of.tolist())) for key, of in chosen.items())
    }


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("loss", ["ranknet", "listnet"])
def test_parties_learn_what_one_process_learns(loss: str, tables: Path, tmp_path: Path) -> None:
    made, of = recipe({"loss": loss}), data(tables)
    got = in_memory(tmp_path, made, of)
    want = reference.train(made, of, splits=whole_queries(tables))
    assert largest_deviation(got, want) <= TOLERANCE
    # The two losses are two, and something is learnt.
    other = recipe({"loss": "listnet" if loss == "ranknet" else "ranknet"})
    for changed in (other, recipe({"loss": loss}, epochs=1)):
        others = reference.train(changed, of, splits=whole_queries(tables))
        assert largest_deviation(want, others) > 100 * ROUNDING


@pytest.mark.usefixtures("float64")
def test_a_head_learns_it(tables: Path, tmp_path: Path) -> None:
    made, of = recipe(), data(tables)
    made["model"]["embedding_size"] = 3
    made["phases"] = [
        {"kind": kind, "epochs": 2, "batch_size": 40, "optimizer": optimizer}
        for kind, optimizer in (("fedonce", {"kind": "adam", "lr": 3e-3}), ("head", SGD))
    ]
    made["phases"][1]["own_encoder"] = "trained"
    got = in_memory(tmp_path, made, of)
    want = reference_fedonce.train(made, of, given=whole_queries(tables))
    assert largest_deviation(got, want) <= TOLERANCE


def test_a_disturbed_run_over_processes_ends_as_one_in_process(
    tables: Path, tmp_path: Path
) -> None:
    # Passive party p1 alone is behind the proxy: see test_resume.
    made, of = recipe(epochs=6, checkpoint_steps=2), data(tables)
    want, _ = run_here(tmp_path / "ours", made, of)
    undisturbed = {name: parameters(tmp_path / "ours" / "runs" / "here" / name) for name in of}
    with held(tmp_path / "theirs", made, of, received=12_000) as (federation, proxy):
        kill(federation, proxy, "p0")
        got = federation.finish()
        ends = {name: federation.parameters(name) for name in of}
    assert got["interruptions"] == 1
    assert largest_deviation(ends, undisturbed) == 0.0
    assert got["metrics"] == want["metrics"]


def test_scores_are_kept_with_their_queries_and_measured_as_scikit_learn_does(
    tables: Path, tmp_path: Path
) -> None:
    stops = {"metric": "ndcg_2", "patience": 9}
    made = recipe({"metrics": ["ndcg_2", "ndcg_100"]}, epochs=15, early_stopping=stops)
    made["phases"][1]["splits"] = ["test", "validation"]
    found = in_process(tmp_path / "run", made, data(tables)).metrics
    kept = parquet.read_table(tmp_path / "run" / "p0" / "predictions.parquet").to_pydict()
    seen: list[set[str]] = []
    for split in ("test", "validation"):
        at = np.array(kept["split"]) == split
        score, truth, group = (np.array(kept[name])[at] for name in ("score", "truth", "group"))
        want = {k: ndcg_of(score, truth, group, k) for k in (None, 2)}
        assert found[split]["ndcg"] == pytest.approx(want[None])
        assert found[split]["ndcg_2"] == pytest.approx(want[2])
        assert found[split]["ndcg_100"] == found[split]["ndcg"]
        numbers = np.unique(group, return_inverse=True)[1]
        both = torch.from_numpy(np.stack([truth, numbers], axis=1)).double()
        each = losses_of_rows(TaskSettings(kind="ranking"), torch.from_numpy(score)[:, None], both)
        assert found[split]["loss"] == pytest.approx(each.mean().item())
        seen.append(set(group.tolist()))
    # A query's rows are in one split; the four columns tell their order.
    assert not seen[0] & seen[1]
    assert found["test"]["ndcg"] > 0.9


def test_the_rows_of_a_group_stay_together_for_every_kind_of_task(
    tables: Path, tmp_path: Path
) -> None:
    made, of = recipe(), data(tables, group="number")
    made["task"] = {"kind": "regression"}
    made["rows"] |= {"folds": 3, "fold": 2, "validation": 0.2}
    del made["rows"]["test"]
    in_process(tmp_path / "run", made, of)
    kept = parquet.read_table(tmp_path / "run" / "p0" / "predictions.parquet").to_pydict()
    tested = {
        int(name[1:])
        for name, split in zip(kept["id"], kept["split"], strict=True)
        if split == "test"
    }
    query_N = column(tables, "query")
    chosen = {query_N[row] for row in tested}
    assert len(chosen) == 10
    assert tested == {row for row in range(ROWS) if query_N[row] in chosen}


@pytest.mark.parametrize("joined", [True, False])
def test_a_baseline_has_the_same_queries(joined: bool, tables: Path, tmp_path: Path) -> None:
    made, of = recipe(), data(tables)
    whole = made | {"simulate": {"parties": of}}
    read = Recipe.model_validate(whole)
    one = (
        baselines.combine_columns(whole, read, tmp_path, "test")
        if joined
        else baselines.alone(whole, read, "p0", tmp_path, "test")
    )
    own = one["simulate"]["parties"]
    plain = {key: value for key, value in one.items() if key != "simulate"}
    in_process(tmp_path / "run", plain, own)
    kept = parquet.read_table(tmp_path / "run" / next(iter(own)) / "predictions.parquet")
    tested = [int(each["id"][1:]) for each in kept.to_pylist() if each["split"] == "test"]
    assert tested == whole_queries(tables)["test"].tolist()


@pytest.mark.parametrize(
    ("own", "task", "rows", "phase"),
    [
        ({"group": None}, {}, {}, {}),
        ({"group": "nothing"}, {}, {}, {}),
        ({"label": "text"}, {}, {}, {}),
        ({"label": "below"}, {}, {}, {}),
        ({"group": "large"}, {}, {}, {}),
        ({"weight": "number"}, {}, {}, {}),
        ({"group": "relevance"}, {}, {}, {}),
        ({}, {}, {"split": "random"}, {}),
        ({"split": "half"}, {}, {"split": "column"}, {}),
        ({}, {}, {"labelled": 20}, {}),
        ({}, {"kind": "regression"}, {"split": "random"}, {}),
        ({"group": None}, {"kind": "regression"}, {}, {}),
        ({}, {"loss": "mae"}, {}, {}),
        ({}, {"kind": "regression", "loss": "listnet"}, {}, {}),
        ({}, {"metrics": ["top_2"]}, {}, {}),
        ({}, {}, {}, {"micro_batches": 2}),
        ({}, {}, {}, {"dcor": 0.5}),
        ({}, {}, {"test": None, "folds": 40, "fold": 1}, {}),
    ],
)
def test_what_makes_no_ranking_is_refused(
    own: Tables, task: Tables, rows: Tables, phase: Tables, tables: Path, tmp_path: Path
) -> None:
    made = recipe(task, **phase)
    made["rows"] = {k: v for k, v in (made["rows"] | rows).items() if v is not None}
    with raises(InputError, Code.CONFIG_INVALID, Code.DATA_INVALID):
        # As a file is read, so that what is wrong with it is a sentence.
        parse(Recipe, made, "recipe")
        parse(DataSettings, data(tables, **own)["p0"], "data")
        in_process(tmp_path / "run", made, data(tables, **own))
