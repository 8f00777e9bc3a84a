"""Bundle: named tensors, the only thing that crosses a process boundary in an exchange; and the
spec that guards it.

This module does without torch: a tensor is a dtype, a shape and a contiguous little-endian buffer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property
from typing import NamedTuple

from vfl_common.errors import Code, PeerError

# The square of a larger number is near the end of float32.
HUGE = 1e18


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
    """The kind of a bundle's content. Names and numbers are those of ``vfl.v1.BundleKind``."""

    EMBEDDING = 1
    GRADIENT = 2
    WEIGHTS = 3
    ROWS = 4
    VERDICT = 5
    ACK = 6

    @property
    def label(self) -> str:
        """The ledger's word for this kind."""
        return LABELS[self]


LABELS: dict[int, str] = {kind: kind.name.lower() for kind in Kind}


class StepKey(NamedTuple):
    """The key, together with the run, that makes a step idempotent."""

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

    def spec(self) -> BundleSpec:
        """Returns the form that this bundle has."""
        tensors = {name: TensorSpec(each.dtype, each.shape) for name, each in self.tensors.items()}
        return BundleSpec(self.kind, tensors)


@dataclass(frozen=True)
class TensorSpec:
    """The exact dtype and shape of one tensor of a bundle."""

    dtype: DType
    shape: tuple[int, ...]

    # A spec is made once, and asked at every step.
    @cached_property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return f"{self.dtype.name.lower()} {list(self.shape)}"


@dataclass(frozen=True, slots=True, eq=False)
class BundleSpec:
    """The exact form of a bundle: checked on the announcement, before memory is allocated for the
    bytes.

    A spec equals only itself, so that caches can key on its identity.
    """

    kind: Kind
    tensors: Mapping[str, TensorSpec] = field(default_factory=dict)

    @property
    def payload_bytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())

    def check(
        self, kind: Kind, announced: Mapping[str, TensorSpec], *, party: str, step: StepKey
    ) -> None:
        """Raises PeerError (TENSOR_MISMATCH, TENSOR_TOO_LARGE) if ``announced`` differs from this
        spec.
        """
        if kind is self.kind and announced == self.tensors:
            return
        where = f"{party} at {step}"
        if sum(spec.nbytes for spec in announced.values()) > self.payload_bytes:
            raise _mismatch(
                Code.TENSOR_TOO_LARGE,
                f"{where}: a message of {sum(s.nbytes for s in announced.values())} bytes, "
                "but at most "
                f"{self.payload_bytes} are expected",
                party,
            )
        if kind is not self.kind:
            raise _mismatch(
                Code.TENSOR_MISMATCH,
                f"{where}: {kind.label}, but {self.kind.label} is expected",
                party,
            )
        for name in [*self.tensors, *announced]:
            want, got = self.tensors.get(name), announced.get(name)
            if want != got:
                raise _mismatch(
                    Code.TENSOR_MISMATCH,
                    f"{where}: tensor {name[:40]!r} is {got or 'nothing'}, but "
                    f"{want or 'nothing'} is expected",
                    party,
                )


def _mismatch(code: Code, message: str, party: str) -> PeerError:
    # Both sides agreed on shapes and names, so the peer may read them.
    return PeerError(code, message, party=party)
