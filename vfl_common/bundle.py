"""Bundles: named tensors that an exchange sends from one process to another, and the specs that
check them.

This module does not use torch: a tensor is a dtype, a shape and a contiguous little-endian buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from vfl_common.errors import Code, PeerError

# Numbers above this limit are suspect: their squares approach the limit of float32.
HUGE = 1e18


class DType(IntEnum):
    """The dtype of a tensor. Names and numbers are the same as in ``vfl.v1.DType``."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3
    INT64 = 4
    INT32 = 5
    UINT8 = 6
    BOOL = 7


ITEM_BYTES: dict[DType, int] = {
    DType.FLOAT32: 4,
    DType.FLOAT16: 2,
    DType.BFLOAT16: 2,
    DType.INT64: 8,
    DType.INT32: 4,
    DType.UINT8: 1,
    DType.BOOL: 1,
}


class Kind(IntEnum):
    """The kind of a bundle's content. Names and numbers are the same as in
    ``vfl.v1.BundleKind``.
    """

    EMBEDDING = 1
    GRADIENT = 2
    WEIGHTS = 3
    ROWS = 4
    VERDICT = 5
    ACK = 6

    @property
    def label(self) -> str:
        """The name of this kind in the ledger."""
        return LABELS[self]


LABELS: dict[int, str] = {kind: kind.name.lower() for kind in Kind}


class StepKey(NamedTuple):
    """Identifies a step within a run; a step that is sent again is computed only once."""

    phase: str
    round: int
    batch: int

    def __str__(self) -> str:
        return f"phase {self.phase}, round {self.round}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor. ``data`` is a flat, contiguous view of its bytes."""

    dtype: DType
    shape: tuple[int, ...]
    data: memoryview


@dataclass(frozen=True, slots=True)
class Bundle:
    """Named tensors of one kind, in the order in which they cross the wire."""

    kind: Kind
    tensors: Mapping[str, Buffer] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(buffer.data.nbytes for buffer in self.tensors.values())

    def spec(self) -> BundleSpec:
        """Returns the spec that this bundle matches."""
        tensors = {name: TensorSpec(t.dtype, t.shape) for name, t in self.tensors.items()}
        return BundleSpec(self.kind, tensors)


@dataclass(frozen=True)
class TensorSpec:
    """The exact dtype and shape of one tensor of a bundle."""

    dtype: DType
    shape: tuple[int, ...]

    # Cached, because every step uses it.
    @cached_property
    def nbytes(self) -> int:
        """The size of the tensor, in bytes."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype.name.lower()} {list(self.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class BundleSpec:
    """The exact kind, names, dtypes and shapes of a bundle. They are checked when the bundle is
    announced, before memory is allocated for its bytes.

    A spec equals only itself, so that caches can use its identity as a key.
    """

    kind: Kind
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        """The size of all tensors, in bytes."""
        return sum(spec.nbytes for spec in self.tensors.values())

    def check(
        self, kind: Kind, announced: Mapping[str, TensorSpec], *, party: str, step: StepKey
    ) -> None:
        """Raises PeerError (TENSOR_MISMATCH, TENSOR_TOO_LARGE) if ``announced`` differs from this
        spec.
        """
        if kind is self.kind and announced == self.tensors:
            return

        if sum(spec.nbytes for spec in announced.values()) > self.payload_bytes:
            raise _mismatch(
                Code.TENSOR_TOO_LARGE,
                f"{party} at {step}: a message must have at most {self.payload_bytes} bytes (got "
                f"{sum(spec.nbytes for spec in announced.values())})",
                party,
            )
        if kind is not self.kind:
            raise _mismatch(
                Code.TENSOR_MISMATCH,
                f"{party} at {step}: the kind must be {self.kind.label} (got {kind.label})",
                party,
            )
        for name in [*self.tensors, *announced]:
            expected_spec, announced_spec = self.tensors.get(name), announced.get(name)
            if expected_spec != announced_spec:
                raise _mismatch(
                    Code.TENSOR_MISMATCH,
                    f"{party} at {step}: tensor {name[:40]!r} must be "
                    f"{expected_spec or 'absent'} (got {announced_spec or 'nothing'})",
                    party,
                )


def _mismatch(code: Code, message: str, party: str) -> PeerError:
    # Both sides have agreed on names and shapes, so the peer may read them.
    return PeerError(code, message, party=party)
