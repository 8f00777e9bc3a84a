"""Images that stay bytes in mapped files, through whole runs: the same to the bit as float32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

import vfl
from tests.harness import cases
from tests.harness.federation import Federation
from tests.harness.memory import in_process, parameters
from vfl_party.data.pixels import to_unit

CNN = {"embedding_size": 8, "encoder": {"kind": "cnn", "channels": [4, 8]}}
MLP = {"embedding_size": 8, "encoder": {"kind": "mlp", "hidden": [8]}}
LOCAL = {"kind": "contrastive", "ssl": "simclr", "rounds": 2, "batch_size": 24}
HEAD = {"kind": "head", "epochs": 1, "batch_size": 24}
CROSS = {"kind": "fedhssl", "ssl": "simsiam", "rounds": 1, "batch_size": 24}


def made(model: dict[str, Any], *phases: dict[str, Any], **more: Any) -> dict[str, Any]:
    tables = cases.recipe(2, model=model, phase={"epochs": 2} | more)
    return tables | {"phases": [*(phases or tables["phases"]), {"kind": "evaluate"}]}


CASES: dict[str, dict[str, Any]] = {
    "split training": made(CNN),
    "views of split training": made(CNN, augment={"flip": 0.5}),
    "local steps": made(CNN, LOCAL, HEAD),
    "rows of pixels": made(MLP, LOCAL, HEAD),
    "steps across parties": made(CNN, CROSS, {"kind": "splitnn", "epochs": 1, "batch_size": 24}),
    "MocoSFL": cases.own_rows_recipe(2, epochs=2, then=(cases.PROBE,)),
}


def images(folder: Path, *, whole: bool) -> str:
    """Writes digits as bytes, or as the float32 numbers that these stand for; returns the file."""
    found = load_digits()
    pixels = (found.images[:120] * 15).astype(np.uint8)
    path = folder / f"{'bytes' if whole else 'floats'}.npz"
    np.savez(path, x=pixels if whole else to_unit(pixels), y=found.target[:120])
    return str(path)


def data_of(case: str, source: str, **more: Any) -> dict[str, dict[str, Any]]:
    names = [party["name"] for party in CASES[case]["parties"]]
    if case == "MocoSFL":
        digits = cases.own_rows(2)
        found = {
            name: {"source": source, "scale": "minmax", "view": digits[name]["view"], "label": "y"}
            for name in names[1:]
        }
        return {
            name: each | more
            for name, each in {
                "p0": {"source": source, "label": "y", "columns": []},
                **found,
            }.items()
        }
    return {
        name: {
            "source": source,
            "label": "y",
            "view": {"scheme": "halves", "part": part, "parts": 2},
            **more,
        }
        for part, name in enumerate(names)
    }


@pytest.mark.parametrize("case", list(CASES))
def test_bytes_in_a_file_train_as_their_float32_in_memory(case: str, tmp_path: Path) -> None:
    scratch = {"memory_mib": 0, "scratch": str(tmp_path)}
    ways = {
        "bytes": data_of(case, images(tmp_path, whole=True), **scratch),
        "floats": data_of(case, images(tmp_path, whole=False)),
    }
    found = {}
    for way, data in ways.items():
        summary = in_process(tmp_path / way, CASES[case], data)
        found[way] = summary.metrics, {name: parameters(tmp_path / way / name) for name in data}
    assert found["bytes"][0] == found["floats"][0]
    for name, wanted in found["floats"][1].items():
        got = found["bytes"][1][name]
        assert got.keys() == wanted.keys()
        assert all(torch.equal(got[key], wanted[key]) for key in wanted), name
    # Nothing is left of what lay in files.
    assert not list(tmp_path.glob("vfl-*"))


def test_processes_train_as_one_process(tmp_path: Path) -> None:
    case = "split training"
    data = data_of(case, images(tmp_path, whole=True), memory_mib=0, scratch=str(tmp_path))
    in_process(tmp_path / "ours", CASES[case], data)
    (tmp_path / "theirs").mkdir()
    with Federation(tmp_path / "theirs", CASES[case], data) as federation:
        federation.start_all()
        federation.finish()
        for name in data:
            got, want = federation.parameters(name), parameters(tmp_path / "ours" / name)
            assert got.keys() == want.keys()
            assert all(torch.equal(got[key], want[key]) for key in want), name


def test_a_trained_encoder_takes_bytes_and_their_float32(tmp_path: Path) -> None:
    case = "split training"
    data = data_of(case, images(tmp_path, whole=True), resize=[6, 5])
    tables = CASES[case] | {"simulate": {"parties": data}}
    run = vfl.simulate(tables, out=tmp_path / "runs", quiet=True)
    with np.load(data["p0"]["source"]) as found:
        # The whole image is brought to its size, and then halved.
        small = found["x"][:, None, :6, :3]
    model = run.model("p0")
    assert torch.equal(model.embed(small), model.embed(to_unit(small)))
