"""The switches of self-supervised phases, each in a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.harness import cases
from tests.harness.errors import error_line
from tests.harness.federation import Federation
from tests.harness.memory import refused_here, run_here
from tests.integration.test_exact import largest_deviation
from tests.integration.test_fedhssl import TOP, check, recipe
from tests.integration.test_ssl_phases import MLP

SPLIT = {"kind": "splitnn", "epochs": 2, "batch_size": 32, "optimizer": {"kind": "sgd", "lr": 0.05}}


@pytest.mark.usefixtures("float64")
def test_several_epochs_a_round_are_those_of_algorithm_1(
    tmp_path: Path, record_property: Any
) -> None:
    tables = recipe(2, "byol", MLP, rounds=3, cross_epochs=2, local_epochs=2)
    check(tmp_path, tables, cases.digits(2, limit=220), TOP["mlp"], record_property)


@pytest.mark.parametrize("keep", ["mean", "concat", "cross", "local"])
def test_what_is_kept_is_what_fine_tuning_begins_with(keep: str, tmp_path: Path) -> None:
    tables = recipe(2, "simsiam", MLP, rounds=1, keep=keep)
    tables["phases"].append(SPLIT | {"epochs": 1, "optimizer": {"kind": "sgd", "lr": 1e-9}})
    tables["phases"].append({"kind": "evaluate"})
    summary, federation = run_here(tmp_path, tables, cases.digits(2, limit=220))
    names = {name for name in federation.parameters("p1") if name.startswith("encoder.")}
    two = {name for name in names if name.startswith(("encoder.cross.", "encoder.local."))}
    assert two == (names if keep in ("mean", "concat") else set())
    wide = {"mean": 8, "concat": 4, "cross": 8, "local": 8}[keep]
    assert {
        len(federation.parameters("p1")[name]) for name in names if name.endswith("3.bias")
    } == {wide}
    assert "accuracy" in summary["metrics"]["test"]


def test_one_tower_of_a_finished_run_is_begun_with(tmp_path: Path) -> None:
    pretraining = recipe(2, "simsiam", MLP, rounds=1)
    data = cases.digits(2, limit=220)
    with Federation(tmp_path, pretraining, data) as federation:
        federation.start_all()
        federation.finish()
        run_id = federation.run_folder.name
        towers = {name: federation.parameters(name) for name in federation.names}
    start = {"run": run_id, "phases": pretraining["phases"], "tower": "local"}
    tables = pretraining | {
        "start": start,
        "phases": [SPLIT | {"epochs": 1, "optimizer": {"kind": "sgd", "lr": 1e-30}}],
    }
    with Federation(tmp_path, tables, data) as federation:
        federation.start_all()
        assert [program.wait() for program in federation.programs.values()] == [0, 0, 0]
        (second,) = (
            path
            for path in (tmp_path / "runs").glob("[!.]*")
            if path.is_dir() and path.name != run_id
        )
        store = federation.store(second, "p1")
        encoder = store.load(store.labels()[-1])["job"]["models"]["encoder"]
    for name, tensor in encoder.items():
        assert torch.equal(tensor, towers["p1"][f"encoder.local.{name}"])


def test_presets_differ(tmp_path: Path) -> None:
    """Released: momentum 0.999, negatives of the batch, no guidance, a guide whose statistics
    drift, one view.
    """
    data, found = cases.columns("sklearn:breast_cancer", 2, limit=220), {}
    for preset in ("paper", "released"):
        tables = recipe(2, "moco", MLP, rounds=1) | {"preset": preset, "task": {"kind": "binary"}}
        for key in ("momentum", "gamma"):
            del tables["phases"][0][key]
        summary, federation = run_here(tmp_path / preset, tables, data)
        assert summary["preset"] == preset
        found[preset] = {"p1": federation.parameters("p1")}
    assert largest_deviation(found["paper"], found["released"]) > 1e-3


def test_simclr_and_categories(tmp_path: Path) -> None:
    """A table with categories: hidden ones have a code, and everything runs to the end."""
    rows = [
        f"r{n:03d},{n % 7},{'xyz'[n % 3]},{n * 31 % 17},{'uv'[n * n % 2]},{n % 2}"
        for n in range(220)
    ]
    tables = recipe(2, "simclr", {"kind": "tabular", "hidden": [16]}, rounds=2)
    tables["task"] = {"kind": "binary"}
    tables["phases"] += [SPLIT, {"kind": "evaluate"}]
    data = {
        "p0": {"source": "all.csv", "id": "id", "label": "y", "columns": ["a", "b"]},
        "p1": {"source": "all.csv", "id": "id", "columns": ["c", "d"]},
    }
    with Federation(tmp_path, tables, data) as federation:
        (tmp_path / "all.csv").write_text("\n".join(["id,a,b,c,d,y", *rows]) + "\n")
        federation.start_all()
        assert federation.finish()["metrics"]["test"]["accuracy"] > 0


def test_an_active_party_with_labels_only_takes_part_in_ssvfl(tmp_path: Path) -> None:
    tables = cases.recipe(3, active_features=False, task={"kind": "binary"}, model={"encoder": MLP})
    tables["phases"] = [
        {
            "kind": "contrastive",
            "ssl": "moco",
            "rounds": 3,
            "batch_size": 32,
            "projector": [16, 12],
            "queue": 64,
        },
        {"kind": "head", "steps": 20, "batch_size": 16},
        {"kind": "evaluate"},
    ]
    data = cases.columns("sklearn:breast_cancer", 2, limit=220, active_features=False)
    summary, _ = run_here(tmp_path, tables, data)
    assert summary["metrics"]["test"]["accuracy"] > 0.5


def test_rounds_of_several_epochs_change_nothing_but_when_is_validated(tmp_path: Path) -> None:
    data, found = cases.digits(2), []
    for every in (1, 2):
        tables = cases.recipe(2, phase={"epochs": 3, "validate_every": every})
        _, federation = run_here(tmp_path / str(every), tables, data)
        found.append({name: federation.parameters(name) for name in federation.names})
    assert largest_deviation(found[0], found[1]) == 0.0


@pytest.mark.parametrize("place", ["iso_embedding", "iso_weights", "iso"])
def test_each_noise_is_drawn_anew_in_every_run(place: str, tmp_path: Path) -> None:
    """The same seed twice: without noise the runs are equal, with it they are not, whichever of the
    three it is.
    """
    data, found = cases.digits(2, limit=220), []
    for turn in range(2):
        if place == "iso":
            tables = cases.recipe(2, phase={"epochs": 1, "iso": 0.5})
        else:
            tables = recipe(2, "simsiam", MLP, rounds=1, **{place: 0.5})
        _, federation = run_here(tmp_path / str(turn), tables, data)
        found.append({"p1": federation.parameters("p1")})
    assert largest_deviation(found[0], found[1]) > 1e-4


@pytest.mark.parametrize("aligned", [0.001, 0.01])
def test_no_aligned_rows_are_one_sentence_before_any_training(aligned: float) -> None:
    tables = recipe(2, "simsiam", MLP)
    tables["rows"]["aligned"] = aligned
    refused_here(tables, "p1", cases.digits(2, limit=220)["p1"])


def test_a_loss_that_is_no_number_ends_the_run_and_says_whose(tmp_path: Path) -> None:
    # Weights a million times larger, step by step.
    optimizer = {"kind": "sgd", "lr": 1e3, "weight_decay": 1e3}
    tables = recipe(2, "simclr", MLP, cross=False, aggregate=False, optimizer=optimizer, rounds=3)
    del tables["phases"][0]["gamma"]
    with Federation(tmp_path, tables, cases.digits(2, limit=220)) as federation:
        federation.start_all()
        # The server ends first, before the party has said why.
        for program in federation.programs.values():
            assert program.wait(60) != 0
        errors = [federation.programs[name].stderr for name in federation.names]
    # The other party may have heard of it before its own loss was NaN.
    error_line(next(each for each in errors if "phase fedhssl: " in each))
