"""Small files in the exact official formats of data sets."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from scipy.io import savemat

Array = npt.NDArray[Any]


def images(n: int, *shape: int, seed: int = 0) -> Array:
    """Returns n random images of bytes."""
    return np.random.default_rng(seed).integers(0, 256, (n, *shape), np.uint8)


def classes(n: int, count: int) -> Array:
    """Returns n classes, as many of each."""
    return (np.arange(n) % count).astype(np.uint8)


# {split: (images, labels)}.
MNIST = {
    "train": (images(60, 28, 28), classes(60, 10)),
    "test": (images(20, 28, 28, seed=1), classes(20, 10)),
}


def idx(array: Array) -> bytes:
    """Returns an IDX file of bytes."""
    sizes = np.array(array.shape, ">u4").tobytes()
    return bytes((0, 0, 8, array.ndim)) + sizes + array.tobytes()


def write_mnist(folder: Path, *, packed: bool = True) -> Path:
    """Writes the four files of MNIST, KMNIST or Fashion-MNIST."""
    for split, name in (("train", "train"), ("test", "t10k")):
        for array, kind in zip(MNIST[split], ("images-idx3", "labels-idx1"), strict=True):
            path = folder / f"{name}-{kind}-ubyte{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(idx(array)) if packed else idx(array))
    return folder


# {split: (images, labels)}.
CIFAR = {
    "train": (images(50, 32, 32, 3), classes(50, 10).astype(np.int64)),
    "test": (images(20, 32, 32, 3, seed=1), classes(20, 10).astype(np.int64)),
}


def _planes(pixels: Array) -> Array:
    """Returns [N, 3072]: red, green and blue one after the other."""
    return pixels.transpose(0, 3, 1, 2).reshape(len(pixels), -1)


def _batch(data: Array, **others: Any) -> bytes:
    """Returns a batch as Python 2 pickled it: protocol 2, byte strings, NumPy's old modules.

    GLOBAL, REDUCE and BUILD of an array are written by hand, because Python 3 names other modules.
    """

    def text(value: bytes) -> bytes:
        kind = (
            b"U" + bytes([len(value)]) if len(value) < 256 else b"T" + struct.pack("<I", len(value))
        )
        return kind + value

    def number(value: int) -> bytes:
        return b"J" + struct.pack("<i", value)

    dtype = b"cnumpy\ndtype\n(" + text(b"u1") + number(0) + number(1) + b"tR"
    dtype += b"(" + number(3) + text(b"|") + b"NNN" + number(-1) + number(-1) + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n" + number(0) + b"\x85"
    array += text(b"b") + b"tR("
    shape = b"(" + number(data.shape[0]) + number(data.shape[1]) + b"t"
    array += number(1) + shape + dtype + b"\x89" + text(data.tobytes()) + b"tb"
    items = text(b"data") + array
    for key, values in others.items():
        items += text(key.encode()) + b"](" + b"".join(map(number, values)) + b"e"
    return b"\x80\x02}(" + items + b"u."


def cifar10_python() -> dict[str, bytes]:
    """Returns the files of CIFAR-10's Python version."""
    pixels, labels = CIFAR["train"]
    parts = zip(np.split(_planes(pixels), 5), np.split(labels, 5), strict=True)
    found = {
        f"data_batch_{k}": _batch(own, labels=mine.tolist())
        for k, (own, mine) in enumerate(parts, 1)
    }
    test, mine = CIFAR["test"]
    return found | {"test_batch": _batch(_planes(test), labels=mine.tolist())}


def cifar10_binary() -> dict[str, bytes]:
    """Returns the files of CIFAR-10's binary version."""
    pixels, labels = CIFAR["train"]
    rows = np.concatenate([labels[:, None].astype(np.uint8), _planes(pixels)], 1)
    found = {f"data_batch_{k}.bin": own.tobytes() for k, own in enumerate(np.split(rows, 5), 1)}
    test, mine = CIFAR["test"]
    return found | {
        "test_batch.bin": np.concatenate(
            [mine[:, None].astype(np.uint8), _planes(test)], 1
        ).tobytes()
    }


def cifar100_python() -> dict[str, bytes]:
    """Returns the files of CIFAR-100's Python version."""
    return {
        split: _batch(
            _planes(pixels), coarse_labels=(labels // 2).tolist(), fine_labels=labels.tolist()
        )
        for split, (pixels, labels) in CIFAR.items()
    }


def cifar100_binary() -> dict[str, bytes]:
    """Returns the files of CIFAR-100's binary version: coarse label, fine label, pixels."""
    return {
        f"{split}.bin": np.concatenate(
            [
                (labels // 2)[:, None].astype(np.uint8),
                labels[:, None].astype(np.uint8),
                _planes(pixels),
            ],
            1,
        ).tobytes()
        for split, (pixels, labels) in CIFAR.items()
    }


def write_files(folder: Path, files: Mapping[str, bytes]) -> Path:
    """Writes files into a new folder."""
    folder.mkdir()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return folder


def write_tar(path: Path, inside: str, files: Mapping[str, bytes]) -> Path:
    """Writes files into a folder of a gzipped tar archive."""
    with tarfile.open(path, "w:gz") as archive:
        for name, data in files.items():
            info = tarfile.TarInfo(f"{inside}/{name}")
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return path


def write_svhn(folder: Path, *, side: int = 32) -> None:
    """Writes SVHN's two files, in which the digit 0 is the class 10; ``side``: of the images."""
    for split, (pixels, labels) in CIFAR.items():
        y = np.where(labels == 0, 10, labels).astype(np.uint8)[:, None]
        savemat(folder / f"{split}_32x32.mat", {"X": np.moveaxis(pixels[:, :side], 0, -1), "y": y})


def write_picture(path: Path, pixels: Array) -> None:
    """Writes a PNG or JPEG file, and its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


def write_bhi(folder: Path) -> Path:
    """Writes patches of five patients, as Kaggle's archive has them; one is smaller than 50 × 50."""
    root = folder / "IDC_regular_ps50_idx5"
    for patient in (8863, 8864, 8865, 9346, 10253):
        for label in (0, 1):
            for k in range(5 if label else 4):
                size = (50, 30) if (patient, label, k) == (8863, 0, 0) else (50, 50)
                name = f"{patient}_idx5_x{50 * k + 1}_y1001_class{label}.png"
                write_picture(
                    root / str(patient) / str(label) / name, images(1, *size, 3, seed=k)[0]
                )
    return root


def write_modelnet(root: Path, objects: int = 2) -> Path:
    """Writes twelve views of objects in ten classes."""
    for c in range(10):
        for k in range(objects + 1):
            split = "train" if k < objects else "test"
            for view in range(1, 13):
                name = f"class{c}_{k:04d}_{view:03d}.png"
                pixels = np.full((8, 8, 3), 20 * view, np.uint8)
                write_picture(root / f"class{c}" / split / name, pixels)
    return root


def write_imagenet(folder: Path, kinds: int) -> None:
    """Writes photographs of mixed sizes in folders of classes."""
    for c in range(kinds):
        for split, count in (("train", 2), ("val", 1)):
            for k in range(count):
                wide = 40 + 8 * k
                name = f"n{c:08d}/n{c:08d}_{k}.JPEG"
                write_picture(folder / split / name, images(1, 36, wide, 3, seed=k)[0])
