"""What a party keeps of an alignment: its secrets and masked batches until the end, then which of its rows are common.

A party that is killed resumes with the same secrets, and masks nothing twice but the batches under way. Only their
owner may read the files.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_common.files import private_file, unwritable
from vfl_party.align.digest import keyed_digest
from vfl_party.psi.curve import POINT_BYTES

FOLDER = "alignment"  # in a party's folder of a run
_STATE, _COMMON = "state.json", "common.bits"
_DIGEST_BYTES = 32
NO_ATTEMPT = bytes(16)


@dataclass(frozen=True)
class Attempt:
    """One try at an alignment, the same at all parties until it succeeds or a party's rows change.

    ``name``: 16 random bytes, from the active party; the server does not know it. ``rows``: of each party.
    ``secret``: the key that masks. ``seal``: the key under which the others seal what is for this party. ``seed``: of
    the order in which this party shows its rows.
    """

    name: bytes = NO_ATTEMPT
    secret: bytes = field(default=b"", repr=False)
    seal: bytes = field(default=b"", repr=False)
    seed: bytes = field(default=b"", repr=False)
    rows: tuple[int, ...] = ()

    def order(self, rows: int) -> npt.NDArray[np.int64]:
        """Returns the rows in the order in which this party shows them."""
        drawn = np.random.Generator(np.random.PCG64(int.from_bytes(self.seed, "little")))
        return drawn.permutation(rows).astype(np.int64)


def _sum(facts: dict[str, Any]) -> str:
    """Returns a checksum, by which a damaged file is known."""
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


class Kept:
    """The files of one party's alignment in one run.

    Args:
        folder: this party's folder of the run.
        ids: this party's ids, in canonical order.
        batch: rows in a batch.
    """

    def __init__(self, folder: Path, ids: Sequence[str], batch: int) -> None:
        self._path, self._batch = folder / FOLDER, batch
        self._digest = keyed_digest(b"kept", ids)
        self._rows = len(ids)
        self.attempt = self._read_attempt()

    def _read_attempt(self) -> Attempt:
        try:
            found = json.loads((self._path / _STATE).read_text())
            if bytes.fromhex(found["ids"]) != self._digest:  # other rows need other secrets
                return Attempt()
            if found.pop("sum") != _sum(found):
                return Attempt()
            name, secret, seal, seed = (bytes.fromhex(found[key]) for key in ("name", "secret", "seal", "seed"))
            return Attempt(name, secret, seal, seed, tuple(found["rows"]))
        except (OSError, ValueError, KeyError, TypeError):
            return Attempt()

    def begin(self, attempt: Attempt) -> None:
        """Begins an attempt; what is left of another one is removed. Raises InputError."""
        self.forget()
        self._make_folder()
        words = {name: getattr(attempt, name).hex() for name in ("name", "secret", "seal", "seed")}
        with private_file(self._path / _STATE) as file:
            facts = {**words, "ids": self._digest.hex(), "rows": list(attempt.rows)}
            file.write(json.dumps({**facts, "sum": _sum(facts)}).encode())
        self.attempt = attempt

    def _make_folder(self) -> None:
        try:
            self._path.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise unwritable(self._path, error) from None

    # -- masked points, in files that grow ----------------------------------------------------------------------

    def _points(self, round_: int) -> Path:
        return self._path / f"{round_}.points"

    def stored(self, round_: int) -> int:
        """Returns how many points of a round are there."""
        try:
            return self._points(round_).stat().st_size // POINT_BYTES
        except OSError:
            return 0

    def cut(self, round_: int, of: int) -> None:
        """Removes what is beyond the whole batches of a round, which has ``of`` points. Raises InputError."""
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
            with os.fdopen(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600), "wb") as file:
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
            raise InputError(Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror})") from None

    # -- the result ---------------------------------------------------------------------------------------------

    def finish(self, common: npt.NDArray[np.bool_]) -> None:
        """Keeps which rows, in canonical order, are common. Raises InputError."""
        self._make_folder()
        with private_file(self._path / _COMMON) as file:
            file.write(self._digest + np.packbits(common).tobytes())

    def common(self) -> npt.NDArray[np.bool_] | None:
        """Returns which rows are common; None if that is not known, or was for other rows."""
        return self._read_common(self._path / _COMMON)

    def common_of(self, run: Path) -> npt.NDArray[np.bool_]:
        """Returns which rows are common, as found by an earlier run. Raises InputError.

        ``run``: this party's folder of that run.
        """
        path = run / FOLDER / _COMMON
        found = self._read_common(path)
        if found is None:
            text = "is missing" if not path.exists() else "is of other rows than this party has now"
            remedy = "name another run in rows.alignment, or remove it to align again"
            raise InputError(Code.DATA_INVALID, f"{path}: the alignment of the run {text}; {remedy}")
        return found

    def _read_common(self, path: Path) -> npt.NDArray[np.bool_] | None:
        try:
            data = path.read_bytes()
        except OSError:
            return None
        bits = np.frombuffer(data, np.uint8)[_DIGEST_BYTES:]
        if data[:_DIGEST_BYTES] != self._digest or len(bits) != -(-self._rows // 8):
            return None
        return np.unpackbits(bits, count=self._rows).astype(bool)

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
