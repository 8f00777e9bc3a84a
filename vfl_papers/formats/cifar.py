"""Reads CIFAR's batches: pickles of the Python version, and the bytes of the binary version."""

from __future__ import annotations

import io
import pickle
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError

Array = npt.NDArray[Any]
# The number of values of an image: red, green and blue of 32 × 32.
PIXELS = 3 * 32 * 32


def images_of(pixels_NP: Array) -> Array:
    """Returns [N, 32, 32, 3] of [N, 3072], which has red, green and blue one after the other."""
    return np.ascontiguousarray(pixels_NP.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1))


def read_binary(name: str, data: bytes, labels: int) -> tuple[Array, Array]:
    """Returns images [N, 32, 32, 3] and labels [N] of a file of the binary version.

    A row is ``labels`` bytes, the last of which is the class, and 3072 pixels. Raises InputError.
    """
    size = labels + PIXELS
    if not data or len(data) % size:
        raise InputError(
            Code.FILE_INVALID,
            f"{name}: must have a multiple of {size:,} bytes (got {len(data):,}). Download it "
            "again.",
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, size)
    return images_of(rows[:, labels:]), rows[:, labels - 1].astype(np.int64)


def read_python(name: str, data: bytes, key: str) -> tuple[Array, Array]:
    """Returns images [N, 32, 32, 3] and labels [N] of a pickle of the Python version. ``key``: that
    of its labels. Only plain values and the bytes of an array are unpickled. Raises InputError.
    """
    try:
        batch = _Plain(io.BytesIO(data), encoding="bytes").load()
        pixels = batch[b"data"].array()
        classes = batch[key.encode()]
        # Nested lists could repeat the same row without end.
        if type(classes) is not list or not all(type(label) is int for label in classes):
            raise ValueError("no labels")
        labels = np.array(classes, np.int64)
        if pixels.shape != (len(labels), PIXELS):
            raise ValueError("shapes differ")
    # A damaged pickle may fail with any exception.
    except Exception:  # noqa: BLE001
        raise InputError(
            Code.FILE_INVALID,
            f"{name}: is not a batch of CIFAR's Python version. Download it again.",
        ) from None
    return images_of(pixels), labels


class _Array:
    """Takes the state of a pickled array, of which only bytes and shape are used."""

    _state: tuple[Any, ...]

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._state = state

    def array(self) -> Array:
        """Returns the array. Raises ValueError or TypeError if it does not hold bytes."""
        _, shape, dtype, fortran, raw = self._state
        if not isinstance(dtype, _Type) or dtype.name not in (b"u1", "u1"):
            raise ValueError("no bytes")
        return np.frombuffer(raw, np.uint8).reshape(shape, order="F" if fortran else "C")


class _Type:
    """Takes a pickled type of an array, of which only the name is used."""

    def __init__(self, name: bytes | str, *_: Any) -> None:
        self.name = name

    def __setstate__(self, state: Any) -> None: ...


def _array(*_: Any) -> _Array:
    return _Array()


class _Plain(pickle.Unpickler):
    """Unpickles plain values, with our classes in place of NumPy's, which accept anything."""

    def find_class(self, module: str, name: str) -> Any:
        root = module.partition(".")[0]
        known = {"_reconstruct": _array, "ndarray": _Array, "dtype": _Type}
        if root == "numpy" and name in known:
            return known[name]
        raise pickle.UnpicklingError(f"{module}.{name}")
