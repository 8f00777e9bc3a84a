"""What a party keeps of an alignment: its secrets and masked batches until the end, then which of
its rows are common.

A party that is killed resumes with the same secrets, and masks nothing twice but the batches under
way. Only their owner may read the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import private_file, unwritable
from vfl_party.align.digest import keyed_digest
from vfl_party.psi.curve import POINT_BYTES

# In a party's folder of a run.
FOLDER = "alignment"
_STATE, _COMMON = "state.json", "common.bits"
# An earlier release kept no salt: its attempts begin anew.
_WORDS = ("name", "secret", "seed", "salt", "marks")
_DIGEST_BYTES = 32
SALT_BYTES = 32
NO_ATTEMPT = bytes(16)


@dataclass(frozen=True)
class Attempt:
    """One try at an alignment, the same at all parties until it succeeds or a party's rows change.

    ``name``: 16 random bytes, from the active party; the server does not know it. ``rows``: of each
    party. ``secret``: the key that masks. ``seed``: of the order in which this party shows its
    rows. ``salt``: of the list's digests, the same at all parties. ``marks``: SHA-256 of the first
    bits from the server, which say what rows of this party are common; empty before they have come.
    """

    name: bytes = NO_ATTEMPT
    secret: bytes = field(default=b"", repr=False)
    seed: bytes = field(default=b"", repr=False)
    salt: bytes = field(default=b"", repr=False)
    rows: tuple[int, ...] = ()
    marks: bytes = b""

    def order(self, rows: int) -> npt.NDArray[np.int64]:
        """Returns the rows in the order in which this party shows them; see ``shuffled``."""
        return shuffled(self.seed, rows)


def shuffled(key: bytes, rows: int) -> npt.NDArray[np.int64]:
    """Returns rows in a secret order: sorted by numbers of a ChaCha20 stream. ``key``: 32 bytes.

    Nobody who lacks the key can tell it from any other order, and it is the same with every version
    of NumPy.
    """
    stream = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    drawn = np.frombuffer(stream.update(bytes(8 * rows)), "<u8")
    return np.argsort(drawn, kind="stable").astype(np.int64)


@dataclass(frozen=True)
class Common:
    """Which of this party's rows, in canonical order, are common. ``salt``: of the attempt that
    found them. ``holders``: with ``rows.partial``, at the active party: {passive party: which rows
    it holds}.

    An alignment of an earlier release has left no salt.
    """

    rows: npt.NDArray[np.bool_]
    salt: bytes = b""
    holders: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict)


def _sum(facts: dict[str, Any]) -> str:
    """Returns a checksum, by which a damaged file is known."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def unpacked(bits: npt.NDArray[np.uint8], masks: int, rows: int) -> list[npt.NDArray[np.bool_]]:
    """Returns ``masks`` masks, [rows] each, of which each begins with a new byte."""
    found = np.unpackbits(bits.reshape(masks, -1), axis=1, count=rows).astype(bool)
    return list(found)


class Kept:
    """The files of one party's alignment in one run.

    Args:
        folder: this party's folder of the run.
        ids: this party's ids, in canonical order.
        batch: rows in a batch.
        holders: the parties whose rows among these are told apart.
    """

    def __init__(
        self, folder: Path, ids: Sequence[str], batch: int, holders: Sequence[str] = ()
    ) -> None:
        self._path, self._batch, self._holders = folder / FOLDER, batch, holders
        self._digest = keyed_digest(b"kept", ids)
        self._rows = len(ids)
        self.attempt = self._read_attempt()

    def _read_attempt(self) -> Attempt:
        try:
            found = json.loads((self._path / _STATE).read_text())
            # Other rows need other secrets.
            if bytes.fromhex(found["ids"]) != self._digest:
                return Attempt()
            if found.pop("sum") != _sum(found):
                return Attempt()
            words = {key: bytes.fromhex(found[key]) for key in _WORDS}
            return Attempt(**words, rows=tuple(found["rows"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Attempt()

    def begin(self, attempt: Attempt) -> None:
        """Begins an attempt; what is left of another one is removed. Raises InputError."""
        self.forget()
        self._make_folder()
        self._write(attempt)

    def pin(self, marks: bytes) -> bool:
        """Returns whether ``marks`` are those that the attempt has had before; the first ones are
        noted, on the disk.

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
            file.write(json.dumps({**facts, "sum": _sum(facts)}).encode())
        self.attempt = attempt

    def _make_folder(self) -> None:
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise unwritable(self._path, error) from None

    # -- masked points, in files that grow
    # ----------------------------------------------------------------------

    def _points(self, round_: int) -> Path:
        return self._path / f"{round_}.points"

    def stored(self, round_: int) -> int:
        """Returns how many points of a round are there."""
        try:
            return self._points(round_).stat().st_size // POINT_BYTES
        except OSError:
            return 0

    def cut(self, round_: int, of: int) -> None:
        """Removes what is beyond the whole batches of a round, which has ``of`` points. Raises
        InputError.
        """
        path, found = self._points(round_), self.stored(round_)
        try:
            if path.exists() and found != of:
                os.truncate(path, min(found, of) // self._batch * self._batch * POINT_BYTES)
        except OSError as error:
            raise unwritable(path, error) from None

    def add(self, round_: int, points: bytes) -> None:
        """Appends a batch. Raises InputError."""
        path = self._points(round_)
        try:
            with os.fdopen(
                os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "wb"
            ) as file:
                file.write(points)
        except OSError as error:
            raise unwritable(path, error) from None

    def points(self, round_: int, start: int, stop: int) -> bytes:
        """Returns the points ``start`` to ``stop`` of a round. Raises InputError."""
        path = self._points(round_)
        try:
            with path.open("rb") as file:
                file.seek(start * POINT_BYTES)
                return file.read((stop - start) * POINT_BYTES)
        except OSError as error:
            raise InputError(
                Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror})"
            ) from None

    def require_distinct(self, round_: int, party: str) -> None:
        """Raises PeerError, naming ``party``, if it has sent a point twice among those that this
        round has masked.

        A secret masks different points differently. ``curve.check`` sees one batch at a time.
        """
        path = self._points(round_)
        try:
            points = np.memmap(path, "<u8", "r").reshape(-1, POINT_BYTES // 8)
        except (OSError, ValueError):
            raise InputError(
                Code.FILE_INVALID, f"{path}: cannot be read; begin the run anew"
            ) from None
        heads = np.sort(points[:, 0])
        # In their first 8 of 32 bytes.
        alike = points[np.isin(points[:, 0], heads[1:][heads[1:] == heads[:-1]])]
        if len(np.unique(alike, axis=0)) < len(alike):
            text = (
                f"{party} sent a point twice; run the same version of this program at all parties"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=party)

    # -- the result
    # ----------------------------------------------------------------------

    def finish(self, common: Common) -> None:
        """Keeps which rows are common. Raises InputError."""
        self._make_folder()
        with private_file(self._path / _COMMON) as file:
            masks = [common.rows, *(common.holders[name] for name in self._holders)]
            bits = b"".join(np.packbits(each).tobytes() for each in masks)
            file.write(self._digest + bits + common.salt)

    def common(self) -> Common | None:
        """Returns which rows are common; None if that is not known, or was for other rows."""
        return self._read_common(self._path / _COMMON)

    def common_of(self, run: Path) -> Common:
        """Returns which rows are common, as found by an earlier run. Raises InputError.

        ``run``: this party's folder of that run.
        """
        path = run / FOLDER / _COMMON
        found = self._read_common(path)
        if found is None:
            text = "is missing" if not path.exists() else "is of other rows than this party has now"
            remedy = "name another run in rows.alignment, or remove it to align again"
            raise InputError(
                Code.DATA_INVALID, f"{path}: the alignment of the run {text}; {remedy}"
            )
        return found

    def _read_common(self, path: Path) -> Common | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        end = _DIGEST_BYTES + (1 + len(self._holders)) * -(-self._rows // 8)
        bits, salt = np.frombuffer(data, np.uint8)[_DIGEST_BYTES:end], data[end:]
        if data[:_DIGEST_BYTES] != self._digest or len(data) not in (end, end + SALT_BYTES):
            return None
        rows, *masks = unpacked(bits, 1 + len(self._holders), self._rows)
        return Common(rows, salt, dict(zip(self._holders, masks, strict=True)))

    def clear(self) -> None:
        """Removes secrets and masked points, but not the result."""
        self.attempt = Attempt()
        with contextlib.suppress(OSError):
            (self._path / _STATE).unlink(missing_ok=True)
            for each in self._path.glob("*.points"):
                each.unlink(missing_ok=True)

    def forget(self) -> None:
        """Removes all, the result too."""
        shutil.rmtree(self._path, ignore_errors=True)
