"""Rows that some parties do not hold (``rows.partial``): exact against one process, resumable, counted
by the forecast, and evaluated and predicted with those who hold them.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from sklearn.ensemble import HistGradientBoostingClassifier

import vfl
from tests.harness import reference_partial
from tests.harness.aligning import Direct
from tests.harness.errors import raises
from tests.harness.memory import in_memory, in_process
from tests.harness.online import Online
from tests.harness.present import present
from tests.integration.test_exact import ROUNDING, TOLERANCE, largest_deviation
from tests.integration.test_resume import held, kill
from vfl.library.run import Run
from vfl.simulation.federation import Origin
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_party.align import digest, partial, rounds
from vfl_party.forecast.count import forecast, outlook_of

SUBSETS: dict[str, Any] = {"subsets": True}
DROPOUT: dict[str, Any] = {"party_dropout": 0.4}
SGD = {"kind": "sgd", "lr": 0.05, "momentum": 0.9}
NAMES = ("p0", "p1", "p2", "p3")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Four parties' tables of two numbers each: of 90 people each party knows some."""
    drawn, folder = np.random.default_rng(4), tmp_path_factory.mktemp("tables")
    x = drawn.normal(size=(90, 8))
    y = (x.sum(axis=1) > 0).astype(int)
    found: dict[str, dict[str, Any]] = {}
    for place, (name, share) in enumerate(zip(NAMES, (0.9, 0.6, 0.5, 0.3), strict=True)):
        there = np.flatnonzero(drawn.random(90) < share)
        lines = ["id,a,b" + ",y" * (place == 0)]
        for row in there:
            cells = [f"c{row:02}", *(f"{each:.6f}" for each in x[row, 2 * place : 2 * place + 2])]
            lines.append(",".join([*cells, *([str(y[row])] if place == 0 else [])]))
        (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        found[name] = {"source": str(folder / f"{name}.csv"), "id": ["id"]}
    found["p0"]["label"] = "y"
    return found


def recipe(
    how: dict[str, Any], rule: str = "", *, kind: str = "splitnn", parties: int = 4, **phase: Any
) -> dict[str, Any]:
    rule = rule or ("mean" if "subsets" in how else "concat")
    mlp = {"kind": "mlp", "hidden": [5], "activation": "tanh"}
    return {
        "name": "partial",
        "seed": 3,
        "task": {"kind": "binary"},
        "parties": [
            {"name": name, "role": "active" if name == "p0" else "passive"}
            for name in NAMES[:parties]
        ],
        "rows": {"align": "psi", "partial": True},
        "model": {"embedding_size": 4, "combine": rule, "encoder": mlp, "top": {"hidden": [5]}},
        "phases": [{"kind": kind, "epochs": 2, "batch_size": 7, "optimizer": SGD, **how, **phase}],
    }


@pytest.fixture(scope="module", autouse=True)
def fast() -> Iterator[None]:
    """Lets an alignment within this process take no time. The order of the rows follows from a slow
    digest, so it is another one.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "Masking", Direct)
        patch.setitem(digest._SCRYPT, "n", 2)
        digest._compute_scrypt.cache_clear()
        yield
    digest._compute_scrypt.cache_clear()


@pytest.fixture
def as_it_is(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Orders the rows as programs do, which know nothing of ``fast``."""
    monkeypatch.setitem(digest._SCRYPT, "n", 1 << 15)
    digest._compute_scrypt.cache_clear()
    yield
    digest._compute_scrypt.cache_clear()


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize(
    ("how", "rule"),
    [
        (SUBSETS, "mean"),
        (SUBSETS, "attention"),
        (DROPOUT, "concat"),
        (DROPOUT, "mean"),
        ({}, "concat"),
        ({}, "mean"),
        ({}, "sum"),
        ({}, "max"),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["splitnn", "head"])
def test_one_process_row_by_row(
    kind: str, how: dict[str, Any], rule: str, data: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe(how, rule, kind=kind)
    want = reference_partial.train(tables, data)
    assert largest_deviation(in_memory(tmp_path, tables, data), want) <= TOLERANCE


@pytest.mark.parametrize("kind", ["splitnn", "head"])
def test_one_process_row_by_row_in_float32(kind: str, data: dict[str, Any], tmp_path: Path) -> None:
    tables = recipe(SUBSETS, kind=kind)
    want = reference_partial.train(tables, data)
    assert largest_deviation(in_memory(tmp_path, tables, data), want) <= ROUNDING


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("how", [SUBSETS, DROPOUT, {}], ids=str)
def test_in_parts_and_in_flight(how: dict[str, Any], data: dict[str, Any], tmp_path: Path) -> None:
    """Parts of batches, of which a party may hold no row, add to the same gradient."""
    tables = recipe(how, "mean")
    want = in_memory(tmp_path / "whole", tables, data)
    parts = in_memory(tmp_path / "parts", recipe(how, "mean", micro_batches=3), data)
    assert largest_deviation(parts, want) <= TOLERANCE
    ahead = in_memory(tmp_path / "ahead", recipe(how, "mean", in_flight=3), data)
    assert largest_deviation(ahead, want) > ROUNDING


def test_fine_tuning_after_local_phases_and_a_checkpoint(
    data: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe(SUBSETS, kind="head")
    tables["phases"].insert(0, {"kind": "contrastive", "rounds": 1, "batch_size": 16})
    tables["phases"].append({"kind": "evaluate"})
    summary = in_process(tmp_path, tables, data)
    assert summary.metrics["test"]["rows"] > 0


@pytest.mark.usefixtures("as_it_is")
def test_processes_one_of_which_is_killed_give_what_one_process_gives(
    data: dict[str, Any], tmp_path: Path
) -> None:
    adam = {"kind": "adam", "lr": 0.01}
    tables = recipe(SUBSETS, parties=3, epochs=6, checkpoint_steps=3, optimizer=adam)
    data = {name: data[name] for name in NAMES[:3]}
    want = in_memory(tmp_path / "one", tables, data)
    with held(tmp_path / "many", tables, data, received=16_000) as (federation, proxy):
        kill(federation, proxy, "p2")
        assert federation.finish()["interruptions"]
        got = {name: federation.parameters(name) for name in federation.names}
    assert largest_deviation(got, want) == 0.0


@pytest.mark.parametrize("kind", ["splitnn", "head"])
def test_a_forecast_is_what_crosses(kind: str, data: dict[str, Any], tmp_path: Path) -> None:
    """Of the training and the evaluation: an alignment is counted as if all had as many rows."""
    more: dict[str, Any] = {"micro_batches": 2} if kind == "splitnn" else {}
    tables = recipe(SUBSETS, kind=kind, codec="bfloat16", **more)
    tables["phases"].append({"kind": "evaluate", "subsets": True})
    counted = in_process(tmp_path / "run", tables, data).bytes
    said = forecast(
        outlook_of(Recipe.model_validate(tables | {"simulate": {"parties": data}}), tmp_path)
    )
    phases = {kind, "evaluate"}
    want = {each for each in counted.by_link if each.phase in phases}
    assert {each for each in said.links if each.phase in phases and each.message_bytes} == want
    assert not any(each.bound for each in said.phases)
    held = {name: pd.read_csv(each["source"])["id"] for name, each in data.items()}
    assert said.rows == held["p0"].isin(pd.concat([held[name] for name in NAMES[1:]])).sum()
    # Each party sends its own rows alone.
    sent = {each.sender: each.payload_bytes for each in want if each.kind == "embedding"}
    assert len({sent[name] for name in NAMES[1:]}) == 3
    unknown = forecast(outlook_of(Recipe.model_validate(tables), tmp_path), rows=80)
    assert {each.name for each in unknown.phases if each.bound} == phases


# -- evaluation and prediction


@pytest.fixture(scope="module")
def ran(data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    tables = recipe(SUBSETS, epochs=4)
    tables["phases"].append({"kind": "evaluate", "splits": ["train", "validation", "test"]})
    return finished(tables, data, tmp_path_factory.mktemp("run") / "run")


def finished(tables: dict[str, Any], data: dict[str, Any], folder: Path) -> Run:
    """Runs a recipe in this process."""
    settings = {name: DataSettings(**each) for name, each in data.items()}
    run_in_process(Recipe.model_validate(tables), settings, folder)
    Origin(folder.parent, settings).note(folder)
    return Run.load(folder)


def ids_of(data: dict[str, Any]) -> dict[str, set[str]]:
    return {
        name: {line.split(",")[0] for line in Path(each["source"]).read_text().splitlines()[1:]}
        for name, each in data.items()
    }


def test_no_row_is_lost(ran: Run, data: dict[str, Any]) -> None:
    """Each row that another party holds is in one split, and in the part of its holders."""
    ids, metrics, kept = ids_of(data), ran.metrics, ran.predictions
    others = set().union(*(ids[name] for name in NAMES[1:]))
    splits = ("train", "validation", "test")
    rows = dict.fromkeys(splits, 0)
    for id_, split in zip(kept["matched_id"], kept["split"], strict=True):
        of, with_, holders = split.partition(" with ")
        if split in rows:
            rows[split] += 1
        elif with_:
            assert holders.split(", ") == [name for name in NAMES if id_ in ids[name]]
            assert of in rows
    assert sum(rows.values()) == len(ids["p0"] & others)
    for split in splits:
        assert metrics[split]["rows"] == rows[split]
        parts = [of["rows"] for name, of in metrics.items() if name.startswith(f"{split} with ")]
        assert sum(parts) == rows[split]
        assert len(parts) > 2


def test_evaluation_scores_a_row_with_its_holders(ran: Run, data: dict[str, Any]) -> None:
    """Compared with the models as they are trained, row by row."""
    ids, kept = ids_of(data), ran.predictions
    encoders = {name: ran.model(name) for name in NAMES}
    tables = {
        name: {
            line.split(",")[0]: [float(cell) for cell in line.split(",")[1:3]]
            for line in Path(each["source"]).read_text().splitlines()[1:]
        }
        for name, each in data.items()
    }
    top = present(encoders["p0"].top)
    looked = 0
    for id_, split, score in zip(kept["matched_id"], kept["split"], kept["score_1"], strict=True):
        if split != "test":
            continue
        z = [
            encoders[name].embed(
                {
                    column: np.array([value])
                    for column, value in zip("ab", tables[name][id_], strict=True)
                }
            )
            for name in NAMES
            if id_ in ids[name]
        ]
        want = top(torch.stack(z).mean(dim=0)).sigmoid().item()
        assert score == pytest.approx(want, abs=1e-6)
        looked += 1
    assert looked > 5


def test_a_prediction_is_for_every_row_of_the_active_party(ran: Run, data: dict[str, Any]) -> None:
    ids, found = ids_of(data), ran.predict()
    assert set(found["id"]) == ids["p0"]
    assert {*found["state"]} == {"scored"}
    kept, metrics = ran.predictions, ran.metrics
    tested = {
        id_: score
        for id_, split, score in zip(
            kept["matched_id"], kept["split"], kept["score_1"], strict=True
        )
        if split == "test"
    }
    for id_, parties, score, expected in zip(
        found["id"], found["parties"], found["score_1"], found["expected_auc"], strict=True
    ):
        assert parties == ", ".join(name for name in NAMES if id_ in ids[name])
        known = [metrics.get(f"{split} with {parties}", {}) for split in ("test", "validation")]
        assert expected == next((of["auc"] for of in known if "auc" in of), None)
        if id_ in tested:
            assert score == pytest.approx(tested[id_], abs=1e-6)
    assert "p0" in found["parties"]
    some = ran.predict(without=["p1"])
    assert not any("p1" in parties for parties in some["parties"])
    alone = ran.predict(without=["p1", "p2", "p3"])
    assert {*alone["parties"]} == {"p0"}


def test_served_by_id_from_databases_they_are_those_of_a_prediction(
    ran: Run, data: dict[str, Any], tmp_path: Path
) -> None:
    serve, want = {}, ran.predict()
    for name in ("p0", "p1"):
        path, query = tmp_path / f"{name}.db", "SELECT id, a, b FROM people WHERE id IN :ids"
        with sqlite3.connect(path) as file:
            pd.read_csv(data[name]["source"]).to_sql("people", file, index=False)
        store = {"kind": "database", "source": f"sqlite:///{path}", "query": query}
        serve[name] = {"store": store}
    online = Online.of(ran.folder, serve=serve)
    scores = online.score(*want["id"])
    # Served rows have no score where nobody has measured these parties.
    rows = [at for at in range(len(scores)) if scores.state[at] != "unmeasured"]
    assert len(rows) > len(scores) / 3
    assert scores.columns["score_1"][rows].tolist() == [want["score_1"][at] for at in rows]
    parties = [", ".join(scores.part(at).parties) for at in range(len(scores))]
    assert parties == want["parties"]
    online.close()


def test_rows_that_a_party_does_not_know_at_all_are_scored(
    ran: Run, data: dict[str, Any], tmp_path: Path
) -> None:
    """A single row, which one of three passive parties knows."""
    ids = ids_of(data)
    one = sorted((ids["p0"] & ids["p1"]) - ids["p2"] - ids["p3"])[0]
    lines = Path(data["p0"]["source"]).read_text().splitlines()
    path = tmp_path / "one.csv"
    path.write_text("\n".join([lines[0], *(line for line in lines if line.startswith(one))]) + "\n")
    others = {name: data[name]["source"] for name in NAMES[1:]}
    found = ran.predict({"p0": str(path), **others})
    assert (found["id"], found["parties"]) == ([one], ["p0, p1"])
    whole = ran.predict()
    assert found["score_1"] == [whole["score_1"][whole["id"].index(one)]]


def test_trees_take_missing_numbers_for_rows_that_a_party_does_not_hold(
    data: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    """Compared with scikit-learn on the same matrix, in training, evaluation and prediction."""
    tables = recipe({}, "concat")
    tables["model"] = {
        "embedding_size": 2,
        "top": {"kind": "gbdt", "trees": 20, "min_rows": 4, "lr": 0.2, "early_stopping": 30},
    }
    tables["phases"] = [
        {"kind": "fedonce", "objective": "pca"},
        {"kind": "head"},
        {"kind": "evaluate", "splits": ["train", "validation", "test"]},
    ]
    found = finished(tables, data, tmp_path / "run")
    splits = {"train", "validation", "test"}
    here = [at for at, each in enumerate(found.predictions["split"]) if each in splits]
    kept = {name: [each[at] for at in here] for name, each in found.predictions.items()}
    ids = ids_of(data)
    frames = {name: pd.read_csv(each["source"], index_col="id") for name, each in data.items()}
    columns = []
    for name in NAMES:
        rows = [each if each in ids[name] else None for each in kept["matched_id"]]
        held = [each for each in rows if each is not None]
        z = found.model(name).embed(frames[name].loc[held, ["a", "b"]])
        whole = np.full((len(rows), 2), np.nan, np.float32)
        whole[[each is not None for each in rows]] = z
        columns.append(whole)
    x_NF = np.concatenate(columns, axis=1)
    assert np.isnan(x_NF).any()
    top = present(found.model("p0").top)
    scores = top(torch.from_numpy(x_NF)).sigmoid()[:, 0]
    np.testing.assert_allclose(kept["score_1"], scores.numpy(), rtol=0, atol=1e-6)
    train, validation = (
        [at for at, each in enumerate(kept["split"]) if each == split]
        for split in ("train", "validation")
    )
    y = frames["p0"].loc[kept["matched_id"], "y"].to_numpy()
    model = HistGradientBoostingClassifier(
        max_iter=20,
        min_samples_leaf=4,
        learning_rate=0.2,
        early_stopping=True,
        scoring="loss",
        n_iter_no_change=30,
    )
    model.fit(x_NF[train], y[train], X_val=x_NF[validation], y_val=y[validation])
    best = list(model.staged_decision_function(x_NF))[int(np.argmax(model.validation_score_)) - 1]
    np.testing.assert_allclose(top(torch.from_numpy(x_NF))[:, 0].numpy(), best, rtol=0, atol=1e-5)
    by_id = dict(zip(kept["matched_id"], kept["score_1"], strict=True))
    again = found.predict()
    for id_, score in zip(again["id"], again["score_1"], strict=True):
        assert id_ not in by_id or score == pytest.approx(by_id[id_], abs=1e-6)
    without = found.predict(without=["p1", "p2", "p3"])
    assert {*without["parties"]} == {"p0"}


@pytest.mark.parametrize("how", [DROPOUT, {}], ids=str)
def test_an_active_party_with_labels_alone(
    how: dict[str, Any], data: dict[str, Any], tmp_path: Path
) -> None:
    """Rows that no other party holds have no score."""
    tables, ids = recipe(how, "mean"), ids_of(data)
    tables["parties"][0]["features"] = False
    tables["phases"].append({"kind": "evaluate", "subsets": True})
    summary = in_process(tmp_path / "run", tables, data)
    assert summary.worth is not None
    parts = [name for name in summary.metrics if name.startswith("test with ")]
    assert parts
    assert not any("p0" in name for name in parts)
    Origin(tmp_path, {name: DataSettings(**each) for name, each in data.items()}).note(
        tmp_path / "run"
    )
    found = Run.load(tmp_path / "run").predict()
    known = set().union(*(ids[name] for name in NAMES[1:]))
    for id_, state, parties in zip(found["id"], found["state"], found["parties"], strict=True):
        assert state == ("scored" if id_ in known else "not at every party")
        there = [name for name in NAMES[1:] if id_ in ids[name]]
        assert parties == (", ".join(there) or None)


# -- an active party that lies


@pytest.mark.parametrize(
    "splits",
    [
        # The sum overflows to a number of rows that can be.
        (2**63 - 1, 2**63 - 1, 92, 0, 0),
        (0, 0, -1, 80, 0),
        (0, 0, 0, 0, 0),
        # Fewer than the places.
        (0, 0, 1, 0, 0),
    ],
    ids=str,
)
def test_sizes_of_splits_that_cannot_be_are_refused(
    splits: tuple[int, ...], data: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partial, "to_tensor", lambda *_: torch.tensor(splits))
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p0"):
        in_process(tmp_path, recipe(SUBSETS), data)


# -- what a passive party sends


def test_a_party_sends_and_hears_of_its_own_rows_alone(
    data: dict[str, Any], tmp_path: Path
) -> None:
    tables, ids = recipe(SUBSETS, epochs=1, batch_size=1), ids_of(data)
    tables["rows"] |= {"validation": 0.0, "test": 0.0}
    counted = in_process(tmp_path, tables, data).bytes.by_link
    for name in NAMES[1:]:
        mine = len(ids["p0"] & ids[name])
        both = [
            each
            for each in counted
            if each.phase == "splitnn" and name in (each.sender, each.receiver)
        ]
        # A message a row, of 4 numbers.
        assert {(each.kind, each.messages) for each in both} == {
            ("embedding", mine),
            ("gradient", mine),
        }
        assert {each.payload_bytes for each in both} == {16 * mine}


# -- refusals


@pytest.mark.parametrize(
    "change",
    [
        {"rows": {"align": "digest", "partial": True}},
        {"task": {"kind": "survival"}},
        {"phase": {"late_policy": "skip", "deadline_s": 1.0}},
        {"phase": {"max_bytes": 1000}},
        {"phase": {"nopeek": 0.1}},
        {"phase": {"dcor": 0.1}},
        {"phase": {"local_updates": 2}},
        {"phase": {"cache": {}}},
        {"head": {"deadline_s": 1.0}},
        {"head": {"dp": {"epsilon": 1.0, "delta": 1e-5, "max_grad_norm": 1.0}}},
        {"after": {"kind": "student", "epochs": 1}},
        {"after": {"kind": "evaluate", "importance": True}},
        {"before": {"kind": "fedhssl", "ssl": "simsiam", "rounds": 1}},
        {"only": {"kind": "secureboost"}},
        {"only": {"kind": "fedcvt", "epochs": 1}},
        {"batch_norm": True},
        {"head batch_norm": True},
        {"alone": True},
    ],
    ids=str,
)
def test_what_cannot_work_is_one_sentence(
    change: dict[str, Any], data: dict[str, Any], tmp_path: Path
) -> None:
    tables = recipe({})
    phase = tables["phases"][0]
    match change:
        case {"rows": rows}:
            tables["rows"] = rows
        case {"task": task}:
            tables["task"] = task
        case {"phase": more}:
            phase |= more
        case {"head": more}:
            phase |= {"kind": "head"} | more
        case {"after": more}:
            tables["phases"].append(more)
        case {"before": more}:
            tables["phases"].insert(0, more)
        case {"only": more}:
            tables["phases"] = [more]
        case {"batch_norm": _}:
            tables["model"]["encoder"]["batch_norm"] = True
        case {"head batch_norm": _}:
            tables["model"]["encoder"]["batch_norm"] = True
            phase |= {"kind": "head", "own_encoder": "trained"}
        case _:
            tables["parties"] = tables["parties"][:1]
            data = {"p0": data["p0"]}
    if "alone" in change or "rows" in change:
        with pytest.raises(ValidationError, match="partial"):
            in_memory(tmp_path, tables, data)
        return
    with raises(InputError, Code.CONFIG_INVALID):
        in_memory(tmp_path, tables, data)


def test_rehearsals_are_refused(data: dict[str, Any], tmp_path: Path) -> None:
    tables = recipe({}) | {"simulate": {"parties": data}}
    with raises(InputError, Code.CONFIG_INVALID, names="rows.partial"), contextlib.chdir(tmp_path):
        vfl.leaks(tables, attacks=["norm"], seeds=[1], quiet=True)


def test_the_report_says_how_many_rows_of_each_party_count(ran: Run) -> None:
    assert "rows used (p0 " in ran._repr_html_()
