"""Small files in the exact official formats of data sets."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

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
