"""Runs a process that computes with ciphertexts for ``shards``: ``python -m
vfl_party.homomorphic.shard FILE``, where FILE is the descriptor of a board.

It answers messages, see ``vfl_common.process.workers``. First, without an answer: ``keys`` and the
primes of a private key; ``add``, its bits, how many sums a ciphertext carries, and a public key; or
``none``. Then

- ``encrypt`` with g and h; ``decrypt`` with ciphertexts; ``pack`` with the number of wanted
ciphertexts and the sums to pack: see ``PaillierKeys`` and ``PaillierAdder``;
- ``sum``: whether the gradients are plain, the number of the tree, the places of its ciphertexts,
  codes and rows, where each node's rows end, and the wanted entries.

The answer is ``done`` and bytes, or ``refused`` and the text of a CipherError.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from itertools import pairwise
from typing import Any

import gmpy2
import numpy as np

from vfl_common.process.workers import work
from vfl_party.homomorphic.board import Board, BoardPlace
from vfl_party.homomorphic.none import PlainAdder
from vfl_party.homomorphic.paillier import PaillierAdder, PaillierKeys
from vfl_party.homomorphic.scheme import Adder, CipherError, Held, Wire
from vfl_party.homomorphic.sums import SumPlan, sum_entries

KEYS, ADD, NONE = b"keys", b"add", b"none"
ENCRYPT, DECRYPT, PACK, SUM = b"encrypt", b"decrypt", b"pack", b"sum"
DONE, REFUSED = b"done", b"refused"


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
