"""Tensors of the Open Inference Protocol: datatypes, shapes, and their elements as bytes."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

TEXT, TRUTH, WHOLE, NUMBER = "BYTES", "BOOL", "INT64", "FP64"
_DTYPES = {
    TRUTH: np.dtype("?"),
    **{f"INT{8 * size}": np.dtype(f"<i{size}") for size in (1, 2, 4, 8)},
    **{f"UINT{8 * size}": np.dtype(f"<u{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"<f{size}") for size in (2, 4, 8)},
}
# Of an element that is None: no number can be mistaken for it.
_MISSING: dict[str, Any] = {NUMBER: math.nan, WHOLE: -(2**63)}
# Before each element of BYTES.
_LENGTH = struct.Struct("<I")


class TensorError(ValueError):
    """What is wrong with a tensor of a request."""


@dataclass(frozen=True)
class Tensor:
    """A tensor.

    Args:
        shape: of it; empty for a request's output that has any.
        data: its elements in row-major order; or bytes, as ``raw`` writes them.
        parameters: more that is said of it.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any] | bytes
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """How many elements the shape asks for."""
        return math.prod(self.shape)


def values(tensor: Tensor) -> list[Any]:
    """Returns the elements of a tensor: text, numbers that its datatype can hold, or None where
    JSON has null. Raises TensorError.
    """
    name, datatype = tensor.name, tensor.datatype
    if datatype != TEXT and datatype not in _DTYPES:
        raise TensorError(f"{name}: datatype must be BYTES, {', '.join(_DTYPES)}")
    data = tensor.data
    found = _of_raw(tensor, data) if isinstance(data, bytes) else _of_list(tensor, data)
    if len(found) != tensor.count:
        raise TensorError(f"{name}: shape and data do not fit each other")
    return found


def _of_list(tensor: Tensor, data: Sequence[Any]) -> list[Any]:
    if tensor.datatype == TEXT:
        return [_text(tensor.name, each) for each in data]
    dtype = _DTYPES[tensor.datatype]
    kinds: tuple[type, ...] = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    given = [each for each in data if each is not None]
    # A truth is a whole number, too.
    if not all(isinstance(each, kinds) for each in given) or (
        bool not in kinds and any(isinstance(each, bool) for each in given)
    ):
        raise TensorError(f"{tensor.name}: data must be of datatype {tensor.datatype}")
    try:
        # A number that is too large for a smaller float becomes infinity, as everywhere.
        with np.errstate(over="ignore"):
            held = iter(np.array(given, dtype).tolist())
    except OverflowError:
        text = f"{tensor.name}: data has a number that {tensor.datatype} cannot hold"
        raise TensorError(text) from None
    return [None if each is None else next(held) for each in data]


def _of_raw(tensor: Tensor, data: bytes) -> list[Any]:
    if tensor.datatype == TEXT:
        return [_text(tensor.name, each) for each in _split(tensor, data)]
    dtype = _DTYPES[tensor.datatype]
    if len(data) != tensor.count * dtype.itemsize:
        text = f"{tensor.name}: shape and datatype ask for another number of bytes"
        raise TensorError(text)
    if dtype.kind == "b":
        return [each != 0 for each in data]
    found: list[Any] = np.frombuffer(data, dtype).tolist()
    return found


def _split(tensor: Tensor, data: bytes) -> list[bytes]:
    found, at = list[bytes](), 0
    while at < len(data) and len(found) <= tensor.count:
        start = at + _LENGTH.size
        if start > len(data):
            break
        at = start + _LENGTH.unpack_from(data, start - _LENGTH.size)[0]
        found.append(data[start:at])
    if at != len(data) or len(found) != tensor.count:
        text = f"{tensor.name}: the bytes are not as many elements as shape says, each after its"
        raise TensorError(f"{text} length as 4 bytes")
    return found


def _text(name: str, given: Any) -> Any:
    if isinstance(given, str) or given is None:
        return given
    if not isinstance(given, bytes):
        raise TensorError(f"{name}: data must be of datatype BYTES")
    try:
        return given.decode()
    except UnicodeDecodeError:
        raise TensorError(f"{name}: text must be UTF-8") from None


def filled(tensor: Tensor) -> Sequence[Any]:
    """Returns the elements of an output for clients, who know no null: what is None is NaN, or the
    smallest INT64.
    """
    missing = _MISSING.get(tensor.datatype)
    return [missing if each is None else each for each in tensor.data]


def raw(tensor: Tensor) -> bytes:
    """Returns the elements of a tensor as bytes: little-endian, each of BYTES after its length as
    four bytes.
    """
    if tensor.datatype != TEXT:
        return np.array(filled(tensor), _DTYPES[tensor.datatype]).tobytes()
    given = [each.encode() for each in filled(tensor)]
    return b"".join(part for each in given for part in (_LENGTH.pack(len(each)), each))
