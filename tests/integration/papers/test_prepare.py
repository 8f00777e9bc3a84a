"""What ``vfl prepare`` has written trains: one round, of small files in official formats."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vfl
from tests.harness.errors import raises
from tests.unit.papers import made
from vfl_common.errors import Code, InputError
from vfl_papers import images

Write = Callable[[Path], object]


def test_a_recipe_runs_as_it_is_written(tmp_path: Path) -> None:
    made.write_mnist(tmp_path)
    found = vfl.prepare("mnist", tmp_path, tmp_path / "out")
    short = vfl.Recipe.load(found.recipe).replace(
        {
            "phases.fedonce.epochs": 1,
            "phases.head.epochs": 1,
            "model.encoder": {"kind": "mlp", "hidden": [4]},
            "model.embedding_size": 4,
        }
    )
    run = vfl.simulate(short, quiet=True)
    assert set(run.metrics) == {"train", "test"}
    moved = vfl.simulate(short, data=found.parties, quiet=True)
    assert moved.metrics == run.metrics


# One round of each method, with a network that has few weights.
SMALL: dict[str, Any] = {
    "model.encoder": {"kind": "cnn", "channels": [4, 4]},
    "model.embedding_size": 4,
}
TRAINED: dict[str, tuple[Write, dict[str, Any], dict[str, Any]]] = {
    "cifar10": (
        lambda folder: made.write_files(folder / "cifar-10-batches-bin", made.cifar10_binary()),
        {"parties": 2, "rows": 40},
        {
            "phases.mocosfl.epochs": 1,
            "phases.mocosfl.width": 8,
            "phases.mocosfl.cut": 1,
            "phases.probe.epochs": 1,
            "phases.probe.least_steps": 1,
            "phases.probe.neighbours": 5,
        },
    ),
    "bhi": (made.write_bhi, {"size": 8}, {"phases.fedhssl.rounds": 1, "phases.splitnn.steps": 1}),
    "modelnet10": (
        lambda folder: made.write_modelnet(folder / "ModelNet10"),
        {"size": 8, "parties": 2},
        {"phases.contrastive.rounds": 1, "phases.head.epochs": 1},
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_recipe_trains_on_what_was_prepared(tmp_path: Path, name: str) -> None:
    write, given, short = TRAINED[name]
    write(tmp_path)
    found = vfl.prepare(name, tmp_path, tmp_path / "out", **given)
    assert any(note.endswith("there are fewer training rows.") for note in found.notes)
    run = vfl.simulate(vfl.Recipe.load(found.recipe).replace(SMALL | short), quiet=True)
    assert "test" in run.metrics


@pytest.mark.parametrize("case", ["mnist, Fashion-MNIST", "kmnist, Fashion-MNIST", "mnist, KMNIST"])
def test_sets_with_the_same_file_names_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    asked, there = case.split(", ")
    for folder in ("MNIST", "KMNIST"):
        (tmp_path / folder).mkdir()
        made.write_mnist(tmp_path / folder)
    # Without its labels at hand, KMNIST is known by its published files.
    labels = made.MNIST["test"][1].astype("uint8").tobytes()
    digest = hashlib.md5(labels, usedforsecurity=False).hexdigest()
    monkeypatch.setattr(images, "_TEST_LABELS", {digest: there} if there != "KMNIST" else {})
    published = images.DATASETS["kmnist"].forms[0].needs[3].md5
    monkeypatch.setattr(images, "compute_md5", lambda _path: published)
    with raises(InputError, Code.FILE_INVALID, names=f"holds the labels of {there}"):
        vfl.prepare(asked, tmp_path, tmp_path / "out")


def test_clients_keep_the_official_split_of_a_torchvision_set(tmp_path: Path) -> None:
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    made.write_mnist(raw, packed=False)
    prepared = vfl.prepare("mnist", tmp_path, tmp_path / "out", divide="rows", parties=2)
    recipe = vfl.Recipe.load(prepared.recipe).to_dict()
    data = {"source": "torchvision:MNIST", "label": "target", "split": "part", "scale": "minmax"}
    recipe["simulate"] = {"scheme": "rows", "data": data | {"download_dir": str(tmp_path)}}
    short = SMALL | TRAINED["cifar10"][2]
    run = vfl.simulate(vfl.Recipe.from_dict(recipe).replace(short), quiet=True)
    # Rows that the seed divides are for validation, too.
    assert {"test", "validation"} & set(run.metrics) == {"test"}
