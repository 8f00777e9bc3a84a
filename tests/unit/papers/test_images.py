"""Image data sets: from small files in their exact official formats to parties that train."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

import vfl
from tests.harness.errors import raises
from tests.unit.papers import made
from tests.unit.papers.made import CIFAR
from vfl_common.errors import Code, InputError

Write = Callable[[Path], object]
PIXELS = np.concatenate([CIFAR["train"][0], CIFAR["test"][0]])
LABELS = np.concatenate([CIFAR["train"][1], CIFAR["test"][1]])


def arrays(prepared: vfl.PreparedData, party: str) -> dict[str, Any]:
    with np.load(prepared.parties[party]) as file:
        return dict(file)


def files(name: str, inside: str, made_: Callable[[], Mapping[str, bytes]]) -> Write:
    """Writes an archive, or a folder if the name has no ending."""

    def write(folder: Path) -> object:
        if name.endswith(".gz"):
            return made.write_tar(folder / name, inside, made_())
        return made.write_files(folder / name, made_())

    return write


FORMS: dict[str, tuple[str, Write]] = {
    "python": ("cifar10", files("cifar-10-batches-py", "", made.cifar10_python)),
    "python, packed": (
        "cifar10",
        files("cifar-10-python.tar.gz", "cifar-10-batches-py", made.cifar10_python),
    ),
    "binary": ("cifar10", files("cifar-10-batches-bin", "", made.cifar10_binary)),
    "binary, packed": (
        "cifar10",
        files("cifar-10-binary.tar.gz", "cifar-10-batches-bin", made.cifar10_binary),
    ),
    "python of 100": ("cifar100", files("cifar-100-python", "", made.cifar100_python)),
    "binary of 100": ("cifar100", files("cifar-100-binary", "", made.cifar100_binary)),
    "mat": ("svhn", made.write_svhn),
}


@pytest.mark.parametrize("form", FORMS)
def test_small_colour_images_are_read_from_every_form(tmp_path: Path, form: str) -> None:
    name, write = FORMS[form]
    write(tmp_path)
    found = vfl.prepare(name, tmp_path, tmp_path / "out", divide="halves", parties=2)
    left, right = arrays(found, "party-1"), arrays(found, "party-2")
    assert (np.concatenate([left["image"], right["image"]], 2) == PIXELS).all()
    assert (left["label"] == LABELS).all()
    assert (left["split"] == np.repeat([b"train", b"test"], [50, 20])).all()


@pytest.mark.parametrize("name", ["kmnist", "fashion-mnist", "mnist"])
def test_sets_like_mnist_are_told_apart_by_their_folders(tmp_path: Path, name: str) -> None:
    for folder in ("KMNIST", "FashionMNIST", "MNIST"):
        (tmp_path / folder / "raw").mkdir(parents=True)
        made.write_mnist(tmp_path / folder / "raw", packed=folder != "KMNIST")
    found = vfl.prepare(name, tmp_path, tmp_path / "out", rows=20)
    assert "Written by `vfl prepare`" in found.recipe.read_text()
    assert len(arrays(found, "party-4")["id"]) == 20


def test_files_in_two_folders_are_refused(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        made.write_mnist(tmp_path / folder)
    with raises(InputError, Code.FILE_INVALID, names="ubyte.gz"):
        vfl.prepare("mnist", tmp_path, tmp_path / "out")


def large(path: Path) -> None:
    """Makes a file of 2 GB that takes no room on the disk."""
    path.parent.mkdir()
    path.touch()
    os.truncate(path, 2 * 10**9)


class _Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("run",))


@pytest.mark.parametrize(
    "batch",
    [pickle.dumps({b"data": _Evil(), b"labels": [1]}, 2), b"text", b"\x80\x02}."],
    ids=["a call", "no pickle", "no data"],
)
def test_a_pickle_that_is_no_batch_is_refused_and_calls_nothing(
    tmp_path: Path, batch: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    files_ = made.cifar10_python() | {"data_batch_3": batch}
    made.write_files(tmp_path / "cifar-10-batches-py", files_)
    with raises(InputError, Code.FILE_INVALID, names="data_batch_3"):
        vfl.prepare("cifar10", tmp_path, tmp_path / "out")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "labels", [[1.5] * 10, ["1"] * 10, [[1]] * 10, [-1] * 10, [200] * 10], ids=repr
)
def test_labels_that_are_no_classes_are_refused(tmp_path: Path, labels: list[Any]) -> None:
    batch = {b"data": np.zeros((10, 3072), np.uint8), b"labels": labels}
    files_ = made.cifar10_python() | {"data_batch_3": pickle.dumps(batch, 4)}
    made.write_files(tmp_path / "cifar-10-batches-py", files_)
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare("cifar10", tmp_path, tmp_path / "out")


def test_lists_in_lists_are_no_labels(tmp_path: Path) -> None:
    """Ten billion numbers, of which the pickle says ten."""
    labels: list[Any] = [1] * 10
    for _ in range(9):
        labels = [labels] * 10
    batch = {b"data": np.zeros((10, 3072), np.uint8), b"labels": labels}
    files_ = made.cifar10_python() | {"data_batch_3": pickle.dumps(batch, 4)}
    made.write_files(tmp_path / "cifar-10-batches-py", files_)
    with raises(InputError, Code.FILE_INVALID, names="data_batch_3"):
        vfl.prepare("cifar10", tmp_path, tmp_path / "out")


@pytest.mark.parametrize("pixels", [np.zeros((1, 4000), np.uint8), np.zeros((36, 36), np.uint16)])
def test_pictures_that_would_lose_or_become_too_much_are_refused(
    tmp_path: Path, pixels: np.ndarray[Any, Any]
) -> None:
    """Scaled by its shorter side, the first would have 896,000 × 224 pixels."""
    made.write_imagenet(tmp_path, 12)
    path = tmp_path / "train/n00000003/n00000003_1.png"
    made.write_picture(path, pixels)
    with raises(InputError, Code.FILE_INVALID, names="n00000003_1.png") as caught:
        vfl.prepare("imagenet12", tmp_path, tmp_path / "out")
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("wrong", [{"jpeg": "x.jpeg"}, {"label": None}, {"part": "other"}], ids=str)
def test_rows_of_jpegs_that_lack_something_are_refused(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    row = {"id": 1, "jpeg": b"x", "label": 1, "part": "train"} | wrong
    pq.write_table(pa.Table.from_pylist([row]), tmp_path / "cifar10.parquet")
    with raises(InputError, Code.FILE_INVALID, names="cifar10.parquet"):
        vfl.prepare("cifar10", tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("cifar10", files("cifar-10-batches-bin", "", lambda: {"data_batch_1.bin": b"12"})),
        ("cifar10", files("cifar-10-binary.tar.gz", "x", lambda: {"data_batch_1.bin": b""})),
        ("cifar10", files("cifar-10-python.tar.gz", "x", lambda: {"readme": b""})),
        ("cifar10", lambda folder: (folder / "cifar-10-python.tar.gz").write_bytes(b"text")),
        ("cifar10", lambda folder: (folder / "cifar10.parquet").write_bytes(b"text")),
        ("mnist", lambda folder: (folder / "mnist10k.npz").write_bytes(b"text")),
        ("mnist", lambda folder: np.savez(folder / "mnist10k.npz", images=[1], labels=[1])),
        (
            "svhn",
            lambda folder: [(folder / f"{each}_32x32.mat").write_bytes(b"x") for each in ("train", "test")],
        ),
        ("svhn", lambda folder: made.write_svhn(folder, side=30)),
        ("cifar10", lambda folder: large(folder / "cifar-10-batches-bin" / "data_batch_1.bin")),
        ("bhi", lambda folder: (folder / "IDC_regular_ps50_idx5").mkdir()),
        ("modelnet10", lambda folder: made.write_picture(folder / "ModelNet10/c/train/c.png", PIXELS[0])),
        ("imagenet12", lambda folder: made.write_imagenet(folder, 3)),
    ],
    ids=[
        "binary", "empty binary", "archive", "no archive", "no table", "no npz", "no images", "mat", "size", "large",
        "bhi", "modelnet", "imagenet",
    ],
)  # fmt: skip
def test_what_is_no_such_file_is_refused(tmp_path: Path, name: str, write: Write) -> None:
    write(tmp_path)
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare(name, tmp_path, tmp_path / "out")


def test_forms_that_are_not_official_are_named(tmp_path: Path) -> None:
    pixels, labels = CIFAR["train"]
    np.savez(tmp_path / "mnist10k.npz", images=pixels[..., 0], labels=labels.astype(np.uint8))
    for k, own in enumerate(pixels):
        made.write_picture(tmp_path / f"{k}.jpeg", own)
    jpegs = [(tmp_path / f"{k}.jpeg").read_bytes() for k in range(50)]
    parts = ["train"] * 40 + ["test"] * 10
    table = {"id": range(50), "jpeg": jpegs, "label": labels, "part": parts}
    pq.write_table(
        pa.table({key: list(each) for key, each in table.items()}), tmp_path / "cifar10.parquet"
    )
    for name in ("mnist", "cifar10"):
        found = vfl.prepare(name, tmp_path, tmp_path / name, divide="quadrants")
        assert not found.official
        assert found.notes[0].startswith("These are not the official files")
    with Image.open(tmp_path / "7.jpeg") as image:
        assert (arrays(found, "party-1")["image"][7] == np.asarray(image)[:16, :16]).all()


def test_bhi_pairs_images_of_a_patient_with_the_same_label(tmp_path: Path) -> None:
    made.write_bhi(tmp_path)
    found = vfl.prepare("bhi", tmp_path, tmp_path / "out", size=10)
    first, second = arrays(found, "party-1"), arrays(found, "party-2")
    assert first["image"].shape == second["image"].shape == (20, 10, 10, 3)
    assert (first["image"] != second["image"]).any((1, 2, 3)).all()
    patients = np.array([each.split(b"-")[0] for each in first["id"]])
    labels = np.array([int(each.split(b"-")[1]) for each in first["id"]])
    assert (labels == first["label"]).all()
    testing = set(patients[first["split"] == b"test"])
    assert len(testing) == 1
    assert not testing & set(patients[first["split"] == b"train"])
    assert "The folder has 45 images (published: 277,524)." in found.notes
    assert (
        "5 images had no partner of the same patient and label, and were left out." in found.notes
    )
    assert any(each.endswith("scaled to 10 × 10.") for each in found.notes)


@pytest.mark.parametrize(("name", "parties"), [("modelnet10", 12), ("modelnet40", 4)])
def test_each_party_has_a_view_of_its_own_run(tmp_path: Path, name: str, parties: int) -> None:
    root = {"modelnet10": "ModelNet10", "modelnet40": "modelnet40_images_new_12x"}[name]
    made.write_modelnet(tmp_path / root)
    found = vfl.prepare(name, tmp_path, tmp_path / "out", size=8, samples=3)
    assert len(found.parties) == parties
    samples = 1 if parties == 12 else 3
    run = 12 // parties
    seen = []
    for number, party in enumerate(found.parties):
        own = arrays(found, party)
        assert own["image"].shape == (30 * samples, 8, 8, 3)
        views = own["image"][:, 0, 0, 0] // 20
        assert set(views.tolist()) <= set(range(run * number + 1, run * number + run + 1))
        seen.append(views)
    assert len(set(zip(own["id"].tolist(), *seen, strict=True))) == 30 * samples
    assert (arrays(found, "party-1")["split"] == b"test").sum() == 10 * samples


@pytest.mark.parametrize("listed", [False, True], ids=["folders", "list"])
def test_imagenet_draws_classes_and_brings_images_to_one_size(tmp_path: Path, listed: bool) -> None:
    made.write_imagenet(tmp_path, 14)
    if listed:
        lines = ["ImageId,PredictionString"]
        for folder in sorted((tmp_path / "val").iterdir()):
            for path in folder.iterdir():
                path.rename(tmp_path / "val" / path.name)
                lines.append(f"{path.stem},{folder.name} 1 2 3 4")
            folder.rmdir()
        (tmp_path / "LOC_val_solution.csv").write_text("\n".join(lines))
    found = vfl.prepare("imagenet12", tmp_path, tmp_path / "out", size=16, parties=3, deal="even")
    clients = [arrays(found, f"client-{k}") for k in (1, 2, 3)]
    assert {each["image"].shape for each in clients} == {(12, 16, 16, 3)}
    classes = {each.split(b"/")[1] for own in clients for each in own["id"]}
    assert len(classes) == 12
    named = ",".join(f"n{c:08d}" for c in range(2, 14))
    again = vfl.prepare(
        "imagenet12", tmp_path, tmp_path / "named", size=16, classes=named, divide="halves"
    )
    assert arrays(again, "party-1")["image"].shape == (36, 16, 8, 3)


@pytest.mark.parametrize("classes", ["n00000099", "n00000001"])
def test_classes_that_cannot_be_taken_are_refused(tmp_path: Path, classes: str) -> None:
    made.write_imagenet(tmp_path, 12)
    with raises(InputError, Code.CONFIG_INVALID):
        vfl.prepare("imagenet12", tmp_path, tmp_path / "out", classes=classes)


@pytest.mark.parametrize("fault", ["name", "views"])
def test_views_that_are_missing_are_refused(tmp_path: Path, fault: str) -> None:
    folder = made.write_modelnet(tmp_path / "ModelNet10") / "class3" / "train"
    path = folder / "class3_0001_007.png"
    path.rename(folder / "chair.png") if fault == "name" else path.unlink()
    with raises(InputError, Code.FILE_INVALID):
        vfl.prepare("modelnet10", tmp_path, tmp_path / "out")


def test_a_picture_that_cannot_be_read_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    root = made.write_bhi(tmp_path)
    next((root / "8864" / "1").iterdir()).write_bytes(b"text")
    with raises(InputError, Code.FILE_INVALID, names="8864_idx5_x101_y1001_class1"):
        vfl.prepare("bhi", tmp_path, tmp_path / "out")
    assert [each.name for each in tmp_path.iterdir()] == ["IDC_regular_ps50_idx5"]
