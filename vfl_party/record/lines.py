"""The lines of a record: one JSON object each.

``record`` is the first line; ``run`` opens a generation of a run; ``people`` says whose rows the
numbers of rows mean; ``way`` declares one direction of an exchange; ``sent`` is one bundle;
``head`` notes the head of a peer's record.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import Bundle, StepKey
from vfl_common.text import to_json

# Of rows: all that the line before it of the kind ``people`` knows, at most.
ALL = "*"
# Of no rows.
NOBODY = ""
# Of several rows together: a sum or a mean, weights.
TOGETHER = "+"
Rows = npt.NDArray[np.int64]
# A larger bundle is not hashed as a whole, unless the party wants it.
SMALL_BYTES = 4096
_BLOCKS, _BLOCK_BYTES = 64, 64


@dataclass(frozen=True)
class Way:
    """One direction of an exchange, as a line declares it.

    ``what``: the tensors, in words; ``chain``: the transforms, the policy and the codec, in words;
    ``how``: what the method has done to the tensors.
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

    @property
    def key(self) -> str:
        """Tells a declaration from others: the first 64 bits of its digest."""
        return sha256(to_json(self.fields).encode()).hexdigest()[:16]

    @property
    def fields(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def packed(rows: Sequence[int] | npt.NDArray[Any] | str | None) -> str | None:
    """Writes numbers of rows, in any order, in few characters; None and ``ALL`` as they are."""
    if rows is None or isinstance(rows, str):
        return rows
    found = np.sort(np.asarray(rows, np.int64))
    if not len(found):
        return ""
    steps = np.diff(found, prepend=0)
    if len(found) == found[-1] - found[0] + 1 and (steps[1:] == 1).all():
        return f"{found[0]}-{found[-1]}"
    most = int(steps.max())
    width = 1 if most < 1 << 8 else 2 if most < 1 << 16 else 4
    data = base64.b64encode(steps.astype(f"<u{width}").tobytes()).decode()
    return f"{width}:{data}"


def unpacked(text: str) -> Rows:
    """Reads what ``packed`` wrote of numbers: in ascending order. Raises ValueError."""
    if not text:
        return np.empty(0, np.int64)
    width, colon, data = text.partition(":")
    if colon:
        if width not in {"1", "2", "4"}:
            raise ValueError(text)
        steps = np.frombuffer(base64.b64decode(data, validate=True), f"<u{width}")
        return np.cumsum(steps.astype(np.int64))
    first, _, last = text.partition("-")
    return np.arange(int(first), int(last) + 1, dtype=np.int64)


def digest_of(bundle: Bundle, step: StepKey, *, whole: bool = False) -> str:
    """Returns a digest of what crosses the wire: names, dtypes, shapes and bytes, by SHA-256.

    Of a tensor of more than ``SMALL_BYTES`` it takes 64 blocks of 64 bytes at equal distances, from
    a place that follows from the step, and says so: ``sample:`` in place of ``sha256:``. ``whole``:
    it takes all bytes.
    """
    found, sampled = sha256(), False
    for name, buffer in bundle.tensors.items():
        found.update(f"{name} {buffer.dtype.name} {buffer.shape} ".encode())
        if whole or buffer.data.nbytes <= SMALL_BYTES:
            found.update(buffer.data)
            continue
        sampled = True
        data = np.frombuffer(buffer.data, np.uint8)
        every = len(data) // _BLOCKS
        at = (step.round * 7919 + step.batch * 104_729) % (every - _BLOCK_BYTES + 1)
        blocks = data[: every * _BLOCKS].reshape(_BLOCKS, every)[:, at : at + _BLOCK_BYTES]
        found.update(blocks.tobytes())
    return f"{'sample' if sampled else 'sha256'}:{found.hexdigest()}"
