"""What a party saves of an alignment: secrets and masked batches until the end, then its common
rows.

A party that is killed resumes with the same secrets, and masks again only the unfinished batches.
Only their owner may read the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
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
from vfl_party.align.digest import digest_with_key
from vfl_party.psi.curve import POINT_BYTES

# Folder in a party's folder of a run.
FOLDER = "alignment"
_STATE, _COMMON = "state.json", "common.bits"
# An earlier release kept no salt: its attempts begin again.
_WORDS = ("name", "secret", "seed", "salt", "marks")
_DIGEST_BYTES = 32
SALT_BYTES = 32
NO_ATTEMPT = bytes(16)
# For a secret order: rows drawn at once, rows that a pass sorts, and maximum number of passes.
_AT_ONCE, _SORTED, _PASSES = 1 << 16, 1 << 18, 16
# Row numbers take four bytes each if the table has at most 2^32 rows.
RowNumbers = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True)
class Attempt:
    """One try at an alignment, the same at all parties until it succeeds or a party's rows change.

    Args:
        name: 16 random bytes from the active party; the server does not know it.
        secret: the key that masks.
        seed: of the order in which this party shows its rows.
        salt: of the list's digests, the same at all parties.
        rows: the number of rows of each party.
        marks: SHA-256 of the first bits from the server, which mark this party's common rows; empty
            before they arrive.
    """

    name: bytes = NO_ATTEMPT
    secret: bytes = field(default=b"", repr=False)
    seed: bytes = field(default=b"", repr=False)
    salt: bytes = field(default=b"", repr=False)
    rows: tuple[int, ...] = ()
    marks: bytes = b""

    @property
    def word(self) -> bytes:
        """Identifies the attempt to the server, which must not know the name."""
        return hashlib.sha256(b"vfl attempt at the server" + self.name).digest()

    def order(self, rows: int) -> RowNumbers:
        """Returns the rows in the order in which this party shows them; see ``shuffled``."""
        return shuffle_rows(self.seed, rows)


def shuffle_rows(key: bytes, rows: int) -> RowNumbers:
    """Returns the rows in a secret order, [rows] integers: sorted by numbers of a ChaCha20 stream.
    ``key``: 32 bytes.

    The stream is drawn for each of up to ``_PASSES`` parts of the numbers, so that memory holds
    little more than the order. Without the key it cannot be told from any other order, and it is
    the same with every version of NumPy.
    """
    passes = min(_PASSES, -(-rows // _SORTED))
    order: RowNumbers = np.empty(rows, np.uint32 if rows <= 1 << 32 else np.int64)
    end = 0
    for number in range(passes):
        # One pass sorts the drawn numbers in one part of their range.
        pieces = [_within(drawn, start, number, passes) for start, drawn in _draw(key, rows)]
        mine = np.concatenate([drawn for drawn, _ in pieces])
        places = np.concatenate([places for _, places in pieces]).astype(order.dtype)
        order[end : end + len(mine)] = places[np.argsort(mine, kind="stable")]
        end += len(mine)
    return order


def _draw(key: bytes, rows: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
    """Yields the numbers of a stream in pieces: (the first row of each, its numbers)."""
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    for start in range(0, rows, _AT_ONCE):
        count = min(_AT_ONCE, rows - start)
        yield start, np.frombuffer(stream.update(bytes(8 * count)), "<u8")


def _within(
    drawn: npt.NDArray[np.uint64], start: int, number: int, passes: int
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int64]]:
    """Returns the numbers that a pass sorts, and their rows."""
    places = np.flatnonzero((drawn >> np.uint64(32)) * np.uint64(passes) >> np.uint64(32) == number)
    return drawn[places], places + start


@dataclass(frozen=True)
class CommonRows:
    """Which of this party's rows, in canonical order, are common.

    Args:
        rows: bool [N].
        salt: of the attempt that found them; empty from an earlier release.
        holders: with ``rows.partial``, at the active party: {passive party: bool [N], the rows that
            it holds}.
    """

    rows: npt.NDArray[np.bool_]
    salt: bytes = b""
    holders: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)


def _checksum(facts: dict[str, Any]) -> str:
    """Returns a checksum that detects a damaged file."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def unpack_masks(bits: npt.NDArray[np.uint8], masks: int, rows: int) -> list[npt.NDArray[np.bool_]]:
    """Returns ``masks`` masks, bool [rows] each, from packed bits; each mask begins with a new
    byte.
    """
    unpacked = np.unpackbits(bits.reshape(masks, -1), axis=1, count=rows).astype(bool)
    return list(unpacked)


def common_rows(run: Path, rows: int) -> npt.NDArray[np.bool_] | None:
    """Returns which rows of its table a passive party knows to be common after a run, bool [rows],
    in canonical order; None if the run has saved no alignment of so many rows.

    ``run``: the party's folder of the run; ``rows``: of the table that was aligned.
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
        folder: this party's folder of the run.
        ids: this party's ids, in canonical order.
        batch: rows of a batch.
        holders: the parties whose common rows are saved separately.
    """

    def __init__(
        self, folder: Path, ids: Sequence[str], batch: int, holders: Sequence[str] = ()
    ) -> None:
        self._path, self._batch, self._holders = folder / FOLDER, batch, holders
        self._digest = digest_with_key(b"kept", ids)
        self._rows = len(ids)
        self.attempt = self._read_attempt()

    def _read_attempt(self) -> Attempt:
        try:
            facts = json.loads((self._path / _STATE).read_text())
            # Other rows need other secrets.
            if bytes.fromhex(facts["ids"]) != self._digest:
                return Attempt()
            if facts.pop("sum") != _checksum(facts):
                return Attempt()
            words = {key: bytes.fromhex(facts[key]) for key in _WORDS}
            return Attempt(**words, rows=tuple(facts["rows"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Attempt()

    def begin(self, attempt: Attempt) -> None:
        """Begins an attempt, and removes files of another one. Raises InputError."""
        self.forget()
        self._make_folder()
        self._write(attempt)

    def pin(self, marks: bytes) -> bool:
        """Returns whether ``marks`` equal those of the attempt; saves them if they are the first.
        Raises InputError.
        """
        digest = hashlib.sha256(marks).digest()
        if not self.attempt.marks:
            self._write(replace(self.attempt, marks=digest))
        return hmac.compare_digest(self.attempt.marks, digest)

    def _write(self, attempt: Attempt) -> None:
        with private_file(self._path / _STATE) as file:
            words = {name: getattr(attempt, name).hex() for name in _WORDS}
            facts = {**words, "ids": self._digest.hex(), "rows": list(attempt.rows)}
            file.write(json.dumps({**facts, "sum": _checksum(facts)}).encode())
        self.attempt = attempt

    def _make_folder(self) -> None:
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise write_error(self._path, error) from None

    # -- masked points, on the disk
    # ----------------------------------------------------------------------

    def _points(self, round_: int) -> Spill:
        remedy = f"Remove {self._path}; then all parties begin the alignment again."
        return Spill(self._path / f"{round_}.points", POINT_BYTES, self._batch, remedy)

    def count_stored(self, round_: int) -> int:
        """Returns how many points of a round are saved."""
        return self._points(round_).count_rows()

    def cut(self, round_: int, of: int) -> None:
        """Removes points beyond the whole batches of a round of ``of`` points.

        Raises InputError.
        """
        self._points(round_).cut(of)

    def add(self, round_: int, batch: int, points: bytes) -> None:
        """Saves a batch. Raises InputError."""
        self._points(round_).write(batch, points)

    def points(self, round_: int, batch: int, of: int) -> bytes:
        """Returns a batch of a round of ``of`` points, 32 bytes a point. Raises InputError."""
        return self._points(round_).read(batch, of)

    def require_distinct(self, round_: int, party: str, of: int) -> None:
        """Raises PeerError, naming ``party``, if two of the ``of`` points masked in this round are
        equal.

        A secret masks different points differently, so the party sent a point twice.
        ``curve.check`` sees only one batch at a time.
        """
        heads_N = np.empty(of, "<u8")
        for start, points in self._read(round_, of):
            heads_N[start : start + len(points)] = points[:, 0]
        heads_N.sort()
        # Points whose first 8 of 32 bytes occur twice.
        twice = heads_N[1:][heads_N[1:] == heads_N[:-1]]
        if not len(twice):
            return
        alike = np.concatenate(
            [points[np.isin(points[:, 0], twice)] for _, points in self._read(round_, of)]
        )
        if len(np.unique(alike, axis=0)) < len(alike):
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party}: sent a point twice. Run the same version of this program at all "
                "parties.",
                party=party,
            )

    def _read(self, round_: int, of: int) -> Iterator[tuple[int, npt.NDArray[np.uint64]]]:
        """Yields each batch of a round: (its first row, its points [B, 4])."""
        for batch, start in enumerate(range(0, of, self._batch)):
            points = np.frombuffer(self.points(round_, batch, of), "<u8")
            yield start, points.reshape(-1, POINT_BYTES // 8)

    # -- the result
    # ----------------------------------------------------------------------

    def finish(self, common: CommonRows) -> None:
        """Saves which rows are common. Raises InputError."""
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

        ``run``: this party's folder of that run.
        """
        path = run / FOLDER / _COMMON
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
            f"{path}: the alignment of the run is of other rows than this party has now. Name "
            "another run in rows.alignment, or remove the key to align again.",
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
            for path in self._path.glob("*.points"):
                path.unlink(missing_ok=True)

    def forget(self) -> None:
        """Removes everything, the result too."""
        shutil.rmtree(self._path, ignore_errors=True)
