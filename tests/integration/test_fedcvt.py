"""FedCVT between parties gives the parameters of one graph in one process, to 1e-12 in float64;
killed parties change nothing.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import cases, reference_fedcvt
from tests.harness.federation import Federation, toml
from tests.harness.here import vfl_here
from tests.harness.memory import in_process
from tests.integration.test_exact import TOLERANCE, largest_deviation
from tests.integration.test_ranks import torchrun
from tests.integration.test_ssl_phases import check_kill
from vfl_common.config.recipe import Recipe
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.forecast.count import forecast, outlook_of
from vfl_party.forecast.result import compare_with_ledger

# No ReLU, whose gradient rounding decides near 0.
TANH = {"kind": "mlp", "hidden": [12], "activation": "tanh"}
TERMS = ("shared", "overlap_active", "overlap_passive", "estimate_active", "estimate_passive")
BINARY: dict[str, Any] = {"kind": "binary"}
THREE: dict[str, Any] = {"kind": "multiclass", "classes": 3}
DATA = {
    "binary": cases.columns("sklearn:breast_cancer", 2, limit=200),
    "multiclass": cases.columns("sklearn:wine", 2, limit=178),
}


def recipe(task: dict[str, Any] = BINARY, preset: str = "paper", **settings: Any) -> dict[str, Any]:
    """Six epochs of three steps, with pseudo-labels from the second epoch on."""
    tables = cases.recipe(
        2, task=task, model={"encoder": TANH}, rows={"aligned": 0.6, "labelled": 40}
    )
    phase = {
        "kind": "fedcvt",
        "epochs": 6,
        "batch_size": 16,
        "unlabelled_batch_size": 12,
        "own_batch_size": 10,
        "warmup": 0.2,
        "lambdas": dict.fromkeys(TERMS, 0.1),
        "optimizer": {"kind": "adam", "lr": 0.01},
    }
    return tables | {"preset": preset, "phases": [phase | settings]}


def parameters(run: Path, name: str) -> dict[str, Tensor]:
    """All weights of a party's models at the end."""
    store = CheckpointStore(run / name / "checkpoints", 2)
    models = store.load(store.labels()[-1])["job"]["models"]
    return {
        f"{model}.{key}": each for model, state in models.items() for key, each in state.items()
    }


def offered(run: Path) -> tuple[int, int]:
    """How many rows got pseudo-labels, of how many, in the whole phase."""
    lines = [
        json.loads(line)["metrics"]
        for line in (run / "p0" / "metrics.jsonl").read_text().splitlines()
    ]
    found = [line["pseudo"] for line in lines if "pseudo" in line]
    return sum(each["taken"] for each in found), sum(each["offered"] for each in found)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("task", [BINARY, THREE], ids=["binary", "three classes"])
@pytest.mark.parametrize("preset", ["paper", "released"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"own_batch_size": 0},
        {"own_batch_size": 0, "unlabelled_batch_size": 0},
        {
            "own_rows": "passive",
            "sharpen": 0.3,
            "threshold": 0.7,
            "lambdas": {"shared": 0.7, "overlap_passive": 0.0},
        },
    ],
    ids=["all rows", "no own rows", "labelled rows alone", "own rows of one party"],
)
def test_parties_get_the_parameters_of_one_process(
    settings: dict[str, Any],
    preset: str,
    task: dict[str, Any],
    tmp_path: Path,
    record_property: Any,
) -> None:
    tables, data = recipe(task, preset, **settings), DATA[task["kind"]]
    in_process(tmp_path / "run", tables, data)
    (*_, before, want), taken = reference_fedcvt.train(tables, data)
    got = {name: parameters(tmp_path / "run", name) for name in want}
    wanted = {
        name: {key: each for key, each in of.items() if key in got[name]}
        for name, of in want.items()
    }
    worst = largest_deviation(got, wanted)
    record_property("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}, {taken} pseudo-labels")
    assert worst <= TOLERANCE
    assert (
        largest_deviation(
            wanted, {name: {key: before[name][key] for key in of} for name, of in got.items()}
        )
        > 1e-3
    )
    count, of = offered(tmp_path / "run")
    assert count == taken
    assert (taken > 0) == (of > 0)
    assert taken < of or of == 0


@pytest.mark.usefixtures("float64")
def test_processes_compute_what_one_process_computes(tmp_path: Path) -> None:
    tables, data = recipe(THREE), DATA["multiclass"]
    tables["phases"].append({"kind": "evaluate"})
    with Federation(tmp_path, tables, data) as federation:
        federation.start_all()
        summary = federation.finish()
        (*_, before, want), _ = reference_fedcvt.train(tables, data)
        for name in federation.names:
            got = federation.parameters(name)
            assert max((got[key] - want[name][key]).abs().max().item() for key in got) <= TOLERANCE
        # The classifiers of one view end with the phase.
        heads = federation.checkpoint("p0", -3)["phase"]["heads"]
        assert (
            largest_deviation({"p0": heads}, {"p0": {key: before["p0"][key] for key in heads}})
            <= TOLERANCE
        )
        entries = [
            entry
            for entry in federation.ledger("p1")
            if (entry.peer, entry.phase) == ("p0", "fedcvt")
        ]
    assert summary["interruptions"] == 0
    assert "accuracy" in summary["metrics"]["test"]
    # Of six epochs of 16, 16 and 8 labelled rows.
    rows = 6 * (40 + 3 * (12 + 10))
    assert sum(entry.payload_bytes for entry in entries if entry.kind == "gradient") == 8 * 8 * rows


@pytest.mark.usefixtures("float64")
@pytest.mark.slow
def test_parties_of_several_processes_compute_the_same(tmp_path: Path) -> None:
    tables, data = recipe(optimizer={"kind": "sgd", "lr": 0.05, "momentum": 0.9}), DATA["binary"]
    with Federation(tmp_path, tables, data) as federation:
        federation.start_server()
        torchrun(federation, "p0").wait_for("ready")
        torchrun(federation, "p1")
        summary = federation.finish()
        (*_, want), _ = reference_fedcvt.train(tables, data)
        for name in federation.names:
            got = federation.parameters(name)
            assert max((got[key] - want[name][key]).abs().max().item() for key in got) <= TOLERANCE
    assert [party["device"] for party in summary["parties"]] == ["cpu", "3 x cpu", "2 x cpu"]


def test_a_killed_party_changes_nothing_bit_for_bit(tmp_path: Path) -> None:
    tables = recipe(optimizer={"kind": "adam", "lr": 0.01, "schedule": "cosine", "clip_norm": 1.0})
    tables["model"]["encoder"] = TANH | {"dropout": 0.2, "batch_norm": True}
    check_kill(tmp_path, tables, DATA["binary"], "p1")


@pytest.mark.parametrize(
    "settings", [{}, {"own_rows": "active"}], ids=["both", "the active party's own rows"]
)
def test_the_ledger_is_as_forecast(settings: dict[str, Any], tmp_path: Path) -> None:
    tables = recipe(validate_every=4, epochs=6, **settings)
    tables["phases"].append({"kind": "evaluate"})
    data = {"source": "sklearn:breast_cancer", "limit": 200, "label": "target"}
    made = Recipe.model_validate(tables | {"simulate": {"data": data}})
    said = forecast(outlook_of(made, tmp_path))
    summary = in_process(tmp_path / "run", tables, DATA["binary"])
    assert summary.bytes.agrees
    links = [link for link in compare_with_ledger(said, summary.bytes) if link.phase != "control"]
    assert {link.phase for link in links} >= {"fedcvt", "evaluate"}
    for link in links:
        assert link.forecast == link.counted, link


def test_split_training_goes_on_with_the_same_encoders(tmp_path: Path) -> None:
    """``splitnn`` afterwards takes both networks as one encoder, and the joint classifier as the
    top model.
    """
    tables = recipe()
    in_process(tmp_path / "first", tables, DATA["binary"])
    tables["phases"].append(
        {"kind": "splitnn", "epochs": 1, "optimizer": {"kind": "sgd", "lr": 1e-30}}
    )
    in_process(tmp_path / "both", tables, DATA["binary"])
    for name in ("p0", "p1"):
        got, want = (parameters(tmp_path / run, name) for run in ("both", "first"))
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)


def test_bfloat16_is_near_float32(tmp_path: Path) -> None:
    found = []
    for precision in ("float32", "bfloat16"):
        tables = recipe(epochs=1, optimizer={"kind": "sgd", "lr": 0.05})
        tables["model"]["precision"] = precision
        in_process(tmp_path / precision, tables, DATA["binary"])
        found.append({name: parameters(tmp_path / precision, name) for name in ("p0", "p1")})
    assert 0.0 < largest_deviation(found[0], found[1]) < 5e-3


def test_rows_of_another_file_are_a_party_s_own(tmp_path: Path) -> None:
    """``data.unaligned`` of the passive party takes part, and the active party has no rows of its
    own.
    """
    generator = torch.Generator().manual_seed(0)
    values = [
        ",".join(f"{v:.4f}" for v in row)
        for row in torch.randn(160, 4, generator=generator).tolist()
    ]
    rows = [f"r{n:03d},{each},{n % 2}" for n, each in enumerate(values)]
    (tmp_path / "all.csv").write_text("\n".join(["id,a,b,c,d,y", *rows[:120]]) + "\n")
    unlabelled = [row.rpartition(",")[0] for row in rows[120:]]
    (tmp_path / "more.csv").write_text("\n".join(["id,a,b,c,d", *unlabelled]) + "\n")
    every = {"source": str(tmp_path / "all.csv"), "id": "id"}
    data: dict[str, Any] = {
        "p0": every | {"label": "y", "columns": ["a", "b"]},
        "p1": every | {"columns": ["c", "d"], "unaligned": str(tmp_path / "more.csv")},
    }
    found = []
    # All rows of the other file in each step.
    for size in (0, 40):
        tables = recipe(own_rows="passive", own_batch_size=size)
        tables["rows"]["aligned"] = 1.0
        in_process(tmp_path / str(size), tables, data)
        found.append({name: parameters(tmp_path / str(size), name) for name in data})
    assert offered(tmp_path / "40")[1] == offered(tmp_path / "0")[1] + 6 * 3 * 40
    assert largest_deviation(found[0], found[1]) > 1e-3


def test_a_study_compares_it(tmp_path: Path) -> None:
    base = recipe() | {
        "simulate": {"data": {"source": "sklearn:breast_cancer", "limit": 200, "label": "target"}}
    }
    phases = [*base["phases"], {"kind": "evaluate"}]
    (tmp_path / "base.toml").write_text(toml(base))
    study = {
        "name": "small",
        "recipe": "base.toml",
        "seeds": [1],
        "labels": [20],
        "finetune": [{"kind": "splitnn", "epochs": 1, "batch_size": 16}, {"kind": "evaluate"}],
        "methods": [{"name": "FedSplitNN"}, {"name": "FedCVT", "finetune": phases}],
    }
    (tmp_path / "study.toml").write_text(toml(study))
    ended = vfl_here("study", tmp_path / "study.toml", "--out", "runs", "--json", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    events = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [event["method"] for event in events if event["event"] == "result"] == [
        "FedSplitNN",
        "FedCVT",
    ]
