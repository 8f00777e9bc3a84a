"""Bundle: named tensors, the only thing that crosses a process boundary; and the spec that guards it.

No torch here: a tensor is a dtype, a shape and a contiguous little-endian buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

from vfl_common.errors import Code, PeerError


class DType(IntEnum):
    """Names and numbers are those of ``vfl.v1.DType``."""

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
    """What a bundle carries. Names and numbers are those of ``vfl.v1.BundleKind``."""

    EMBEDDING = 1
    GRADIENT = 2
    WEIGHTS = 3
    ROWS = 4
    VERDICT = 5
    ACK = 6

    @property
    def label(self) -> str:
        """The ledger's word for it."""
        return self.name.lower()


class StepKey(NamedTuple):
    """With the run, the key that makes a step idempotent."""

    phase: str
    round: int
    batch: int

    def __str__(self) -> str:
        return f"phase {self.phase}, round {self.round}, batch {self.batch}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """One tensor: ``data`` is a flat, contiguous view of ``nbytes`` bytes."""

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
        return sum(buffer.data.nbytes for buffer in self.tensors.values())


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What one tensor of a bundle must be, exactly."""

    dtype: DType
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, eq=False)
class BundleSpec:
    """What a bundle must be: checked on the announcement, before memory is taken for the bytes.

    Equal only to itself, so that what is derived from it can be kept by identity.
    """

    kind: Kind
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())

    def check(self, kind: Kind, announced: Mapping[str, TensorSpec], *, party: str, step: StepKey) -> None:
        """Raises PeerError (TENSOR_MISMATCH, TENSOR_TOO_LARGE) when ``announced`` is not what this spec says."""
        if kind is self.kind and announced == self.tensors:
            return
        where = f"{party} at {step}"
        if sum(spec.nbytes for spec in announced.values()) > self.payload_bytes:
            raise _mismatch(
                Code.TENSOR_TOO_LARGE,
                f"{where}: a message of {sum(s.nbytes for s in announced.values())} bytes where at most "
                f"{self.payload_bytes} are expected",
                party,
            )
        if kind is not self.kind:
            raise _mismatch(Code.TENSOR_MISMATCH, f"{where}: {kind.label} where {self.kind.label} is expected", party)
        for name in [*self.tensors, *announced]:
            want, got = self.tensors.get(name), announced.get(name)
            if want != got:
                raise _mismatch(
                    Code.TENSOR_MISMATCH,
                    f"{where}: tensor {name[:40]!r} is {_words(got)} where {_words(want)} is expected",
                    party,
                )


def _words(spec: TensorSpec | None) -> str:
    return "nothing" if spec is None else f"{spec.dtype.name.lower()} {list(spec.shape)}"


def _mismatch(code: Code, message: str, party: str) -> PeerError:
    # Shapes and names are what both sides have agreed on: the peer may read them.
    return PeerError(code, message, public=message, party=party)
