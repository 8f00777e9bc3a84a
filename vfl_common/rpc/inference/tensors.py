"""Tensors of the Open Inference Protocol: their datatypes and shapes, and the conversion of their
elements to bytes.
"""

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
# The values for a missing element in datatypes without null.
_MISSING_VALUES: dict[str, Any] = {NUMBER: math.nan, WHOLE: -(2**63)}
# The length, before each element of a BYTES tensor.
_LENGTH_FORMAT = struct.Struct("<I")


class TensorError(ValueError):
    """A tensor of a request is not valid. The text gives the reason."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of a request or an answer.

    Args:
        shape: The shape; empty for a requested output of any shape.
        data: The elements in row-major order, or their bytes as ``raw`` returns them.
        parameters: The protocol's parameters of the tensor.
    """

    name: str
    datatype: str
    shape: Sequence[int]
    data: Sequence[Any] | bytes
    parameters: Mapping[str, Any] = field(default_factory=dict)

    @property
    def count(self) -> int:
        """The number of elements that the shape has."""
        return math.prod(self.shape)


def values(tensor: Tensor) -> list[Any]:
    """Returns the elements of a tensor: texts, numbers in the range of the datatype, or None for
    null. Raises TensorError.
    """
    name, datatype = tensor.name, tensor.datatype
    if datatype != TEXT and datatype not in _DTYPES:
        raise TensorError(f"{name}: datatype must be BYTES, {', '.join(_DTYPES)}")
    data = tensor.data
    elements = (
        _convert_raw(tensor, data) if isinstance(data, bytes) else _convert_list(tensor, data)
    )
    if len(elements) != tensor.count:
        raise TensorError(f"{name}: data must have as many elements as the shape")
    return elements


def _convert_list(tensor: Tensor, data: Sequence[Any]) -> list[Any]:
    if tensor.datatype == TEXT:
        return [_decode_text(tensor.name, element) for element in data]
    dtype = _DTYPES[tensor.datatype]
    kinds: tuple[type, ...] = {"b": (bool,), "f": (int, float)}.get(dtype.kind, (int,))
    present = [element for element in data if element is not None]
    # The second condition is needed because Python's bool is a subclass of int.
    if not all(isinstance(element, kinds) for element in present) or (
        bool not in kinds and any(isinstance(element, bool) for element in present)
    ):
        raise TensorError(f"{tensor.name}: data must be of datatype {tensor.datatype}")
    try:
        # A number that is too large for the float type becomes infinity.
        with np.errstate(over="ignore"):
            rounded = iter(np.array(present, dtype).tolist())
    except OverflowError:
        raise TensorError(
            f"{tensor.name}: data has a number that {tensor.datatype} cannot hold"
        ) from None
    return [None if element is None else next(rounded) for element in data]


def _convert_raw(tensor: Tensor, data: bytes) -> list[Any]:
    if tensor.datatype == TEXT:
        return [_decode_text(tensor.name, element) for element in _split_texts(tensor, data)]
    dtype = _DTYPES[tensor.datatype]
    if len(data) != tensor.count * dtype.itemsize:
        raise TensorError(
            f"{tensor.name}: shape and datatype need {tensor.count * dtype.itemsize:,} bytes (got "
            f"{len(data):,})"
        )
    if dtype.kind == "b":
        return [byte != 0 for byte in data]
    elements: list[Any] = np.frombuffer(data, dtype).tolist()
    return elements


def _split_texts(tensor: Tensor, data: bytes) -> list[bytes]:
    elements, end = list[bytes](), 0
    while end < len(data) and len(elements) <= tensor.count:
        start = end + _LENGTH_FORMAT.size
        if start > len(data):
            break
        end = start + _LENGTH_FORMAT.unpack_from(data, start - _LENGTH_FORMAT.size)[0]
        elements.append(data[start:end])
    if end != len(data) or len(elements) != tensor.count:
        raise TensorError(
            f"{tensor.name}: the bytes must hold as many elements as the shape, each after its "
            "length in 4 bytes"
        )
    return elements


def _decode_text(name: str, element: Any) -> Any:
    if isinstance(element, str) or element is None:
        return element
    if not isinstance(element, bytes):
        raise TensorError(f"{name}: data must be of datatype BYTES")
    try:
        return element.decode()
    except UnicodeDecodeError:
        raise TensorError(f"{name}: text must be UTF-8") from None


def fill_missing(tensor: Tensor) -> Sequence[Any]:
    """Returns the elements of an output for clients. None becomes NaN, or the smallest INT64."""
    missing = _MISSING_VALUES.get(tensor.datatype)
    return [missing if element is None else element for element in tensor.data]


def raw(tensor: Tensor) -> bytes:
    """Returns the elements of a tensor as little-endian bytes. Each BYTES element follows its
    length in four bytes.
    """
    if tensor.datatype != TEXT:
        return np.array(fill_missing(tensor), _DTYPES[tensor.datatype]).tobytes()
    texts = [element.encode() for element in fill_missing(tensor)]
    return b"".join(part for text in texts for part in (_LENGTH_FORMAT.pack(len(text)), text))
