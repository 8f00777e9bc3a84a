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
from vfl_common.wire.frames import BundleSizes, measure
from vfl_party.record.people import TAG_BYTES

# In place of rows: all rows of the last line of the kind ``people``, at most.
ALL = "*"
# In place of rows: none.
NOBODY = ""
# In place of rows: several together, as in a sum, a mean or weights.
TOGETHER = "+"
Rows = npt.NDArray[np.int64]
# A larger bundle is not hashed as a whole, unless the party wants it.
SMALL_BYTES = 4096
_SAMPLE_BYTES = 1024
_KEY, _BLOCK_BYTES = b"vfl digest of a bundle", 64
_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
TAG = np.dtype(f"V{TAG_BYTES}")
# The prefix of people that are named by their tags instead of by row numbers.
_TAGGED = f"{TAG_BYTES}:"


@dataclass(frozen=True)
class Route:
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
        """The declaration for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def pack_rows(rows: Sequence[int] | npt.NDArray[Any] | str | None, bound: int = 0) -> str | None:
    """Writes numbers of rows, in any order; None and words such as ``ALL`` as they are. It is done
    at every step, so it takes few calls.

    ``bound``: all numbers are below it; 0: that is not known.
    """
    if rows is None or isinstance(rows, str):
        return rows
    width = 2 if 0 < bound <= 1 << 16 else 4
    if not len(rows):
        return NOBODY
    data = (rows if isinstance(rows, np.ndarray) else np.asarray(rows)).astype(_TYPES[width])
    return f"{width}:{binascii.b2a_base64(data.data, newline=False).decode()}"


def unpack_rows(text: str) -> Rows:
    """Reads what ``packed`` wrote of numbers: in ascending order. Raises ValueError."""
    if not text:
        return np.empty(0, np.int64)
    width, _, data = text.partition(":")
    if width not in {"2", "4"}:
        raise ValueError(text)
    rows = np.frombuffer(base64.b64decode(data, validate=True), _TYPES[int(width)])
    return np.sort(rows.astype(np.int64))


def pack_tags(tags: bytes, times: Sequence[int] | npt.NDArray[Any] | None = None) -> str:
    """Writes people by their tags, one after the other. ``times``: how often each is disclosed;
    None: once.
    """
    if not tags:
        return NOBODY
    text = f"{_TAGGED}{binascii.b2a_base64(tags, newline=False).decode()}"
    if times is None:
        return text
    counts = binascii.b2a_base64(np.asarray(times).astype(_TYPES[4]).tobytes(), newline=False)
    return f"{text}:{counts.decode()}"


def unpack_tags(text: str | None) -> tuple[npt.NDArray[np.void], Rows] | None:
    """Reads what ``packed_tags`` wrote: the tags, and how often each is disclosed; None if rows are
    given by number. Raises ValueError.
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


class BundleForm:
    """What bundles have in common whose tensors have the same names, dtypes and shapes: mostly all
    of one way. It is worked out once: at every step, each call finds cold caches.

    ``secret``: of the record, 32 bytes. Without it, a guess of a small bundle cannot be compared
    with its digest.
    """

    def __init__(self, bundle: Bundle, secret: bytes) -> None:
        self._tensors = [
            (name, buffer.dtype, buffer.shape, buffer.data.nbytes)
            for name, buffer in bundle.tensors.items()
        ]
        heads = [_form(*tensor[:3]) for tensor in self._tensors]
        # The key fills the first block of SHA-256, and the first head is in the digest already.
        # Lengths follow from the heads, so that no digest continues another.
        key = sha256(_KEY + secret).digest().ljust(_BLOCK_BYTES, b"\0")
        self._begun = sha256(key + b"".join(heads[:1]))
        self._heads = [b"", *heads[1:]][: len(heads)]
        # {bits of the step's round and batch: the sizes of a bundle}.
        self._sizes: dict[tuple[int, int], BundleSizes] = {}

    def is_of(self, bundle: Bundle) -> bool:
        """Whether a bundle has this form."""
        tensors = bundle.tensors
        if len(tensors) != len(self._tensors):
            return False
        for name, dtype, shape, nbytes in self._tensors:
            tensor = tensors.get(name)
            if (
                tensor is None
                or tensor.dtype != dtype
                or tensor.shape != shape
                or tensor.data.nbytes != nbytes
            ):
                return False
        # In this order, too.
        return len(tensors) == 1 or [*tensors] == [known[0] for known in self._tensors]

    def sizes(self, step: StepKey, bundle: Bundle) -> BundleSizes:
        """Returns the size of a bundle of this form, as ``measure`` does."""
        bits = step.round.bit_length(), step.batch.bit_length()
        size = self._sizes.get(bits)
        if size is None:
            size = self._sizes[bits] = measure(step, bundle)
        return size

    def digest(self, step: StepKey, bundle: Bundle, *, whole: bool = False) -> str:
        """Returns a digest of what crosses the wire: names, dtypes, shapes and bytes, by SHA-256
        with a key.

        Of a tensor of more than ``SMALL_BYTES`` it takes 1 KiB, from a place that follows from the
        step, and says so: ``keyed-sample:`` in place of ``keyed:``. ``whole``: it takes all bytes.
        Records of earlier versions have ``sample:`` and ``sha256:``, without a key.
        """
        hasher, sampled = self._begun.copy(), False
        for head, buffer in zip(self._heads, bundle.tensors.values(), strict=True):
            data = buffer.data
            if head:
                hasher.update(head)
            if not whole and data.nbytes > SMALL_BYTES:
                sampled = True
                places = data.nbytes - _SAMPLE_BYTES + 1
                first = (step.round * 7919 + step.batch * 104_729) % places
                data = data[first : first + _SAMPLE_BYTES]
            hasher.update(data)
        return f"{'keyed-sample' if sampled else 'keyed'}:{hasher.hexdigest()}"


def digest_of(bundle: Bundle, step: StepKey, secret: bytes, *, whole: bool = False) -> str:
    """Returns the digest of a bundle; see ``BundleForm.digest``."""
    return BundleForm(bundle, secret).digest(step, bundle, whole=whole)


@lru_cache(maxsize=1024)
def _form(name: str, dtype: DType, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype.name} {shape} ".encode()
