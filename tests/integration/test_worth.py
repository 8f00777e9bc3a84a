"""What each party is worth: the quality of each set of parties, and Shapley values from it."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import roc_auc_score
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.memory import in_process
from tests.harness.present import present
from tests.harness.reference_worth import brute_force, changes, qualities
from tests.integration.test_exact import TOLERANCE
from tests.integration.test_resume import HANDSHAKE_BYTES, held, kill, wait_for_checkpoints
from vfl.library.simulate import run_files
from vfl_common.bundle import load_entries
from vfl_common.config.base import parse, read_toml
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.summary import Summary, load_summary
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger
from vfl_party.phases.context import Party

EXAMPLES = Path(__file__).parents[2] / "examples"
SUBSETS: dict[str, Any] = {"kind": "evaluate", "subsets": True, "resamples": 10}
BINARY = {"kind": "binary"}
IMPORTANCE: dict[str, Any] = {"subsets": False, "importance": True, "repeats": 3}
TANH = {"kind": "mlp", "hidden": [12], "activation": "tanh"}
TABLE = cases.columns("sklearn:breast_cancer", 3, limit=150)


def tables(parties: int, phase: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    made = cases.recipe(parties, rows={"validation": 0.2, "test": 0.3}, **more)
    evaluate = SUBSETS | (phase or {})
    if not evaluate["subsets"]:
        del evaluate["resamples"]
    return made | {"phases": [*made["phases"], evaluate]}


def auc(outputs: Tensor, targets: Tensor) -> float:
    return float(roc_auc_score(targets.numpy(), outputs.numpy()))


def loss(outputs: Tensor, targets: Tensor) -> float:
    return F.binary_cross_entropy_with_logits(outputs.double(), targets.double()).item()


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    # torchmetrics divides counts in float32, whatever the outputs are.
    return (outputs.argmax(dim=1) == targets).float().mean().item()


def rmse(outputs: Tensor, targets: Tensor) -> float:
    return (outputs - targets).double().square().mean().sqrt().item()


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {
    "auc, means": (
        tables(3, task=BINARY, model={"encoder": TANH, "combine": "concat"}),
        TABLE,
        auc,
    ),
    "loss, zeros, a sum": (
        tables(
            3,
            {"absent": "zero", "metric": "loss"},
            task=BINARY,
            model={"encoder": TANH, "combine": "sum"},
        ),
        TABLE,
        loss,
    ),
    "accuracy, four parties, a mean": (
        tables(4, model={"combine": "mean"}),
        cases.digits(4),
        accuracy,
    ),
    "rmse, labels only, attention": (
        tables(
            3,
            {"metric": "rmse_scaled"},
            task={"kind": "regression"},
            active_features=False,
            model={"encoder": TANH, "combine": "attention"},
        ),
        cases.columns("sklearn:diabetes", 2, limit=150, active_features=False),
        rmse,
    ),
}


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("case", list(CASES))
def test_sets_are_measured_as_one_process_measures_them(case: str, tmp_path: Path) -> None:
    made, data, quality = CASES[case]
    summary = in_process(tmp_path / "run", made, data)
    worth = present(summary.worth)
    want = qualities(made, data, worth.absent, quality)
    found = {
        (frozenset(each.parties), split): value
        for each in worth.subsets
        for split, value in (("validation", each.validation), ("test", each.test))
    }
    assert found == pytest.approx(want, rel=0, abs=TOLERANCE)
    players = worth.subsets[-1].parties
    for split in ("validation", "test"):
        assert found[frozenset(players), split] == summary.metrics[split][worth.metric]
    tested = {of: v for (of, split), v in found.items() if split == worth.split and v is not None}
    values = {name: each.value for name, each in worth.shapley.items()}
    assert values == pytest.approx(brute_force(players, tested), abs=1e-9)
    together = tested[frozenset(players)] - tested[frozenset()]
    assert math.fsum(values.values()) == pytest.approx(together, abs=1e-9)
    assert all(each.error > 0.0 for each in worth.shapley.values())


def importance(folder: Path) -> dict[str, tuple[float, float]]:
    """{column: its value and error}, as a party keeps them."""
    found = json.loads((folder / "importance.json").read_text())
    return {each["name"]: (each["value"], each["error"]) for each in found["columns"]}


@pytest.mark.parametrize("combine", ["concat", "sum"])
def test_columns_are_permuted_as_one_process_permutes_them(combine: str, tmp_path: Path) -> None:
    model = {"encoder": TANH, "combine": combine}
    made = tables(3, IMPORTANCE | {"metric": "loss"}, task=BINARY, model=model)
    in_process(tmp_path / "run", made, TABLE)
    for name, costs in changes(made, TABLE, 3, loss).items():
        found = importance(tmp_path / "run" / name)
        assert len(found) == len(costs) == 10
        assert all(each == float(f"{each:.3g}") for of in found.values() for each in of)
        means = sorted(float(np.mean(each)) for each in costs)
        assert sorted(value for value, _ in found.values()) == pytest.approx(
            means, rel=6e-3, abs=1e-6
        )
        errors = sorted(float(np.std(each, ddof=1) / 3**0.5) for each in costs)
        assert sorted(error for _, error in found.values()) == pytest.approx(
            errors, rel=6e-3, abs=1e-6
        )
        assert stat.S_IMODE((tmp_path / "run" / name / "importance.json").stat().st_mode) == 0o600


@pytest.mark.parametrize("count", [0, 10_001])
def test_a_party_of_too_many_columns_is_refused(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(party: Party) -> list[str]:
        return ["x"] * (count if party.name == "p1" else 1)

    monkeypatch.setattr("vfl_party.methods.evaluate.importance.get_column_names", lie)
    made = tables(3, IMPORTANCE, task=BINARY, model={"encoder": TANH})
    with raises(PeerError, Code.MALFORMED_MESSAGE, names=("p1", "10")):
        in_process(tmp_path / "run", made, TABLE)


def test_categories_and_images_are_permuted_whole(tmp_path: Path) -> None:
    random, n = np.random.default_rng(3), 200
    town, x = random.choice(["a", "b", "c"], n), random.normal(size=n)
    own, theirs = tmp_path / "p0.csv", tmp_path / "p1.csv"
    pd.DataFrame({"id": range(n), "y": (town == "a").astype(int), "x": x}).to_csv(own, index=False)
    pd.DataFrame({"id": range(n), "town": town, "z": x}).to_csv(theirs, index=False)
    data = {
        "p0": {"source": str(own), "id": "id", "label": "y"},
        "p1": {"source": str(theirs), "id": "id"},
    }
    for kind in ("mlp", "tabular"):
        made = tables(2, IMPORTANCE, task=BINARY, model={"encoder": {"kind": kind}})
        made["phases"][0] |= {"epochs": 8, "optimizer": {"lr": 0.02}}
        in_process(tmp_path / kind, made, data)
        found = importance(tmp_path / kind / "p1")
        assert list(found) == ["town", "z"]
        assert found["town"][0] > 0.3
    made = tables(2, IMPORTANCE, model={"encoder": {"kind": "cnn", "channels": [4]}})
    in_process(tmp_path / "images", made, cases.digits(2))
    assert list(importance(tmp_path / "images" / "p1")) == ["image"]


def test_a_party_that_dies_while_rows_are_evaluated_changes_nothing(tmp_path: Path) -> None:
    made, data, _ = CASES["auc, means"]
    made = made | {"phases": [made["phases"][0], SUBSETS | {"importance": True, "repeats": 2}]}
    # Its embeddings of the test rows are larger than what is not counted.
    made = made | {"model": made["model"] | {"embedding_size": 128}}
    undisturbed = in_process(tmp_path / "here" / "run", made, data)
    sent = {
        entry.phase: entry.message_bytes
        for entry in load_entries(tmp_path / "here" / "run" / "p2" / "ledger.json")
        if (entry.kind, entry.direction) == ("embedding", "sent")
    }
    at = HANDSHAKE_BYTES + sent["splitnn"] + sent["evaluate"] // 2
    here, there = tmp_path / "here" / "run", tmp_path / "there"
    with held(there, made, data, sent=at) as (federation, proxy):
        wait_for_checkpoints(federation)
        kill(federation, proxy, "p2")
        resumed = Summary.model_validate(federation.finish())
    assert resumed.interruptions == 1
    assert resumed.worth == undisturbed.worth
    assert resumed.worth is not None
    for name in data:
        kept = (federation.run_folder / name / "importance.json").read_text()
        assert kept == (here / name / "importance.json").read_text()


@pytest.mark.parametrize(
    ("phase", "more"),
    [({"absent": "mean"}, 1), ({"absent": "zero"}, 0), ({"importance": True, "repeats": 2}, 31)],
    ids=["mean", "zero", "importance"],
)
def test_all_is_forecast_to_the_byte(phase: dict[str, Any], more: int, tmp_path: Path) -> None:
    path = EXAMPLES / "breast-cancer.toml"
    made = read_toml(path)
    made["phases"] = [
        {"kind": "splitnn", "epochs": 1, "codec": "float16"},
        SUBSETS | phase | {"resamples": 2, "codec": "float16"},
    ]
    recipe = parse(Recipe, made, str(path))
    said = forecast(outlook_of(recipe, path.parent))
    run_files(made, path.parent, tmp_path / "run")
    summary = load_summary(tmp_path / "run" / "summary.json")
    assert summary.worth is not None
    links = [link for link in compare_with_ledger(said, summary.bytes) if link.phase == "evaluate"]
    assert links
    for link in links:
        assert link.forecast == link.counted, link
    sent = [
        link.messages
        for link in summary.bytes.by_link
        if (link.phase, link.kind) == ("evaluate", "embedding")
    ]
    # Of validation, of test, of the mean, and of each of 15 columns twice.
    assert sent == [2 + more] * len(recipe.passives)


def noisy(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A recipe and data of two parties that know something, and one that has noise alone."""
    random, n = np.random.default_rng(5), 1_500
    x = random.normal(size=(n, 4))
    label = (x[:, :3].sum(axis=1) + 0.5 * random.normal(size=n) > 0).astype(int)
    found: dict[str, Any] = {}
    for name, columns in {
        "p0": {"label": label, "a": x[:, 0]},
        "p1": {"b": x[:, 1], "c": x[:, 2]},
        "p2": {"d": x[:, 3]},
    }.items():
        path = folder / f"{name}.csv"
        pd.DataFrame({"id": range(n), **columns}).to_csv(path, index=False)
        found[name] = {"source": str(path), "id": "id"}
    found["p0"]["label"] = "label"
    made = tables(3, {"resamples": 60, "importance": True}, task=BINARY, model={"encoder": TANH})
    made["phases"][0] |= {"epochs": 6, "optimizer": {"lr": 0.01}}
    return made, found


def test_a_party_of_noise_is_worth_nothing_within_its_error(tmp_path: Path) -> None:
    worth = present(in_process(tmp_path / "run", *noisy(tmp_path)).worth)
    noise, rest = worth.shapley["p2"], [worth.shapley[name] for name in ("p0", "p1")]
    assert abs(noise.value) <= 2 * noise.error < 0.02
    assert all(each.value > 5 * each.error for each in rest)
    ((value, error),) = importance(tmp_path / "run" / "p2").values()
    assert abs(value) <= 2 * error < 0.01
    assert all(each > 5 * its > 0 for each, its in importance(tmp_path / "run" / "p1").values())


def test_of_many_parties_orders_are_drawn_and_the_error_says_so(tmp_path: Path) -> None:
    made = tables(7, {"permutations": 4, "resamples": 5}, task=BINARY, model={"encoder": TANH})
    data = cases.columns("sklearn:breast_cancer", 7, limit=150)
    worth = present(in_process(tmp_path / "run", made, data).worth)
    assert worth.permutations == 4
    assert [len(each.parties) for each in worth.subsets] == [0, *[1] * 7, *[6] * 7, 7]
    none, together = worth.subsets[0].test, worth.subsets[-1].test
    assert none == 0.5
    total = math.fsum(each.value for each in worth.shapley.values())
    assert total == pytest.approx(present(together) - none, abs=1e-9)
    assert all(each.error > 0.0 for each in worth.shapley.values())


def test_a_ranking_draws_queries_and_a_survival_has_its_own_metric(tmp_path: Path) -> None:
    random, n = np.random.default_rng(2), 300
    x = random.normal(size=(n, 3))
    times = pd.DataFrame({"id": range(n), "query": np.arange(n) // 6, "a": x[:, 0]})
    times["seen"], times["time"] = (random.random(n) < 0.7).astype(int), np.exp(-x.sum(axis=1))
    times["relevance"] = (x.sum(axis=1) > 0.5).astype(int)
    other = pd.DataFrame({"id": range(n), "query": np.arange(n) // 6, "b": x[:, 1], "c": x[:, 2]})
    own, theirs = tmp_path / "p0.csv", tmp_path / "p1.csv"
    times.to_csv(own, index=False)
    other.to_csv(theirs, index=False)
    for task, keys, metric in (
        ("survival", {"label": "time", "event": "seen"}, "c_index"),
        ("ranking", {"label": "relevance", "group": "query"}, "ndcg"),
    ):
        made = tables(2, task={"kind": task}, model={"encoder": TANH})
        made["phases"][0] |= {"epochs": 3, "optimizer": {"lr": 0.02}}
        if task == "ranking":
            made["rows"] |= {"split": "grouped"}
        data = {
            "p0": {"source": str(own), "id": "id", "columns": ["a"]} | keys,
            "p1": {"source": str(theirs), "id": "id", "columns": ["b", "c"]},
        }
        worth = present(in_process(tmp_path / task, made, data).worth)
        assert worth.metric == metric
        assert set(worth.shapley) == {"p0", "p1"}
        assert all(each.value > 0 and each.error > 0 for each in worth.shapley.values())


@pytest.mark.parametrize(
    "phase",
    [
        {"splits": ["train"]},
        {"metric": "rmse"},
        {"subsets": False, "absent": "zero"},
        {"subsets": False, "metric": "auc"},
        {"absent": "median"},
        {"resamples": 1},
        {"importance": True, "splits": ["test"]},
        {"repeats": 3},
    ],
    ids=lambda phase: ", ".join(phase),
)
def test_what_means_nothing_is_refused(phase: dict[str, Any], tmp_path: Path) -> None:
    made = tables(3, task=BINARY, model={"encoder": TANH})
    made["phases"][1] = {"kind": "evaluate", "subsets": True} | phase
    with raises(InputError, Code.CONFIG_INVALID):
        in_process(tmp_path / "run", made, TABLE)


def test_rows_to_measure_by_are_needed(tmp_path: Path) -> None:
    made = tables(3, task=BINARY, model={"encoder": TANH})
    made["rows"] = {"validation": 0.0, "test": 0.0}
    with raises(InputError, Code.CONFIG_INVALID, names=("rows.validation", "rows.test")):
        in_process(tmp_path / "run", made, TABLE)


@pytest.mark.parametrize("kind", ["gbdt", "secureboost"])
def test_trees_have_no_embeddings_to_replace(kind: str, tmp_path: Path) -> None:
    made = cases.recipe(3, task=BINARY)
    made["phases"] = [{"kind": kind, "subsets": True}]
    with raises(InputError, Code.CONFIG_INVALID, names=("subsets", "early_stopping")):
        in_process(tmp_path / "run", made, TABLE)
