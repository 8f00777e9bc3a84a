"""Encodes float32 tensors for the wire and decodes them. Rows are the first axis; a vector is one
row.

A tensor that would not become smaller is sent unchanged: rows of one value, for example, would also
need a minimum and a step. Tensors of other dtypes are never changed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import ITEM_BYTES, DType, TensorSpec
from vfl_common.packing import bits
from vfl_common.packing.bits import Bytes, Dither, Floats

Shape = tuple[int, ...]
Array = npt.NDArray[Any]


class Coder(Protocol):
    """An encoding of float32 tensors."""

    @property
    def text(self) -> str:
        """The coder's name in messages."""
        ...

    def parts(self, shape: Shape) -> dict[str, TensorSpec] | None:
        """Returns {suffix of the name: spec} of the parts into which a tensor of ``shape`` is
        encoded; None if the tensor is sent unchanged.
        """
        ...

    def encode(self, x: Floats, seed: int) -> dict[str, Array]:
        """Returns the parts of a tensor, as ``parts`` describes them. ``seed``: the seed of the
        coder's random numbers. Raises ValueError if the tensor cannot be encoded.
        """
        ...

    def decode(self, parts: Mapping[str, Array], shape: Shape) -> Floats:
        """Returns the decoded tensor of ``shape``, float32. Raises ValueError if ``encode`` cannot
        have returned these parts.
        """
        ...


@dataclass(frozen=True)
class Bits:
    """Quantization to ``bits`` bits per number, with a minimum and a step per row.

    ``stochastic``: whether to use stochastic rounding, which keeps the mean. ``half``: whether
    minimum and step take two bytes each.
    """

    bits: Literal[8, 4, 2]
    stochastic: bool = True
    half: bool = False

    @property
    def text(self) -> str:
        """The coder's name in messages."""
        scales = ", scales of two bytes" if self.half else ""
        return f"{self.bits} bits ({'stochastic' if self.stochastic else 'nearest'}{scales})"

    def parts(self, shape: Shape) -> dict[str, TensorSpec] | None:
        """Returns the specs of the parts: see ``Coder.parts``."""
        rows, width = get_rows_and_width(shape)
        scale = TensorSpec(DType.BFLOAT16 if self.half else DType.FLOAT32, (rows,))
        packed = TensorSpec(DType.UINT8, (rows, bits.bytes_per_row(width, self.bits)))
        return _parts_if_smaller({"packed": packed, "low": scale, "scale": scale}, shape)

    def encode(self, x: Floats, seed: int) -> dict[str, Array]:
        """Encodes a tensor: see ``Coder.encode``."""
        dither = Dither(seed) if self.stochastic else None
        sent = bits.pack(
            x.reshape(get_rows_and_width(x.shape)), self.bits, dither, halves=self.half
        )
        low, scale = (
            bits.truncate_to_bfloat16(values) if self.half else values
            for values in (sent.low, sent.scale)
        )
        return {"packed": sent.packed, "low": low, "scale": scale}

    def decode(self, parts: Mapping[str, Array], shape: Shape) -> Floats:
        """Decodes a tensor: see ``Coder.decode``."""
        low, scale = (
            bits.from_bfloat16(parts[name]) if self.half else parts[name]
            for name in ("low", "scale")
        )
        sent = bits.PackedRows(parts["packed"], low, scale)
        return bits.unpack(sent, get_rows_and_width(shape)[1], self.bits).reshape(shape)


@dataclass(frozen=True)
class TopK:
    """Top-k sparsification: keeps the ``keep`` largest values of each row (a share below 1, or a
    count). Other values become zero.

    ``alpha``: the probability with which a kept value is drawn from the values outside the top k.
    ``half``: whether values take two bytes.
    """

    keep: int | float
    alpha: float = 0.0
    half: bool = False

    @property
    def text(self) -> str:
        """The coder's name in messages."""
        keep = f"{self.keep:g}" if isinstance(self.keep, float) else str(self.keep)
        random = f", alpha {self.alpha:g}" if self.alpha else ""
        return (
            f"{'random ' if self.alpha else ''}top-k (keep "
            f"{keep}{random}{', float16' if self.half else ''})"
        )

    def count(self, width: int) -> int:
        """Returns k for rows of ``width`` values."""
        requested = self.keep if isinstance(self.keep, int) else math.ceil(self.keep * width)
        return min(max(1, requested), width)

    def parts(self, shape: Shape) -> dict[str, TensorSpec] | None:
        """Returns the specs of the parts: see ``Coder.parts``."""
        rows, width = get_rows_and_width(shape)
        k = self.count(width)
        index = TensorSpec(DType.UINT8, (rows, -(-k * place_bits(width) // 8)))
        value = TensorSpec(DType.FLOAT16 if self.half else DType.FLOAT32, (rows, k))
        return _parts_if_smaller({"index": index, "value": value}, shape)

    def encode(self, x: Floats, seed: int) -> dict[str, Array]:
        """Encodes a tensor: see ``Coder.encode``."""
        x_RW = x.reshape(get_rows_and_width(x.shape))
        k = self.count(x_RW.shape[1])
        if self.alpha:
            places = draw_places(x_RW, k, self.alpha, Dither(seed))
        else:
            places = find_largest(x_RW, k)
        values = np.take_along_axis(x_RW, places, axis=1)
        index = pack_places(places, x_RW.shape[1])
        return {"index": index, "value": bits.to_float16(values) if self.half else values}

    def decode(self, parts: Mapping[str, Array], shape: Shape) -> Floats:
        """Decodes a tensor: see ``Coder.decode``."""
        rows, width = get_rows_and_width(shape)
        values = parts["value"].astype(np.float32, copy=False)
        if not np.isfinite(values).all():
            raise ValueError("holds NaN or infinity")
        x_RW = np.zeros((rows, width), np.float32)
        np.put_along_axis(
            x_RW, unpack_places(parts["index"], values.shape[1], width), values, axis=1
        )
        return x_RW.reshape(shape)


@dataclass(frozen=True)
class Half:
    """Rounding to float16 or bfloat16, without torch."""

    dtype: Literal[DType.FLOAT16, DType.BFLOAT16]

    @property
    def text(self) -> str:
        """The coder's name in messages."""
        return self.dtype.name.lower()

    def parts(self, shape: Shape) -> dict[str, TensorSpec] | None:
        """Returns the specs of the parts: see ``Coder.parts``."""
        return {"": TensorSpec(self.dtype, shape)}

    def encode(self, x: Floats, seed: int) -> dict[str, Array]:
        """Encodes a tensor: see ``Coder.encode``."""
        _ = seed
        return {"": bits.to_float16(x) if self.dtype is DType.FLOAT16 else bits.to_bfloat16(x)}

    def decode(self, parts: Mapping[str, Array], shape: Shape) -> Floats:
        """Decodes a tensor: see ``Coder.decode``."""
        raw = parts[""]
        x = bits.from_bfloat16(raw) if self.dtype is DType.BFLOAT16 else raw.astype(np.float32)
        if not np.isfinite(x).all():
            raise ValueError("holds NaN or infinity")
        return x.reshape(shape)


def get_rows_and_width(shape: Shape) -> tuple[int, int]:
    """Returns (rows, width) of a tensor: the size of the first axis and the product of the other
    axes. A vector or a scalar is one row.
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def _parts_if_smaller(parts: dict[str, TensorSpec], shape: Shape) -> dict[str, TensorSpec] | None:
    dense = math.prod(shape) * ITEM_BYTES[DType.FLOAT32]
    return parts if sum(part.nbytes for part in parts.values()) < dense else None


# Top-k sparsification: selects the k largest values of each row, or some other values at random,
# and packs their positions.
#
# Random top-k: Zheng et al., "Reducing communication for split learning by randomized top-k
# sparsification", IJCAI 2023 (arXiv 2305.18469).

Places = npt.NDArray[np.int64]


def place_bits(width: int) -> int:
    """Returns the number of bits of a position in a row of ``width`` values; 0 if the row has one
    value.
    """
    return (width - 1).bit_length()


def find_largest(x_RW: Floats, k: int) -> Places:
    """Returns the positions [R, k] of the k largest |x| of each row [R, W], ascending. Among equal
    values the first positions are chosen.

    Raises ValueError if a number is NaN or infinite.
    """
    return _mask_to_places(_mask_largest(x_RW, k), k)


def draw_places(x_RW: Floats, k: int, alpha: float, dither: Dither) -> Places:
    """Returns k positions of each row [R, W], ascending, [R, k]. Each is drawn from the k largest
    values, or with probability ``alpha`` from the other values.

    Within each group every position has the same probability, and no position is drawn twice. The
    number of positions from the other values is binomial (k, ``alpha``), limited to W - k. Raises
    ValueError as ``find_largest`` does.
    """
    top_RW = _mask_largest(x_RW, k)
    rows, width = x_RW.shape
    # Only the upper 53 bits are used, because a float64 holds them exactly.
    draws = dither.keys(rows, k) >> np.uint64(11)
    num_others_R = np.minimum((draws * 2.0**-53 < alpha).sum(axis=1), width - k)
    # One sort puts the k largest first and orders each group at random. The lowest bits of a sort
    # key are the position, the bits above are random, and the highest bit is the group.
    place_mask = np.uint64((1 << place_bits(width)) - 1)
    keys = (dither.keys(rows, width) >> np.uint64(1)) | (~top_RW).astype(np.uint64) << np.uint64(63)
    order_RW = np.sort(keys & ~place_mask | np.arange(width, dtype=np.uint64), axis=1) & place_mask
    positions_W = np.arange(width)
    drawn_RW = (positions_W < k - num_others_R[:, None]) | (
        (positions_W >= k) & (positions_W < k + num_others_R[:, None])
    )
    return np.sort(order_RW[drawn_RW].reshape(rows, k).astype(np.int64), axis=1)


def pack_places(places_RK: Places, width: int) -> Bytes:
    """Packs positions [R, k] into bytes [R, ceil(k * bits / 8)], with ``place_bits(width)`` bits
    each, the lowest bit first.
    """
    rows, k = places_RK.shape
    bits = place_bits(width)
    bits_RKB = (places_RK[:, :, None] >> np.arange(bits)) & 1
    return np.packbits(bits_RKB.astype(np.uint8).reshape(rows, k * bits), axis=1, bitorder="little")


def unpack_places(packed: Bytes, k: int, width: int) -> Places:
    """Undoes ``pack_places``. Raises ValueError if the positions of a row are not ascending, or are
    outside the row.
    """
    rows, bits = len(packed), place_bits(width)
    bits_RKB = np.unpackbits(packed, axis=1, count=k * bits, bitorder="little").reshape(
        rows, k, bits
    )
    places: Places = (bits_RKB.astype(np.int64) << np.arange(bits)).sum(axis=2)
    if bool((places >= width).any()):
        raise ValueError("has an index beyond its row")
    if bool((np.diff(places, axis=1) <= 0).any()):
        raise ValueError("has indices that do not ascend")
    return places


def _mask_largest(x_RW: Floats, k: int) -> npt.NDArray[np.bool_]:
    """Returns a mask [R, W] of the k largest |x| of each row. Among values equal to the k-th
    largest, the first ones are chosen.
    """
    if not np.isfinite(x_RW).all():
        raise ValueError("holds NaN or infinity")
    size_RW = np.abs(x_RW)
    kth_R = np.partition(size_RW, -k, axis=1)[:, -k][:, None]
    above_RW, equal_RW = size_RW > kth_R, size_RW == kth_R
    room_R = k - above_RW.sum(axis=1)[:, None]
    top_RW: npt.NDArray[np.bool_] = above_RW | (equal_RW & (np.cumsum(equal_RW, axis=1) <= room_R))
    return top_RW


def _mask_to_places(chosen_RW: npt.NDArray[np.bool_], k: int) -> Places:
    return np.nonzero(chosen_RW)[1].reshape(len(chosen_RW), k)


Name = Literal["identity", "float16", "bfloat16", "bits"]
Width = Literal[0, 2, 4, 8]
NAMES: tuple[Name, ...] = ("identity", "float16", "bfloat16", "bits")
# The possible numbers of bits per value; 0 for codecs without that setting.
BITS: tuple[Width, ...] = (0, 2, 4, 8)


@dataclass(frozen=True)
class Coding:
    """The encoding of one direction of an average. ``seed``: the seed of the coder's random
    numbers; 0 if it draws none.

    Top-k cannot be chosen for weights, because it would set most weights to zero.
    """

    name: Name = "identity"
    bits: Width = 0
    stochastic: bool = False
    seed: int = 0

    @property
    def coder(self) -> Coder | None:
        """The coder; None if tensors are sent unchanged."""
        if self.name == "bits":
            assert self.bits  # noqa: S101 - checked when a coding is read from a message
            return Bits(self.bits, self.stochastic)
        if self.name == "identity":
            return None
        return Half(DType.FLOAT16 if self.name == "float16" else DType.BFLOAT16)

    def __str__(self) -> str:
        return self.coder.text if self.coder is not None else self.name


PLAIN = Coding()
