"""Saves a party's alignment: secrets and masked batches until it ends, then the common rows.

A party that is killed resumes with the same secrets, and masks only the unfinished batches again.
Only the user who runs the party may read the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import itertools
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import private_file, write_error
from vfl_common.psi.spill import Spill
from vfl_party.align.digest import compute_keyed_digest
from vfl_party.psi.curve import POINT_BYTES

# Name of the alignment's folder in a party's folder of a run.
FOLDER = "alignment"
_STATE, _COMMON = "state.json", "common.bits"
# The fields of ``Attempt`` that are saved. A file of an earlier release has no salt, so its attempt
# begins again.
_BYTE_FIELDS = ("name", "secret", "seed", "salt", "marks")
_DIGEST_BYTES = 32
SALT_BYTES = 32
NO_ATTEMPT = bytes(16)
# For a secret order: the numbers drawn at once, the numbers sorted in a pass, and the maximum
# number of passes.
_CHUNK, _SORTED, _PASSES = 1 << 16, 1 << 18, 16
# Row numbers take four bytes each if the table has at most 2^32 rows.
RowNumbers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Attempt:
    """One try at an alignment, the same at all parties until it succeeds or a party's rows change.

    Args:
        name: 16 random bytes from the active party, which the server does not know.
        secret: The secret with which this party masks points.
        seed: The seed of the order in which this party sends its rows.
        salt: The salt of the digests of common ids, the same at all parties.
        rows: The number of rows of each party.
        marks: The SHA-256 of the first bits from the server, which mark this party's common rows;
            empty before they arrive.
    """

    name: bytes = NO_ATTEMPT
    secret: bytes = field(default=b"", repr=False)
    seed: bytes = field(default=b"", repr=False)
    salt: bytes = field(default=b"", repr=False)
    rows: tuple[int, ...] = ()
    marks: bytes = b""

    @property
    def word(self) -> bytes:
        """The identifier of the attempt for the server, which must not know the name."""
        return hashlib.sha256(b"vfl attempt at the server" + self.name).digest()

    def order(self, rows: int) -> RowNumbers:
        """Returns the row numbers in the order in which this party sends them; see
        ``shuffle_rows``.
        """
        return shuffle_rows(self.seed, rows)


def shuffle_rows(key: bytes, rows: int) -> RowNumbers:
    """Returns the row numbers in a secret order, [rows] integers.

    Each row gets a number from a ChaCha20 stream, and the rows are sorted by these numbers. Each of
    up to ``_PASSES`` passes sorts the numbers in one part of the range, so that little memory is
    needed besides the result. Without the key, the order is indistinguishable from a random order.
    It is the same with every version of NumPy.

    Args:
        key: The secret key, 32 bytes.
        rows: The number of rows.
    """
    passes = min(_PASSES, -(-rows // _SORTED))
    order: RowNumbers = np.empty(rows, np.uint32 if rows <= 1 << 32 else np.int64)
    position = 0
    for number in range(passes):
        # This pass sorts the numbers in one part of the range.
        chunks = [
            _select_numbers(drawn, start, number, passes)
            for start, drawn in _draw_numbers(key, rows)
        ]
        numbers = np.concatenate([drawn for drawn, _ in chunks])
        places = np.concatenate([places for _, places in chunks]).astype(order.dtype)
        order[position : position + len(numbers)] = places[np.argsort(numbers, kind="stable")]
        position += len(numbers)
    return order


def _draw_numbers(key: bytes, rows: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Yields the numbers of the stream in chunks: the first row of the chunk and its numbers."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for start in range(0, rows, _CHUNK):
        count = min(_CHUNK, rows - start)
        yield start, np.frombuffer(stream.update(bytes(8 * count)), "<u8")


def _select_numbers(
    numbers: npt.NDArray[np.uint64], start: int, pass_number: int, passes: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Returns the numbers of a chunk that a pass sorts, and their rows."""
    places = np.flatnonzero(
        (numbers >> np.uint64(32)) * np.uint64(passes) >> np.uint64(32) == pass_number
    )
    return numbers[places], places + start


@dataclass(frozen=True)
class CommonRows:
    """The common rows of a party, in canonical order.

    Args:
        rows: bool [N], whether each row of this party is common.
        salt: The salt of the attempt that found the rows; empty from an earlier release.
        holders: For each passive party, bool [N], whether it holds each row. Only at the active
            party with ``rows.partial``; else empty.
    """

    rows: npt.NDArray[np.bool_]
    salt: bytes = b""
    holders: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)


def _checksum(facts: dict[str, Any]) -> str:
    """Returns a checksum that detects a damaged file."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def unpack_masks(bits: npt.NDArray[np.uint8], masks: int, rows: int) -> list[npt.NDArray[np.bool_]]:
    """Unpacks ``masks`` masks, bool [rows] each, from packed bits. Each mask begins with a new
    byte.
    """
    unpacked = np.unpackbits(bits.reshape(masks, -1), axis=1, count=rows).astype(bool)
    return list(unpacked)


def read_common_rows(run: Path, rows: int) -> npt.NDArray[np.bool_] | None:
    """Reads the common rows that a passive party saved in a run, bool [rows], in canonical order.
    Returns None if the run has saved no alignment of a table with ``rows`` rows.

    ``run``: The folder of the party in the run.
    """
    try:
        data = (run / FOLDER / _COMMON).read_bytes()
    except OSError:
        return None
    end = _DIGEST_BYTES + -(-rows // 8)
    if len(data) not in (end, end + SALT_BYTES):
        return None
    (mask,) = unpack_masks(np.frombuffer(data, np.uint8)[_DIGEST_BYTES:end], 1, rows)
    return mask


class AlignmentFiles:
    """The files of one party's alignment in one run.

    Args:
        folder: The folder of this party in the run.
        ids: The ids of this party, in canonical order.
        batch: The number of rows in a batch.
        holders: The parties whose common rows are saved separately.
        number: The number of the pass with several keys, whose files are in a folder; None for the
            files of the whole alignment.
    """

    def __init__(
        self,
        folder: Path,
        ids: Sequence[str],
        batch: int,
        holders: Sequence[str] = (),
        number: int | None = None,
    ) -> None:
        self._place = FOLDER if number is None else f"{FOLDER}/key-{number + 1}"
        self._path, self._batch, self._holders = folder / self._place, batch, holders
        self._digest = compute_keyed_digest(b"kept", ids)
        self._rows = len(ids)
        self.attempt = self._read_attempt()

    def _read_attempt(self) -> Attempt:
        try:
            facts = json.loads((self._path / _STATE).read_text())
            # The table has changed, and masking other rows with the same secrets would reveal the
            # changes.
            if bytes.fromhex(facts["ids"]) != self._digest:
                return Attempt()
            if facts.pop("sum") != _checksum(facts):
                return Attempt()
            fields = {key: bytes.fromhex(facts[key]) for key in _BYTE_FIELDS}
            return Attempt(**fields, rows=tuple(facts["rows"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Attempt()

    def begin(self, attempt: Attempt) -> None:
        """Begins an attempt, and removes the files of an earlier attempt. Raises InputError."""
        self.forget()
        self._make_folder()
        self._write_attempt(attempt)

    def pin(self, marks: bytes) -> bool:
        """Saves the digest of the first ``marks`` of the attempt. Returns whether ``marks`` are the
        same as the first ones. Raises InputError.
        """
        digest = hashlib.sha256(marks).digest()
        if not self.attempt.marks:
            self._write_attempt(replace(self.attempt, marks=digest))
        return hmac.compare_digest(self.attempt.marks, digest)

    def _write_attempt(self, attempt: Attempt) -> None:
        with private_file(self._path / _STATE) as file:
            fields = {name: getattr(attempt, name).hex() for name in _BYTE_FIELDS}
            facts = {**fields, "ids": self._digest.hex(), "rows": list(attempt.rows)}
            file.write(json.dumps({**facts, "sum": _checksum(facts)}).encode())
        self.attempt = attempt

    def _make_folder(self) -> None:
        try:
            self._path.parent.mkdir(mode=0o700, exist_ok=True)
            self._path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise write_error(self._path, error) from None

    # -- masked points on disk
    # ----------------------------------------------------------------------

    def _open_points(self, round_: int) -> Spill:
        remedy = f"Remove {self._path}; then all parties begin the alignment again."
        return Spill(self._path / f"{round_}.points", POINT_BYTES, self._batch, remedy)

    def count_stored(self, round_: int) -> int:
        """Returns the number of saved points of a round."""
        return self._open_points(round_).count_rows()

    def cut(self, round_: int, total: int) -> None:
        """Removes the points of incomplete batches of a round with ``total`` points. Raises
        InputError.
        """
        self._open_points(round_).cut(total)

    def add(self, round_: int, batch: int, points: bytes) -> None:
        """Saves the points of a batch. Raises InputError."""
        self._open_points(round_).write(batch, points)

    def points(self, round_: int, batch: int, total: int) -> bytes:
        """Returns a batch of a round with ``total`` points, 32 bytes each. Raises InputError."""
        return self._open_points(round_).read(batch, total)

    def require_distinct(self, round_: int, party: str, total: int) -> None:
        """Raises PeerError, which names ``party``, if two of the ``total`` masked points of this
        round are equal.

        Equal masked points mean that the party sent a point twice. ``curve.check_points`` sees only
        one batch at a time.
        """
        heads_N = np.empty(total, "<u8")
        for start, points in self._iterate_batches(round_, total):
            heads_N[start : start + len(points)] = points[:, 0]
        heads_N.sort()
        # The first 8 of 32 bytes of points that may occur twice.
        repeated_heads = heads_N[1:][heads_N[1:] == heads_N[:-1]]
        if not len(repeated_heads):
            return
        suspects = np.concatenate(
            [
                points[np.isin(points[:, 0], repeated_heads)]
                for _, points in self._iterate_batches(round_, total)
            ]
        )
        if len(np.unique(suspects, axis=0)) < len(suspects):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party}: sent a point twice. Run the same version of this program at all "
                "parties.",
                party=party,
            )

    def _iterate_batches(
        self, round_: int, total: int
    ) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """Yields the first row and the points, uint64 [B, 4], of each batch of a round."""
        for batch, start in enumerate(range(0, total, self._batch)):
            points = np.frombuffer(self.points(round_, batch, total), "<u8")
            yield start, points.reshape(-1, POINT_BYTES // 8)

    # -- buckets of rr22
    # ----------------------------------------------------------------------

    @property
    def buckets(self) -> Path:
        """The folder of the buckets in work."""
        return self._path / "buckets"

    @property
    def used_rr22(self) -> bool:
        """Whether this attempt has used rr22."""
        return self.buckets.exists() or self.count_buckets() > 0

    def add_bucket(self, bucket: int, rows: npt.NDArray[np.int64]) -> None:
        """Saves the common rows of a bucket. Raises InputError."""
        data = rows.astype("<i8").tobytes()
        with private_file(self._path / f"{bucket}.bucket") as file:
            file.write(self._sum_bucket(bucket, data) + data)

    def _sum_bucket(self, bucket: int, data: bytes) -> bytes:
        """Returns a checksum of a bucket of this attempt."""
        return hmac.digest(self.attempt.secret, bucket.to_bytes(8, "little") + data, "sha256")

    def read_bucket(self, bucket: int) -> npt.NDArray[np.int64]:
        """Returns the common rows of a saved bucket. Raises InputError."""
        path = self._path / f"{bucket}.bucket"
        try:
            data = path.read_bytes()
        except OSError as error:
            raise write_error(path, error) from None
        checksum, data = data[:_DIGEST_BYTES], data[_DIGEST_BYTES:]
        if checksum != self._sum_bucket(bucket, data):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: the file is damaged. Remove {self._path}; then all parties begin the "
                "alignment again.",
            )
        return np.frombuffer(data, "<i8")

    def count_buckets(self) -> int:
        """Returns the number of saved buckets."""
        return next(n for n in itertools.count() if not (self._path / f"{n}.bucket").exists())

    # -- the result
    # ----------------------------------------------------------------------

    def finish(self, common: CommonRows) -> None:
        """Saves the common rows. Raises InputError."""
        self._make_folder()
        with private_file(self._path / _COMMON) as file:
            masks = [common.rows, *(common.holders[name] for name in self._holders)]
            bits = b"".join(np.packbits(mask).tobytes() for mask in masks)
            file.write(self._digest + bits + common.salt)

    def common(self) -> CommonRows | None:
        """Returns the saved common rows; None if there are none for this party's rows."""
        return self._read_common(self._path / _COMMON)

    def common_of(self, run: Path) -> CommonRows:
        """Returns the common rows that an earlier run found. Raises InputError.

        ``run``: The folder of this party in that run.
        """
        path = run / self._place / _COMMON
        common = self._read_common(path)
        if common is not None:
            return common
        if not path.exists():
            raise InputError(
                Code.DATA_INVALID,
                f"{path}: the alignment of the run is missing. Name another run in "
                "rows.alignment, or remove the key to align again.",
            )
        raise InputError(
            Code.DATA_INVALID,
            f"{path}: the alignment of the run does not fit the rows that this party has now. "
            "Name another run in rows.alignment, or remove the key to align again.",
        )

    def _read_common(self, path: Path) -> CommonRows | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        end = _DIGEST_BYTES + (1 + len(self._holders)) * -(-self._rows // 8)
        bits, salt = np.frombuffer(data, np.uint8)[_DIGEST_BYTES:end], data[end:]
        if data[:_DIGEST_BYTES] != self._digest or len(data) not in (end, end + SALT_BYTES):
            return None
        rows, *masks = unpack_masks(bits, 1 + len(self._holders), self._rows)
        return CommonRows(rows, salt, dict(zip(self._holders, masks, strict=True)))

    def clear(self) -> None:
        """Removes secrets and masked points, but keeps the result."""
        self.attempt = Attempt()
        with contextlib.suppress(OSError):
            (self._path / _STATE).unlink(missing_ok=True)
            shutil.rmtree(self.buckets, ignore_errors=True)
            for path in (*self._path.glob("*.points"), *self._path.glob("*.bucket")):
                path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Removes all files, including the result."""
        shutil.rmtree(self._path, ignore_errors=True)
