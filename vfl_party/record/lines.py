"""The lines of a record: one JSON object each.

``record`` is the first line; ``run`` opens a generation of a run; ``people`` says whose rows the
numbers of rows mean; ``way`` declares one direction of an exchange; ``sent`` is one bundle;
``private`` is one step of training with differential privacy; ``head`` notes the head of a peer's
record.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import Bundle, DType, StepKey
from vfl_common.text import to_json
from vfl_party.record.people import TAG_BYTES

# Of rows: all that the line before it of the kind ``people`` knows, at most.
ALL = "*"
# Of no rows.
NOBODY = ""
# Of several rows together: a sum or a mean, weights.
TOGETHER = "+"
Rows = npt.NDArray[np.int64]
# A larger bundle is not hashed as a whole, unless the party wants it.
SMALL_BYTES = 4096
_SAMPLE_BYTES = 1024
_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
TAG = np.dtype(f"V{TAG_BYTES}")
# Before people that are told by their tags, where no line has said whose the rows are.
_TAGGED = f"{TAG_BYTES}:"


@dataclass(frozen=True)
class Way:
    """One direction of an exchange, as a line declares it.

    ``what``: the tensors, in words; ``chain``: the transforms, the policy and the codec, in words;
    ``how``: what the method has done to the tensors; ``cost``: what a bundle costs a row of which
    it tells, a ``Mechanism``; '' if it is not private.
    """

    run: str
    generation: int
    job: str
    phase: str
    exchange: str
    direction: str
    kind: str
    what: str
    chain: str
    how: str = ""
    cost: str = ""

    @property
    def key(self) -> str:
        """Tells a declaration from others: the first 64 bits of its digest."""
        return sha256(to_json(self.fields).encode()).hexdigest()[:16]

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def packed(rows: Sequence[int] | npt.NDArray[Any] | str | None, most: int = 0) -> str | None:
    """Writes numbers of rows, in any order; None and words such as ``ALL`` as they are. It is done
    at every step, so it takes few calls.

    ``most``: all numbers are below it; 0: that is not known.
    """
    if rows is None or isinstance(rows, str):
        return rows
    width = 2 if 0 < most <= 1 << 16 else 4
    data = np.asarray(rows).astype(_TYPES[width]).tobytes()
    return f"{width}:{binascii.b2a_base64(data, newline=False).decode()}" if data else ""


def unpacked(text: str) -> Rows:
    """Reads what ``packed`` wrote of numbers: in ascending order. Raises ValueError."""
    if not text:
        return np.empty(0, np.int64)
    width, _, data = text.partition(":")
    if width not in {"2", "4"}:
        raise ValueError(text)
    found = np.frombuffer(base64.b64decode(data, validate=True), _TYPES[int(width)])
    return np.sort(found.astype(np.int64))


def packed_tags(tags: bytes, times: Sequence[int] | npt.NDArray[Any] | None = None) -> str:
    """Writes people by their tags, one after the other. ``times``: how often each is told of; None:
    once.
    """
    if not tags:
        return NOBODY
    found = f"{_TAGGED}{binascii.b2a_base64(tags, newline=False).decode()}"
    if times is None:
        return found
    counts = binascii.b2a_base64(np.asarray(times).astype(_TYPES[4]).tobytes(), newline=False)
    return f"{found}:{counts.decode()}"


def unpacked_tags(text: str | None) -> tuple[npt.NDArray[np.void], Rows] | None:
    """Reads what ``packed_tags`` wrote: the tags, and how often each is told of; None if rows are
    told by their numbers. Raises ValueError.
    """
    if text is None or not text.startswith(_TAGGED):
        return None
    first, _, second = text.removeprefix(_TAGGED).partition(":")
    tags = np.frombuffer(base64.b64decode(first, validate=True), TAG)
    if not second:
        return tags, np.ones(len(tags), np.int64)
    times = np.frombuffer(base64.b64decode(second, validate=True), _TYPES[4]).astype(np.int64)
    if len(times) != len(tags):
        raise ValueError(text)
    return tags, times


def digest_of(bundle: Bundle, step: StepKey, *, whole: bool = False) -> str:
    """Returns a digest of what crosses the wire: names, dtypes, shapes and bytes, by SHA-256.

    Of a tensor of more than ``SMALL_BYTES`` it takes 1 KiB, from a place that follows from the
    step, and says so: ``sample:`` in place of ``sha256:``. ``whole``: it takes all bytes.
    """
    found, sampled = sha256(), False
    for name, buffer in bundle.tensors.items():
        data = buffer.data
        found.update(_form(name, buffer.dtype, buffer.shape))
        if whole or data.nbytes <= SMALL_BYTES:
            found.update(data)
            continue
        sampled = True
        first = (step.round * 7919 + step.batch * 104_729) % (data.nbytes - _SAMPLE_BYTES + 1)
        found.update(data[first : first + _SAMPLE_BYTES])
    return f"{'sample' if sampled else 'sha256'}:{found.hexdigest()}"


@lru_cache(maxsize=1024)
def _form(name: str, dtype: DType, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype.name} {shape} ".encode()
