"""On a GPU: the parameters of one process on the same GPU, and the same bits after a death.

The methods that learn without labels sum in another order than their references, and a GPU rounds
otherwise than a CPU does: what is compared is GPU with GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness import cases, reference, reference_fedhssl, reference_fedonce
from tests.harness.federation import Federation, Program
from tests.harness.memory import in_memory
from tests.integration import test_fedhssl, test_fedonce
from tests.integration.test_exact import largest_deviation
from tests.integration.test_fedhssl import encoders_only, towers_of, without_tops
from tests.integration.test_resume import (
    assert_equal,
    halfway,
    held,
    kill,
    parameters,
    wait_for_checkpoints,
)
from vfl_party.base.devices import plain_arithmetic

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

GPU = "cuda"
# Absolute, float32.
TOLERANCE = 1e-5
CNN: dict[str, Any] = {"kind": "cnn", "channels": [4, 6]}


@pytest.fixture(autouse=True)
def _in_full() -> Iterator[None]:
    """The references multiply in float32, as parties do."""
    back = plain_arithmetic()
    yield
    back()


class OnGpu(Federation):
    """A federation whose parties all compute on the GPU."""

    def start_party(self, name: str, *options: str) -> Program:
        return super().start_party(name, "--device", GPU, *options)


def on_gpu(folder: Path, tables: dict[str, Any], data: dict[str, Any]) -> Federation:
    """Runs processes to their end."""
    with OnGpu(folder, tables, data) as federation:
        federation.start_all()
        summary = federation.finish()
    assert {party["device"] for party in summary["parties"]} == {"cpu", "cuda:0"}
    assert all(
        party["peak_memory_bytes"] for party in summary["parties"] if party["device"] != "cpu"
    )
    assert summary["bytes"]["agrees"]
    return federation


def near(got: dict[str, dict[str, Tensor]], want: dict[str, Any], record: Any) -> None:
    on_cpu = {
        party: {name: tensor.cpu() for name, tensor in tensors.items()}
        for party, tensors in want.items()
    }
    worst = largest_deviation(got, on_cpu)
    record("largest_deviation", worst)
    print(f"largest deviation {worst:.3g}")
    assert worst <= TOLERANCE


# Normalised over 24 rows, one rounding grows to a thousandth in three epochs of Adam, on a CPU too.
SHORT = {"epochs": 1, "optimizer": {"kind": "sgd", "lr": 0.001}}


@pytest.mark.parametrize("encoder", ["mlp", "cnn", "resnet18"])
def test_split_training_gets_the_parameters_of_one_process(
    encoder: str, tmp_path: Path, record_property: Any
) -> None:
    model = {"encoder": {"kind": encoder}, "top": {"hidden": [16]}}
    tables = cases.recipe(2, model=model, phase=SHORT if encoder == "resnet18" else {})
    federation = on_gpu(tmp_path, tables, cases.digits(2))
    want = reference.train(tables, cases.digits(2), device=GPU)
    near(parameters(federation), want, record_property)


@pytest.mark.parametrize("ssl", ["simsiam", "byol", "moco"])
def test_fedhssl_gets_the_parameters_of_algorithm_1(
    ssl: str, tmp_path: Path, record_property: Any
) -> None:
    tables = test_fedhssl.recipe(2, ssl, CNN, augment={"flip": 0.5})
    data = cases.digits(2, limit=220)
    federation = on_gpu(tmp_path, tables, data)
    want = reference_fedhssl.pretrain(tables, data, test_fedhssl.TOP["cnn"], device=GPU)
    towers = {name: towers_of(federation.checkpoint(name, -2)) for name in federation.names}
    near(towers, want[-2], record_property)
    near(without_tops(parameters(federation)), encoders_only(want[-1]), record_property)


@pytest.mark.parametrize("task", list(test_fedonce.TASKS))
def test_fedonce_gets_the_parameters_of_the_paper(
    task: str, tmp_path: Path, record_property: Any
) -> None:
    tables, data = test_fedonce.recipe(2, task), test_fedonce.data(2, task)
    federation = on_gpu(tmp_path, tables, data)
    near(parameters(federation), reference_fedonce.train(tables, data, device=GPU), record_property)


def fedhssl() -> dict[str, Any]:
    return test_fedhssl.recipe(2, "moco", CNN, rounds=6)


def split(encoder: str) -> dict[str, Any]:
    phase = {"epochs": 6, "batch_size": 16, "optimizer": {"kind": "adam", "lr": 0.01}}
    table = {"kind": encoder} | ({"dropout": 0.2} if encoder == "mlp" else {})
    return cases.recipe(2, model={"encoder": table}, phase=phase)


# A process takes seconds to load cuDNN.
PATIENT = {"rejoin_deadline_s": 120.0}


RESUMED = {
    "mlp": lambda: split("mlp"),
    "cnn": lambda: split("cnn"),
    "resnet18": lambda: split("resnet18"),
    "fedhssl": fedhssl,
}


@pytest.mark.parametrize("case", list(RESUMED))
def test_a_killed_party_changes_nothing_bit_for_bit(case: str, tmp_path: Path) -> None:
    tables, data = RESUMED[case](), cases.digits(2, limit=220)
    tables["run"] |= PATIENT
    whole = on_gpu(tmp_path / "whole", tables, data)
    at = halfway(whole.run_folder, whole.names)
    with held(tmp_path / "killed", tables, data, OnGpu, sent=at) as (federation, proxy):
        wait_for_checkpoints(federation)
        kill(federation, proxy, "p1")
        assert federation.finish()["interruptions"] == 1
    assert_equal(parameters(federation), parameters(whole))


def test_one_process_computes_the_same_bits(tmp_path: Path) -> None:
    """With dropout, whose masks a GPU draws."""
    tables, data = split("mlp"), cases.digits(2, limit=220)
    whole = parameters(on_gpu(tmp_path / "processes", tables, data))
    tables["simulate"] = {"devices": dict.fromkeys(data, GPU)}
    assert_equal(in_memory(tmp_path / "here", tables, data), whole)


def test_new_rows_are_predicted(tmp_path: Path) -> None:
    rows = [f"u{row:03},{row % 7},{row % 2}\n" for row in range(60)]
    (tmp_path / "p0.csv").write_text("who,age,y\n" + "".join(rows))
    (tmp_path / "p1.csv").write_text("who,orders,shop\n" + "".join(rows))
    data = {
        "p0": {"source": str(tmp_path / "p0.csv"), "id": "who", "label": "y"},
        "p1": {"source": str(tmp_path / "p1.csv"), "id": "who"},
    }
    federation = on_gpu(tmp_path / "run", cases.recipe(2, task={"kind": "binary"}), data)
    run = f"runs/{federation.run_folder.name}"
    federation.programs.clear()
    federation.server_options = ("--predict",)
    with federation:
        federation.start_server()
        for name in federation.names:
            words = (federation.write_party(name).name, "--run", run, "--device", GPU)
            new = ("--data", str(tmp_path / f"{name}.csv"))
            federation.start(name, "vfl-party", "predict", *words, *new)
        for name, program in federation.programs.items():
            assert program.wait(60) == 0, f"{name}: {program.stderr}"
        assert federation.programs["p0"].wait_for("predicted")["written"] == 60
