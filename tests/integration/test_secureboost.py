"""SecureBoost at the real programs: equal to one process on joined columns, killed, encrypted,
predicted with.
"""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness import cases, reference_secureboost
from tests.harness.federation import Federation
from tests.harness.memory import run_here
from tests.integration.test_resume import held, kill
from tests.integration.test_ssl_phases import run

TOLERANCE = 1e-12


def recipe(parties: int, task: dict[str, Any], **phase: Any) -> dict[str, Any]:
    settings = {
        "trees": 5,
        "depth": 3,
        "bins": 8,
        "encryption": "none",
        "learning_rate": 0.3,
    } | phase
    tables = cases.recipe(parties, task=task)
    return tables | {"phases": [{"kind": "secureboost", **settings}]}


def made_table(folder: Path, parties: int, task: str) -> dict[str, dict[str, Any]]:
    """Writes a table with numbers, some missing, and categories, some missing; divides its
    columns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    draw = np.random.default_rng(3)
    n, width = 400, 3 * parties
    x = draw.normal(size=(n, width)).round(1)
    words = draw.integers(0, 6, size=(n, parties))
    hidden = (
        x[:, 0] * x[:, -1]
        + (words[:, -1] % 3 == 1)
        + 0.5 * np.isnan(x[:, 1])
        + 0.3 * draw.normal(size=n)
    )
    classes = np.digitize(hidden, [-0.2, 0.6])
    y = {"binary": (hidden > 0.3).astype(int), "multiclass": classes, "regression": hidden}[task]
    x[draw.random(x.shape) < 0.1] = np.nan
    header = ["id", *(f"x{c}" for c in range(width)), *(f"w{c}" for c in range(parties)), "y"]
    with (folder / "all.csv").open("w", newline="") as file:
        lines = csv.writer(file)
        lines.writerow(header)
        for row in range(n):
            numbers = ["" if np.isnan(v) else f"{v}" for v in x[row]]
            names = ["" if draw.random() < 0.05 else f"word-{w}" for w in words[row]]
            lines.writerow([f"r{row:04d}", *numbers, *names, y[row]])
    found = {}
    for party in range(parties):
        columns = [*(f"x{3 * party + c}" for c in range(3)), f"w{party}"]
        found[f"p{party}"] = {
            "source": "all.csv",
            "id": "id",
            "columns": columns,
            "missing": "mean",
        }
    found["p0"]["label"] = "y"
    return found


def forest(federation: Federation, name: str) -> dict[str, Any]:
    state = federation.parameters(name)["trees._extra_state"]
    found: dict[str, Any] = json.loads(bytes(state.numpy()))
    return found


def check_equal(
    federation: Federation, tables: dict[str, Any], data: dict[str, dict[str, Any]]
) -> float:
    """Compares trees, leaves and kept scores with the reference; returns the largest deviation."""
    folder = federation.folder
    absolute = {
        name: settings
        | ({"source": str(folder / settings["source"])} if settings["source"] == "all.csv" else {})
        for name, settings in data.items()
    }
    want = reference_secureboost.train(tables, absolute)
    got = {name: forest(federation, name) for name in federation.names}
    active, worst = got["p0"], 0.0
    assert len(active["trees"]) == len(want.trees)
    for number, tree in enumerate(want.trees):
        flat = tree.flat()
        _, owners, _, leaves = active["trees"][number]
        assert {(a, b): owner for a, b, owner in owners} == {
            at: each[0] for at, each in flat.items() if each[0]
        }
        values = {at: each[2] for at, each in flat.items() if not each[0]}
        assert {(a, b) for a, b, _ in leaves} == values.keys()
        worst = max([worst, *(abs(value - values[a, b]) for a, b, value in leaves)])
        for name, own in got.items():
            columns = {(a, b): split["column"] for a, b, split in own["trees"][number][0]}
            assert columns == {at: each[1] for at, each in flat.items() if each[0] == name}
    return worst


def check_scores(
    summary: dict[str, Any], tables: dict[str, Any], data: dict[str, Any], folder: Path
) -> float:
    """Compares the loss of the test rows, which walk through all trees jointly, with the reference;
    the deviation.
    """
    absolute = {
        name: each | {"source": str(folder / each["source"])} for name, each in data.items()
    }
    want = reference_secureboost.train(tables, absolute)
    deviation: float = abs(summary["metrics"]["test"]["loss"] - want.loss("test"))
    return deviation


TASKS: dict[str, dict[str, Any]] = {
    "binary": {"kind": "binary"},
    "multiclass": {"kind": "multiclass", "classes": 3},
    "regression": {"kind": "regression"},
}


@pytest.mark.parametrize(
    ("parties", "task", "settings", "how"),
    [
        (2, "binary", {}, run),
        (3, "multiclass", {"trees": 3}, run),
        (4, "regression", {"depth": 4, "min_child_weight": 5.0}, run),
        (3, "binary", {"leaves": 5, "depth": 4, "lambda": 0.0, "min_gain": 0.5}, run_here),
        (2, "binary", {"row_sample": 0.7, "column_sample": 0.5, "first_tree_own": True}, run_here),
        (2, "binary", {"early_stopping": 2, "trees": 40, "learning_rate": 0.9}, run_here),
        (2, "binary", {"goss": {"top": 0.2, "rest": 0.2}, "trees": 8, "early_stopping": 8}, run),
        (
            3,
            "multiclass",
            {"goss": {"top": 0.3, "rest": 0.2}, "column_sample": 0.7, "trees": 3},
            run_here,
        ),
        (3, "regression", {"goss": {"top": 0.1, "rest": 0.5}, "first_tree_own": True}, run_here),
    ],
)
def test_trees_are_those_of_one_process(
    parties: int,
    task: str,
    settings: dict[str, Any],
    how: Any,
    tmp_path: Path,
    record_property: Any,
) -> None:
    tables = recipe(parties, TASKS[task], **settings)
    data = made_table(tmp_path, parties, task)
    summary, federation = how(tmp_path, tables, data)
    worst = max(
        check_equal(federation, tables, data), check_scores(summary, tables, data, tmp_path)
    )
    record_property("largest_deviation", float(worst))
    assert worst <= TOLERANCE


@pytest.mark.parametrize("encryption", ["ou", "paillier"])
def test_encryption_changes_no_tree(encryption: str, tmp_path: Path) -> None:
    """Sums are whole numbers, so that an encrypted run ends with the same bytes as one without
    encryption.
    """
    if encryption == "ou":
        pytest.importorskip("heu")
    found = []
    for each in (encryption, "none"):
        tables = recipe(3, TASKS["binary"], trees=2, encryption=each, key_bits=1024)
        folder = tmp_path / each
        _, federation = (run_here if each == "none" else run)(
            folder, tables, made_table(folder, 3, "binary")
        )
        found.append({name: forest(federation, name) for name in federation.names})
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("victim", "encryption"), [("p1", "none"), ("p0", "paillier"), ("server", "none")]
)
def test_a_killed_process_changes_no_tree(victim: str, encryption: str, tmp_path: Path) -> None:
    settings = {
        "trees": 12,
        "row_sample": 0.8,
        "early_stopping": 12,
        "encryption": encryption,
        "key_bits": 1024,
    }
    check_killed(tmp_path, victim, settings)


@pytest.mark.parametrize("victim", ["p1", "p0"])
def test_a_killed_process_changes_no_tree_of_chosen_rows(victim: str, tmp_path: Path) -> None:
    check_killed(tmp_path, victim, {"trees": 12, "goss": {"top": 0.2, "rest": 0.3}})


def check_killed(tmp_path: Path, victim: str, settings: dict[str, Any]) -> None:
    """Kills ``victim`` in the middle of a tree; the trees must be those of an undisturbed run, bit
    for bit.
    """
    tables = recipe(2, TASKS["binary"], **settings)
    summary, whole = run_here(
        tmp_path / "whole", tables, made_table(tmp_path / "whole", 2, "binary")
    )
    data = made_table(tmp_path / "killed", 2, "binary")
    down = sum(
        link["message_bytes"]
        for link in summary["bytes"]["by_link"]
        if link["sender"] == cases.ACTIVE
    )
    with held(tmp_path / "killed", tables, data, received=down // 2) as (killed, proxy):
        kill(killed, proxy, victim)
        killed.finish()
        started = [
            event for event in killed.programs["server"].seen() if event["event"] == "started"
        ]
    assert started[-1]["generation"] == 2
    # It went on, and did not begin again.
    assert started[-1]["checkpoint"]
    for name in killed.names:
        assert forest(killed, name) == forest(whole, name)


def test_new_rows_are_predicted_jointly_as_the_trees_of_one_process_would(tmp_path: Path) -> None:
    tables = recipe(3, TASKS["binary"])
    data = made_table(tmp_path, 3, "binary")
    _, federation = run(tmp_path, tables, data)
    absolute = {
        name: each | {"source": str(tmp_path / each["source"])} for name, each in data.items()
    }
    want = reference_secureboost.train(tables, absolute).scores[:, 0]
    options = ("--run", f"runs/{federation.run_folder.name}")
    federation.server_options = ("--predict",)
    with federation:
        federation.start_server()
        for name in federation.names:
            federation.start(
                name, "vfl-party", "predict", federation.write_party(name).name, *options
            )
        for name in federation.names:
            assert federation.programs[name].wait() == 0, federation.programs[name].stderr
    with (tmp_path / "predictions.csv").open(newline="") as file:
        got = {row["id"]: float(row["score_1"]) for row in csv.DictReader(file)}
    assert len(got) == 400
    assert max(abs(got[f"r{n:04d}"] - 1 / (1 + np.exp(-want[n]))) for n in range(400)) <= TOLERANCE
