"""libsvm and svmlight files, IDX files, MAT files."""

from __future__ import annotations

import bz2
import gzip
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import scipy.io
import scipy.sparse
from sklearn.datasets import dump_svmlight_file

from tests.harness.present import present
from tests.unit.party.data.test_data_packed import written
from tests.unit.party.data.test_data_sources import load, numbers, pixels, refused
from vfl_common.errors import Code
from vfl_party.data.row_arrays import MappedArray, Space
from vfl_party.data.sources import text as svmlight
from vfl_party.data.sources.arrays import read_array

# --- libsvm

LINES = "+1 1:0.5 3:2 # a remark\n-1 2:-1e-3\n\n+1 \n"


def test_libsvm(tmp_path: Path) -> None:
    source = written(tmp_path / "x.libsvm", LINES)
    table = load(source, id="row", label="label", with_label=True)
    assert table.numeric_names == ("f1", "f2", "f3")
    np.testing.assert_allclose(numbers(table), np.array([[0.5, 0, 2], [0, -0.001, 0], [0, 0, 0]]))
    assert present(table.labels).tolist() == [1, -1, 1]
    passive = load(source, id="row", label="label", columns=["f3", "f1"])
    np.testing.assert_allclose(numbers(passive), np.array([[2, 0.5], [0, 0], [0, 0]]))


def test_libsvm_has_as_many_columns_as_names_say(tmp_path: Path) -> None:
    source = written(tmp_path / "phishing", LINES)
    table = load(source, format="libsvm", id="row", label="label", names=5)
    assert table.numeric_names == ("f1", "f2", "f3", "f4", "f5")
    assert not present(table.numeric_NF)[:, 3:].any()
    named = load(source, format="libsvm", id="row", label="label", names=["a", "b", "c"])
    assert named.numeric_names == ("a", "b", "c")
    zero = written(tmp_path / "x.svm", "1 0:3 1:4\n")
    assert load(zero, id="row", label="label").numeric_names == ("f0", "f1")
    refused(source, format="libsvm", id="row", label="label", names=2)
    refused(zero, id="row", label="label", names=2)


@pytest.mark.parametrize("pack", ["", ".gz", ".bz2", ".zip"])
def test_packed_libsvm_in_many_blocks_equals_its_matrix(
    tmp_path: Path, pack: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(3)
    matrix = scipy.sparse.random(200, 30, 0.2, rng=random, format="csr")
    labels = random.integers(0, 3, 200)
    path = tmp_path / "x.svm"
    dump_svmlight_file(matrix, labels, str(path), zero_based=False)
    data = path.read_bytes()
    source = {
        "": lambda: str(path),
        ".gz": lambda: written(tmp_path / "x.svm.gz", gzip.compress(data)),
        ".bz2": lambda: written(tmp_path / "x.svm.bz2", bz2.compress(data)),
        ".zip": lambda: member(tmp_path / "x.zip", "x.svm", data),
    }[pack]()
    monkeypatch.setattr(svmlight, "_READ", 1000)
    monkeypatch.setattr(svmlight, "_MAX_CELLS", 100)
    table = load(source, id="row", label="label", with_label=True, names=30)
    np.testing.assert_array_equal(table.numeric_NF, matrix.toarray().astype(np.float32))
    np.testing.assert_array_equal(present(table.labels), labels)


def member(path: Path, name: str, data: bytes) -> str:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, data)
    return f"{path}/{name}"


@pytest.mark.parametrize(
    "text",
    [
        "1 1:2\nyes 1:2\n",
        "1 1:2\n1 2:1 1:2\n",
        "1 1:2\n1 1:x\n",
        "1 1:2\n1 -1:3\n",
        "a,b\n1,2\n",
        "1 1:2\nnan 1:1\n",
        "1,2 1:3\n",
    ],
)
def test_wrong_lines_of_libsvm(tmp_path: Path, text: str) -> None:
    refused(written(tmp_path / "x.svm", text), Code.FILE_INVALID, id="row", label="label")


def test_a_query_of_libsvm_is_refused_and_no_remark_is_one(tmp_path: Path) -> None:
    refused(written(tmp_path / "q.svm", "1 qid:1 1:2\n"), id="row", label="label")
    remark = written(tmp_path / "x.svm", "1 1:2 # qid:3\n0 1:1\n")
    assert len(load(remark, id="row", label="label")) == 2


def test_hostile_libsvm(tmp_path: Path) -> None:
    more: dict[str, Any] = {"id": "row", "label": "label"}
    refused(written(tmp_path / "wide.svm", "1 99999999:1\n"), **more)
    refused(written(tmp_path / "beyond.svm", f"1 {1 << 40}:1\n"), Code.FILE_INVALID, **more)
    refused(written(tmp_path / "queries.svm", "1 qid:3 1:1\n"), **more)
    data = bz2.compress(LINES.encode() * 9_000)
    refused(written(tmp_path / "cut.svm.bz2", data[:-20]), Code.FILE_INVALID, **more)
    long = written(tmp_path / "long.svm.gz", gzip.compress(b"1" * (1 << 25)))
    refused(long, Code.FILE_INVALID, **more)
    refused(written(tmp_path / "empty.svm", ""), **more)


# --- IDX


def idx(array: npt.NDArray[Any], kind: int) -> bytes:
    head = struct.pack(f">BBBB{array.ndim}I", 0, 0, kind, array.ndim, *array.shape)
    return head + array.tobytes()


def test_idx_images_with_their_labels(tmp_path: Path) -> None:
    images = np.arange(3 * 4 * 5, dtype=np.uint8).reshape(3, 4, 5)
    labels = np.array([7, 0, 7], np.uint8)
    source = written(tmp_path / "train-images-idx3-ubyte.gz", gzip.compress(idx(images, 8)))
    assert load(source).labels is None
    refused(source, label="labels", with_label=True)
    written(tmp_path / "train-labels-idx1-ubyte.gz", gzip.compress(idx(labels, 8)))
    table = load(source, label="labels", with_label=True)
    np.testing.assert_allclose(pixels(table), images[:, None] / np.float32(255))
    assert present(table.labels).tolist() == [7, 0, 7]
    assert load(source, label="labels").labels is None


def test_idx_of_other_types(tmp_path: Path) -> None:
    values = np.array([[1.5, 2], [3, -4]], ">f4")
    table = load(written(tmp_path / "x.idx", idx(values, 13)), id="row")
    assert table.numeric_names == ("values.0", "values.1")
    np.testing.assert_array_equal(table.numeric_NF, values)


def test_hostile_idx(tmp_path: Path) -> None:
    whole = idx(np.zeros((3, 4, 5), np.uint8), 8)
    for name, data in {
        "cut": whole[:-1],
        "longer": whole + b"\0",
        "head": whole[:6],
        "magic": b"\x01" + whole[1:],
        "type": whole[:2] + b"\x07" + whole[3:],
        # 4 billion images of 4 billion pixels a side.
        "huge": b"\0\0\x08\x03" + b"\xff" * 12 + bytes(60),
        "many": b"\0\0\x08\x02\xff\xff\xff\xff\0\0\0\2" + bytes(60),
        # NumPy has 64 dimensions at most, and so many values in none of them.
        "dimensions": b"\0\0\x08\x64" + b"\0\0\0\1" * 100 + b"\0",
        "empty": b"\0\0\x08\x04" + b"\xff" * 12 + bytes(4),
        "no pixels": b"\0\0\x08\x03\0\0\0\3" + bytes(8),
    }.items():
        refused(written(tmp_path / f"{name}.idx", data), Code.FILE_INVALID)
    refused(written(tmp_path / "x.idx.gz", gzip.compress(whole)[:-9]), Code.FILE_INVALID)


def test_large_idx_files_lie_in_a_file(tmp_path: Path) -> None:
    """Also one that is packed: its bytes in memory are few, whatever they become."""
    images = np.random.default_rng(0).integers(0, 255, (300, 100, 100)).astype(np.uint8)
    source = written(tmp_path / "x.idx.gz", gzip.compress(idx(images, 8), 1))
    assert isinstance(read_array(source, Space(str(tmp_path), 1 << 20)), MappedArray)
    table = load(source, memory_mib=1, scratch=str(tmp_path))
    assert isinstance(table.images_NCHW, MappedArray)
    np.testing.assert_array_equal(table.images_NCHW[:, 0], images)


# --- MAT


def mat(path: Path, **arrays: Any) -> str:
    scipy.io.savemat(path, arrays, do_compression=path.stem.startswith("packed"))
    return str(path)


@pytest.mark.parametrize("name", ["x.mat", "packed.mat"])
def test_mat_tables(tmp_path: Path, name: str) -> None:
    x = np.arange(6.0).reshape(3, 2)
    source = mat(tmp_path / name, x=x, y=np.array([[2], [0], [1]], np.uint8), who=["c", "a", "bb"])
    table = load(source, id="who", columns=["x"], label="y", with_label=True)
    assert table.ids == ("a", "bb", "c")
    np.testing.assert_array_equal(table.numeric_NF, x[[1, 2, 0]])
    assert present(table.labels).tolist() == [0, 1, 2]


def test_images_of_a_mat_file_may_have_their_rows_last(tmp_path: Path) -> None:
    """As SVHN's have."""
    images = np.random.default_rng(0).integers(0, 255, (8, 6, 3, 5)).astype(np.uint8)
    source = mat(tmp_path / "x.mat", X=images, y=np.array([[1], [10], [2], [1], [3]], np.uint8))
    table = load(source, label="y", columns=["X"], with_label=True)
    np.testing.assert_allclose(pixels(table), images.transpose(3, 2, 0, 1) / np.float32(255))


def test_hostile_mat(tmp_path: Path) -> None:
    whole = Path(mat(tmp_path / "x.mat", x=np.ones((50, 4)))).read_bytes()
    refused(written(tmp_path / "cut.mat", whole[: len(whole) // 2]), Code.FILE_INVALID)
    refused(written(tmp_path / "none.mat", "no MAT file"), Code.FILE_INVALID)
    refused(written(tmp_path / "new.mat", b"MATLAB 7.3 MAT-file" + bytes(500)), Code.FILE_INVALID)
    refused(mat(tmp_path / "sparse.mat", x=scipy.sparse.eye(3, format="csc")))
    refused(mat(tmp_path / "cells.mat", x=np.array([{"a": 1}, {"a": 2}], object)))
    # The number of rows, after the tag of the dimensions.
    at = whole.index(struct.pack("<II", 5, 8)) + 8
    huge = whole[:at] + struct.pack("<I", 1 << 30) + whole[at + 4 :]
    refused(written(tmp_path / "huge.mat", huge), Code.FILE_INVALID)
    # The type of the values, after the name: SciPy would end the process.
    at = whole.index(struct.pack("<HH", 1, 1) + b"x\0\0\0") + 8
    for kind in (0, 8, 255, 0xFFFF):
        wrong = whole[:at] + struct.pack("<I", kind) + whole[at + 4 :]
        refused(written(tmp_path / "type.mat", wrong), Code.FILE_INVALID)
    # The same array within one that is compressed.
    packed = zlib.compress(wrong[128:])
    tag = struct.pack("<II", 15, len(packed))
    refused(written(tmp_path / "in.mat", whole[:128] + tag + packed), Code.FILE_INVALID)
    # Dimensions of one byte, before the name of a text: SciPy would end the process.
    text = Path(mat(tmp_path / "t.mat", x=np.array(["ab", "cd"]))).read_bytes()
    at = text.index(struct.pack("<II", 5, 8)) + 4
    flat = text[:at] + struct.pack("<I", 1) + text[at + 4 :]
    refused(written(tmp_path / "flat.mat", flat), Code.FILE_INVALID)
