"""The format of a record's lines. Each line is a JSON object.

The first key of a line gives its kind. ``record`` is the first line. ``run`` begins a generation of
a run. ``people`` names the table of people to which row numbers refer. ``way`` declares one
direction of an exchange. ``sent`` is one bundle. ``private`` is one step of training with
differential privacy. ``head`` is the head of a peer's record.

A table of people is a file with keyed digests (tags) of the ids to which the row numbers of a
record refer. A record has no ids. Only a reader who has the record's key and a person's id can find
the person. So the record shows what was sent about a person even after all files with ids have been
deleted.
"""

from __future__ import annotations

import base64
import binascii
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b, sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.bundle import Bundle, DType, StepKey
from vfl_common.errors import Code, InputError
from vfl_common.files import fsync_folder, lock_folder, private_file, write_error
from vfl_common.frames import BundleSizes, measure_bundle
from vfl_common.text import to_json

PEOPLE_FOLDER = "people"
TAG_BYTES = 16
# The name of an incomplete file.
_UNNAMED = "unnamed"
# Instead of row numbers: at most all rows of the last line of the kind ``people``.
ALL = "*"
# Instead of row numbers: no rows.
NOBODY = ""
# Instead of row numbers: an aggregate of several rows, such as a sum, a mean or weights.
TOGETHER = "+"
Rows = npt.NDArray[np.int64]
# Only a part of a larger tensor is hashed, unless the party file asks for whole digests.
SMALL_BYTES = 4096
_SAMPLE_BYTES = 1024
_KEY, _BLOCK_BYTES = b"vfl digest of a bundle", 64
_TYPES: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
TAG = np.dtype(f"V{TAG_BYTES}")
# The prefix of a text with the tags of people instead of row numbers.
_TAGGED = f"{TAG_BYTES}:"
# The number of people whose tags are written in one call.
_PEOPLE_AT_ONCE = 1 << 12


@dataclass(frozen=True)
class Route:
    """One direction of an exchange, as a ``way`` line declares it.

    ``what`` describes the tensors. ``chain`` describes the transforms, the policy and the codec.
    ``how`` describes how the method protects the tensors. ``cost`` is the privacy cost of a bundle
    for each of its rows, a ``Mechanism`` as text, or '' without differential privacy.
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
        """The key that identifies this declaration: the first 64 bits of its digest."""
        return sha256(to_json(self.fields).encode()).hexdigest()[:16]

    @property
    def fields(self) -> dict[str, Any]:
        """The values of the declaration for JSON."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


def pack_rows(rows: Sequence[int] | npt.NDArray[Any] | str | None, bound: int = 0) -> str | None:
    """Encodes row numbers as text. None and texts such as ``ALL`` stay as they are.

    This runs at every step, so it uses few calls. ``bound``: An upper bound (exclusive) of the
    numbers, or 0 if none is known.
    """
    if rows is None or isinstance(rows, str):
        return rows
    width = 2 if 0 < bound <= 1 << 16 else 4
    if not len(rows):
        return NOBODY
    data = (rows if isinstance(rows, np.ndarray) else np.asarray(rows)).astype(_TYPES[width])
    return f"{width}:{binascii.b2a_base64(data.data, newline=False).decode()}"


def unpack_rows(text: str) -> Rows:
    """Decodes the text of ``pack_rows`` to ascending row numbers.

    Raises ValueError if the text is invalid.
    """
    if not text:
        return np.empty(0, np.int64)
    width, _, data = text.partition(":")
    if width not in {"2", "4"}:
        raise ValueError("the row numbers have an unknown width")
    rows = np.frombuffer(base64.b64decode(data, validate=True), _TYPES[int(width)])
    return np.sort(rows.astype(np.int64))


def pack_tags(tags: bytes, times: Sequence[int] | npt.NDArray[Any] | None = None) -> str:
    """Encodes the tags of people as text.

    ``tags``: The concatenated tags. ``times``: How often each person occurs; None means once.
    """
    if not tags:
        return NOBODY
    text = f"{_TAGGED}{binascii.b2a_base64(tags, newline=False).decode()}"
    if times is None:
        return text
    counts = binascii.b2a_base64(np.asarray(times).astype(_TYPES[4]).tobytes(), newline=False)
    return f"{text}:{counts.decode()}"


def unpack_tags(text: str | None) -> tuple[npt.NDArray[np.void], Rows] | None:
    """Decodes the text of ``pack_tags`` to the tags and how often each person occurs.

    Returns None if the text has row numbers. Raises ValueError if the text is invalid.
    """
    if text is None or not text.startswith(_TAGGED):
        return None
    tags_text, _, counts_text = text.removeprefix(_TAGGED).partition(":")
    tags = np.frombuffer(base64.b64decode(tags_text, validate=True), TAG)
    if not counts_text:
        return tags, np.ones(len(tags), np.int64)
    times = np.frombuffer(base64.b64decode(counts_text, validate=True), _TYPES[4]).astype(np.int64)
    if len(times) != len(tags):
        raise ValueError("the numbers of tags and counts differ")
    return tags, times


class BundleForm:
    """The names, dtypes and shapes of a bundle's tensors, and what is computed from them only once.

    Mostly all bundles of one direction of an exchange have the same form. ``secret``: The 32-byte
    key of the record. Without the key, nobody can check a guess of a small bundle against its
    digest.
    """

    def __init__(self, bundle: Bundle, secret: bytes) -> None:
        self._tensors = [
            (name, buffer.dtype, buffer.shape, buffer.data.nbytes)
            for name, buffer in bundle.tensors.items()
        ]
        heads = [_form(*tensor[:3]) for tensor in self._tensors]
        # The key fills the first block of SHA-256. The hasher already has the key and the first
        # head. The heads determine all lengths, which prevents length extension.
        key = sha256(_KEY + secret).digest().ljust(_BLOCK_BYTES, b"\0")
        self._initial_hasher = sha256(key + b"".join(heads[:1]))
        self._heads = [b"", *heads[1:]][: len(heads)]
        # {(bits of the round, bits of the batch): sizes of a bundle}.
        self._sizes: dict[tuple[int, int], BundleSizes] = {}

    def is_of(self, bundle: Bundle) -> bool:
        """Returns whether a bundle has this form."""
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
        # The order of the tensors must be the same, too.
        return len(tensors) == 1 or [*tensors] == [expected[0] for expected in self._tensors]

    def sizes(self, step: StepKey, bundle: Bundle) -> BundleSizes:
        """Returns the sizes of a bundle of this form, with the result of ``measure``."""
        bits = step.round.bit_length(), step.batch.bit_length()
        size = self._sizes.get(bits)
        if size is None:
            size = self._sizes[bits] = measure_bundle(step, bundle)
        return size

    def digest(self, step: StepKey, bundle: Bundle, *, whole: bool = False) -> str:
        """Returns a keyed SHA-256 digest of the names, dtypes, shapes and bytes of a bundle.

        Of a tensor with more than ``SMALL_BYTES`` it hashes 1 KiB at an offset that depends on the
        step. The digest then begins with ``keyed-sample:`` instead of ``keyed:``. With ``whole`` it
        hashes all bytes. Records of earlier versions have digests without a key, which begin with
        ``sample:`` and ``sha256:``.
        """
        hasher, is_sampled = self._initial_hasher.copy(), False
        for head, buffer in zip(self._heads, bundle.tensors.values(), strict=True):
            data = buffer.data
            if head:
                hasher.update(head)
            if not whole and data.nbytes > SMALL_BYTES:
                is_sampled = True
                offsets = data.nbytes - _SAMPLE_BYTES + 1
                offset = (step.round * 7919 + step.batch * 104_729) % offsets
                data = data[offset : offset + _SAMPLE_BYTES]
            hasher.update(data)
        return f"{'keyed-sample' if is_sampled else 'keyed'}:{hasher.hexdigest()}"


def digest_of(bundle: Bundle, step: StepKey, secret: bytes, *, whole: bool = False) -> str:
    """Returns the digest of a bundle; see ``BundleForm.digest``."""
    return BundleForm(bundle, secret).digest(step, bundle, whole=whole)


@lru_cache(maxsize=1024)
def _form(name: str, dtype: DType, shape: tuple[int, ...]) -> bytes:
    return f"{name} {dtype.name} {shape} ".encode()


def tag_person(secret: bytes, person: str) -> bytes:
    """Returns the tag of a person's id, which has ``TAG_BYTES`` bytes."""
    return blake2b(person.encode(), key=secret, digest_size=TAG_BYTES).digest()


def write_people(folder: Path, secret: bytes, ids: Iterable[str]) -> tuple[str, int]:
    """Writes a file with the tags of ids, in the order of the ids.

    Returns the SHA-256 of the file, which is its name, and the number of ids. Raises InputError if
    the file cannot be written.
    """
    place = folder / PEOPLE_FOLDER
    digest, count = sha256(), 0
    try:
        place.mkdir(exist_ok=True, mode=0o700)
        # Only one program writes at a time, so a killed program left the incomplete files.
        with lock_folder(place):
            for incomplete in place.glob(f"*{_UNNAMED}*"):
                incomplete.unlink()
            unnamed = place / _UNNAMED
            # The tags of a large table do not fit in memory.
            remaining = iter(ids)
            with private_file(unnamed) as file:
                while people := list(itertools.islice(remaining, _PEOPLE_AT_ONCE)):
                    data = b"".join(tag_person(secret, person) for person in people)
                    digest.update(data)
                    file.write(data)
                    count += len(people)
            # An existing file is replaced, because it may be damaged.
            unnamed.replace(place / digest.hexdigest())
            fsync_folder(place)
    except OSError as error:
        raise write_error(place, error) from None
    return digest.hexdigest(), count


def find_rows(folder: Path, digest: str, wanted: bytes) -> npt.NDArray[np.int64]:
    """Returns the numbers of the rows that have the tag ``wanted``.

    ``digest``: The name of the file with the table of people. Raises InputError if the file was
    changed.
    """
    content = read_tags(folder / PEOPLE_FOLDER / digest, digest)
    tags = np.frombuffer(content, f"V{TAG_BYTES}")
    return np.flatnonzero(tags == np.void(wanted)).astype(np.int64)


def read_tags(path: Path, digest: str) -> bytes:
    """Returns the concatenated tags in a file. Raises InputError if the file was changed."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}). Restore it from a copy."
        ) from None
    if sha256(data).hexdigest() != digest:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: its SHA-256 is not the one in the record. Restore it from a copy.",
        )
    return data
