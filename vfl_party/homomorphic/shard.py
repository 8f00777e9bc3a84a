"""Runs a process that computes with ciphertexts for ``shards``: ``python -m
vfl_party.homomorphic.shard FILE``, where FILE is the descriptor of a board.

It answers messages, see ``vfl_common.process.workers``. First, without an answer: ``keys`` and the
primes of a private key; ``add``, its bits, how many sums a ciphertext carries, and a public key; or
``none``. Then

- ``encrypt`` with g and h; ``decrypt`` with ciphertexts; ``pack`` with the number of wanted
ciphertexts and the sums to pack: see ``PaillierKeys`` and ``PaillierAdder``;
- ``sum``: whether the gradients are plain, the number of the tree, the places of its ciphertexts,
  codes and rows, where each node's rows end, and the wanted entries.

The answer is ``done`` and bytes, or ``refused`` and the text of a CipherError. Arrays are not sent:
one process writes them to a board, a file in memory, and all processes map it.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import astuple, dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Any, BinaryIO, Self

import gmpy2
import numpy as np
import numpy.typing as npt

from vfl_common.process.workers import work
from vfl_party.homomorphic.paillier import PaillierAdder, PaillierKeys
from vfl_party.homomorphic.scheme import Adder, CipherError, Held, PlainAdder, Wire
from vfl_party.homomorphic.sums import SumPlan, sum_entries

KEYS, ADD, NONE = b"keys", b"add", b"none"
ENCRYPT, DECRYPT, PACK, SUM = b"encrypt", b"decrypt", b"pack", b"sum"
DONE, REFUSED = b"done", b"refused"
Array = npt.NDArray[Any]
# Arrays begin at multiples of this number of bytes.
_STEP = 64


@dataclass(frozen=True)
class BoardPlace:
    """The position of an array in the file. ``at``, ``end``: Its first byte and the byte after it.
    ``width``: The length of its rows; 0 for an array of one dimension.
    """

    at: int
    end: int
    rows: int
    width: int

    def to_bytes(self) -> bytes:
        """Returns the place as bytes for a message."""
        return np.array(astuple(self), np.int64).tobytes()

    @classmethod
    def read(cls, written: bytes) -> Self:
        """Returns the place that ``to_bytes`` has encoded."""
        return cls(*np.frombuffer(written, np.int64).tolist())

    @property
    def shape(self) -> tuple[int, ...]:
        """Returns the array's shape."""
        return (self.rows, self.width) if self.width else (self.rows,)


class Board:
    """A file in memory that shares arrays between the processes of one party.

    The file has no name, so it disappears with the last process that has it open. Containers limit
    ``/dev/shm`` to 64 MiB, but this file is limited only by the memory of the process.

    ``number``: The descriptor of the file if a parent process has created it.
    """

    def __init__(self, number: int | None = None) -> None:
        self._file: BinaryIO = _create_file() if number is None else os.fdopen(number, "rb")

    @property
    def number(self) -> int:
        """Returns the file's descriptor."""
        return self._file.fileno()

    def put(self, array: Array, after: BoardPlace | None = None) -> BoardPlace:
        """Writes an array of one or two dimensions after the array at ``after``, or at the
        beginning. Returns its place. No process may be reading the overwritten bytes.
        """
        at = 0 if after is None else -(-after.end // _STEP) * _STEP
        place = BoardPlace(
            at, at + array.nbytes, len(array), array.shape[1] if array.ndim > 1 else 0
        )
        if array.size:
            np.memmap(self._file, array.dtype, "r+", at, array.shape)[...] = array
        return place

    def get(self, place: BoardPlace, kind: type[np.generic]) -> Array:
        """Returns the array at a place, mapped: it is not copied."""
        if place.at == place.end:
            return np.empty(place.shape, kind)
        return np.memmap(self._file, kind, "r", place.at, place.shape)

    def close(self) -> None:
        """Closes the file in this process."""
        self._file.close()


def _create_file() -> BinaryIO:
    """Creates the file; on systems without files in memory, an unnamed file on disk."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("vfl-board"), "w+b")
    return tempfile.TemporaryFile()


class Shard:
    """The state of one process: a key, the board, and the gradients of the growing tree."""

    def __init__(self, board: Board, first: list[bytes]) -> None:
        self._board, (role, *arguments) = board, first
        self._tree, self._held = b"", None
        self._adder: Adder = PlainAdder()
        self._keys: PaillierKeys | None = None
        if role == KEYS:
            self._keys = PaillierKeys(
                *(gmpy2.mpz(int.from_bytes(prime, "little")) for prime in arguments)
            )
        elif role == ADD:
            bits, together, public = arguments
            self._adder = PaillierAdder(public, int(bits), int(together))

    def answer(self, request: list[bytes]) -> list[bytes]:
        """Carries out a request and returns its answer."""
        kind, *arguments = request
        try:
            return [DONE, _HANDLERS[kind](self, *arguments)]
        except CipherError as error:
            return [REFUSED, str(error).encode()]

    def encrypt(self, g: bytes, h: bytes) -> bytes:
        """Encrypts pairs, int64 each, and returns the ciphertexts."""
        assert self._keys is not None  # noqa: S101 - only processes with keys get this request
        pairs = np.frombuffer(g, np.int64), np.frombuffer(h, np.int64)
        return self._keys.encrypt(*pairs).tobytes()

    def decrypt(self, wire: bytes) -> bytes:
        """Decrypts ciphertexts and returns the plaintexts. A plaintext has half as many bytes as a
        ciphertext.
        """
        assert self._keys is not None  # noqa: S101 - only processes with keys get this request
        width = self._keys.width
        plaintexts = self._keys.plain(_decode_ciphers(wire, width))
        return b"".join(plain.to_bytes(width // 2, "little", signed=True) for plain in plaintexts)

    def pack(self, count: bytes, raw: bytes) -> bytes:
        """Packs sums for the wire into ``count`` ciphertexts."""
        adder = self._adder
        assert isinstance(adder, PaillierAdder)  # noqa: S101 - only processes with Paillier get this request
        return adder.pack_sums(adder.load(_decode_ciphers(raw, adder.width)), int(count)).tobytes()

    def sum(self, plain: bytes, tree: bytes, *arguments: bytes) -> bytes:
        """Returns the sums of each node's entries, one node after the other."""
        ciphers, codes, rows = (BoardPlace.read(place) for place in arguments[:3])
        ends, plan = np.frombuffer(arguments[3], np.int64).tolist(), _make_plan(arguments[4])
        adder: Adder = PlainAdder() if plain == b"1" else self._adder
        if tree != self._tree:
            # The ciphertexts of the last tree are freed first.
            self._held = None
            self._held, self._tree = adder.load(self._board.get(ciphers, np.uint8)), tree
        codes_RF, all_rows = self._board.get(codes, np.int8).T, self._board.get(rows, np.int64)
        parts: list[Held] = [
            sum_entries(adder, self._held, all_rows[begin:end], codes_RF, plan)
            for begin, end in pairwise([0, *ends])
        ]
        return adder.raw(adder.concatenate(parts)).tobytes()


_HANDLERS: dict[bytes, Any] = {
    ENCRYPT: Shard.encrypt,
    DECRYPT: Shard.decrypt,
    PACK: Shard.pack,
    SUM: Shard.sum,
}


@lru_cache(maxsize=2)
def _make_plan(entries: bytes) -> SumPlan:
    return SumPlan.of(np.frombuffer(entries, np.int32).reshape(-1, 4))


def _decode_ciphers(written: bytes, width: int) -> Wire:
    return np.frombuffer(written, np.uint8).reshape(-1, width)


def main() -> None:
    """Answers requests on standard input until it ends."""
    board = Board(int(sys.argv[1]))
    work(lambda first: Shard(board, first).answer)


if __name__ == "__main__":
    main()
