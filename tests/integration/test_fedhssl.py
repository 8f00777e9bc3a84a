"""FedHSSL between processes gives the parameters of Algorithm 1 in one process, to 1e-12 in
float64.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.harness import cases, reference_fedhssl
from tests.harness.federation import Federation
from tests.harness.memory import run_here
from tests.integration.test_exact import TOLERANCE, largest_deviation

# Layers; see vfl_party.models.
TOP = {"mlp": ("3",), "cnn": ("4", "5", "6", "7", "8", "9")}


def recipe(parties: int, ssl: str, encoder: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Four rounds of FedHSSL; every value that the reference uses is named."""
    tables = cases.recipe(parties, model={"encoder": encoder}, rows={"aligned": 0.5})
    phase = {
        "kind": "fedhssl",
        "ssl": ssl,
        "rounds": 4,
        "batch_size": 32,
        "projector": [16, 16, 12],
        "predictor": 8,
        "temperature": 0.5,
        "queue": 64,
        "momentum": 0.9,
        "gamma": 0.5,
        "local_updates": 1,
    }
    return tables | {"phases": [phase | settings]}


def federated(
    folder: Path, tables: dict[str, Any], data: dict[str, Any]
) -> tuple[Any, Any, Federation]:
    """Towers after the last round but one, encoders after the last."""
    with Federation(folder, tables, data) as federation:
        federation.start_all()
        summary = federation.finish()
        assert summary["interruptions"] == 0
        towers = {name: towers_of(federation.checkpoint(name, -2)) for name in federation.names}
        encoders = {name: federation.parameters(name) for name in federation.names}
        return towers, encoders, federation


def towers_of(tree: Any) -> dict[str, Tensor]:
    found = {}
    for label in ("cross", "local"):
        for name, tensor in tree["phase"][label]["trained"]["tower"].items():
            found[f"{label}.{name}"] = tensor
    return found


def encoders_only(snapshot: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    """As the job's checkpoint names them."""
    found: dict[str, dict[str, Tensor]] = {}
    for party, tensors in snapshot.items():
        found[party] = {}
        for key, tensor in tensors.items():
            label, _, name = key.partition(".")
            if name.startswith("encoder."):
                found[party][f"encoder.{label}.{name.removeprefix('encoder.')}"] = tensor
    return found


def without_tops(parameters: dict[str, dict[str, Tensor]]) -> dict[str, dict[str, Tensor]]:
    return {
        party: {name: tensor for name, tensor in tensors.items() if not name.startswith("top.")}
        for party, tensors in parameters.items()
    }


def check(
    folder: Path, tables: dict[str, Any], data: dict[str, Any], top: tuple[str, ...], record: Any
) -> Federation:
    towers, encoders, federation = federated(folder, tables, data)
    want = reference_fedhssl.pretrain(tables, data, top)
    worst = max(
        largest_deviation(towers, want[-2]),
        largest_deviation(without_tops(encoders), encoders_only(want[-1])),
    )
    record("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}")
    moved = largest_deviation(want[-1], want[-2])
    assert moved > 1e-3, "the rounds change something"
    assert worst <= TOLERANCE
    return federation


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("parties", [2, 4])
@pytest.mark.parametrize("ssl", ["simsiam", "byol", "moco"])
def test_parties_get_the_parameters_of_algorithm_1(
    ssl: str, parties: int, tmp_path: Path, record_property: Any
) -> None:
    encoder = {"kind": "cnn", "channels": [4, 6]}
    tables = recipe(parties, ssl, encoder, augment={"flip": 0.5})
    check(tmp_path, tables, cases.digits(parties, limit=220), TOP["cnn"], record_property)


@pytest.mark.usefixtures("float64")
def test_several_updates_on_what_was_received_once(tmp_path: Path, record_property: Any) -> None:
    encoder = {"kind": "mlp", "hidden": [24]}
    tables = recipe(3, "moco", encoder, local_updates=4)
    data = cases.columns("sklearn:breast_cancer", 3, limit=220)
    tables["task"] = {"kind": "binary"}
    check(tmp_path, tables, data, TOP["mlp"], record_property)


@pytest.mark.usefixtures("float64")
def test_the_released_code_clips_and_keeps_the_predictors_rate(
    tmp_path: Path, record_property: Any
) -> None:
    """Preset released: also numbers from ranges, in exactly three of ten columns, of one view."""
    tables = recipe(2, "simsiam", {"kind": "mlp", "hidden": [24]}, gamma=0.0, batch_size=100)
    tables |= {"task": {"kind": "binary"}, "preset": "released"}
    data = cases.columns("sklearn:breast_cancer", 2, limit=330)
    check(tmp_path, tables, data, TOP["mlp"], record_property)
    # What is written replaces what the preset says.
    written = {"anneal_predictor": True, "augment": {"corrupt": "both", "replacement": "rows"}}
    tables["phases"][0] |= written
    _, federation = run_here(tmp_path / "written", tables, data)
    found = {name: federation.parameters(name) for name in federation.names}
    want = reference_fedhssl.pretrain(tables, data, TOP["mlp"])[-1]
    assert largest_deviation(without_tops(found), encoders_only(want)) <= TOLERANCE


@pytest.mark.usefixtures("float64")
def test_the_local_step_may_have_the_aligned_rows_alone(
    tmp_path: Path, record_property: Any
) -> None:
    tables = recipe(2, "moco", {"kind": "mlp", "hidden": [24]}, local_rows="aligned", queue=40)
    tables |= {"task": {"kind": "binary"}}
    data = cases.columns("sklearn:breast_cancer", 2, limit=220)
    check(tmp_path, tables, data, TOP["mlp"], record_property)


@pytest.mark.usefixtures("float64")
@pytest.mark.parametrize("ssl", ["byol", "moco"])
def test_without_a_projector_embeddings_are_compared(
    ssl: str, tmp_path: Path, record_property: Any
) -> None:
    tables = recipe(2, ssl, {"kind": "mlp", "hidden": [24]}, projector=[])
    federation = check(tmp_path, tables, cases.digits(2, limit=220), TOP["mlp"], record_property)
    (sent,) = [
        each
        for each in federation.ledger("p1")
        if (each.kind, each.direction) == ("embedding", "sent")
    ]
    # Width 8, 8 bytes a number, 2 batches of 32 aligned rows in each of 4 rounds.
    assert sent.payload_bytes == 8 * 8 * 32 * 2 * 4


def test_no_gradient_crosses_in_pretraining(tmp_path: Path) -> None:
    tables = recipe(2, "byol", {"kind": "mlp", "hidden": [24]})
    tables["phases"].append({"kind": "splitnn", "epochs": 1, "batch_size": 24})
    data = cases.digits(2, limit=220)
    with Federation(tmp_path, tables, data) as federation:
        federation.start_all()
        federation.finish()
        kinds = {
            phase: {
                entry.kind
                for name in federation.names
                for entry in federation.ledger(name)
                if entry.phase == phase
            }
            for phase in ("fedhssl", "splitnn")
        }
    assert kinds["fedhssl"] == {"embedding", "weights"}
    assert "gradient" in kinds["splitnn"]
