"""FedOnce and what it is compared with, in one study; and a party alone is a plain training
loop.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.errors import raises
from tests.harness.federation import toml
from tests.harness.here import one_launcher
from tests.integration.test_exact import check
from vfl_common.errors import Code, InputError
from vfl_common.summary import Summary, load_summary
from vfl_lab.studies.run import run_study
from vfl_party.predict.run import load_trained

ROWS, TEST, PASSIVES, D = 100, 20, 2, 3
TRAINING = 70
# Payload bytes of FedOnce's only exchange in training.
UPLOAD = 4 * TRAINING * D * PASSIVES
EVALUATE = {"kind": "evaluate"}
SPLIT = {"kind": "splitnn", "epochs": 3, "batch_size": 20}
LOCAL = {"kind": "fedonce", "epochs": 3, "batch_size": 20}
HEAD = {"kind": "head", "own_encoder": "trained", "epochs": 3, "batch_size": 20}
LINEAR = {
    "model.encoder": {"kind": "mlp", "hidden": []},
    "model.embedding_size": 1,
    "model.top": {"hidden": []},
}
METHODS: list[dict[str, Any]] = [
    {"name": "FedOnce-L0", "finetune": [LOCAL, HEAD, EVALUATE]},
    {"name": "SplitNN"},
    {"name": "SplitNN-Comm", "finetune": [SPLIT | {"max_bytes": UPLOAD}, EVALUATE]},
    {"name": "Solo-p0", "alone": "p0"},
    {"name": "Solo-p2", "alone": "p2"},
    {"name": "Combine", "combined": True},
    {"name": "Linear-Combine", "combined": True, "overrides": LINEAR},
    {"name": "LightGBM", "finetune": [{"kind": "gbdt", "trees": 20, "min_rows": 5}]},
    {
        "name": "LightGBM-Combine",
        "combined": True,
        "finetune": [{"kind": "gbdt", "trees": 20, "min_rows": 5}],
    },
]


def between_parties(summary: Summary, phase: str = "") -> int:
    """Payload bytes of training phases, and all message bytes where no phase is named, but the
    server's.
    """
    links = [link for link in summary.bytes.by_link if "server" not in (link.sender, link.receiver)]
    if phase:
        return sum(link.payload_bytes for link in links if link.phase == phase)
    return sum(link.message_bytes for link in links)


@pytest.mark.slow
def test_fedonce_and_its_baselines_are_lines_of_one_study(tmp_path: Path) -> None:
    data = {"source": "sklearn:breast_cancer", "label": "target", "limit": ROWS}
    model = {"embedding_size": D, "top": {"hidden": [8]}}
    base = cases.recipe(
        1 + PASSIVES, task={"kind": "binary"}, rows={"test": TEST / ROWS}, model=model
    )
    (tmp_path / "base.toml").write_text(toml(base | {"simulate": {"data": data}}))
    study = {
        "name": "s",
        "recipe": "base.toml",
        "seeds": [1],
        "finetune": [SPLIT, EVALUATE],
        "methods": METHODS,
    }
    (tmp_path / "study.toml").write_text(toml(study))
    with one_launcher():
        results = run_study(tmp_path / "study.toml", tmp_path / "runs")
    assert [result.method for result in results] == [method["name"] for method in METHODS]
    for result in results:
        right = result.value("accuracy") * TEST
        # So many of the same number of rows.
        assert abs(right - round(right)) < 1e-4, result.method
        assert {"validation", "test"} <= result.metrics.keys()

    folder = tmp_path / "runs" / "s"
    by_method = {
        result.method: load_summary(folder / result.finetune.run / "summary.json")
        for result in results
    }
    fedonce = by_method["FedOnce-L0"]
    assert (between_parties(fedonce, "fedonce"), between_parties(fedonce, "head")) == (0, UPLOAD)
    epoch_and_validation = 2 * UPLOAD + 4 * 10 * D * PASSIVES
    assert between_parties(by_method["SplitNN"], "splitnn") == 3 * epoch_and_validation
    comm = between_parties(by_method["SplitNN-Comm"], "splitnn") - 4 * 10 * D * PASSIVES
    # Ends with the step that reaches it.
    assert UPLOAD <= comm < UPLOAD + 2 * 4 * 20 * D * PASSIVES
    for method in ("Solo-p0", "Solo-p2", "Combine", "Linear-Combine", "LightGBM-Combine"):
        assert between_parties(by_method[method]) == 0, method
        assert [party.role for party in by_method[method].parties] == ["server", "active"]
    assert between_parties(by_method["LightGBM"], "gbdt") == 0
    names = json.loads((folder / "s.Solo-p2.s1" / "p2" / "recipe.json").read_text())["parties"]
    assert [party["name"] for party in names] == ["p2"]
    with raises(InputError, Code.CHECKPOINT_INVALID, names="p0"):
        # To predict with it, or to start from it.
        load_trained(folder / "s.LightGBM.s1", "p0")


def test_a_party_alone_is_a_plain_training_loop(tmp_path: Path, record_property: Any) -> None:
    model = {"encoder": {"kind": "mlp", "hidden": [16], "dropout": 0.1}, "top": {"hidden": [8]}}
    phase = {
        "epochs": 6,
        "optimizer": {"kind": "adam", "lr": 0.01},
        "early_stopping": {"patience": 2},
    }
    recipe = cases.recipe(1, task={"kind": "binary"}, model=model, phase=phase)
    check(tmp_path, recipe, cases.columns("sklearn:breast_cancer", 1, limit=120), record_property)
