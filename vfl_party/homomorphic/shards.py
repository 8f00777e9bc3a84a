"""Divides a party's computations with ciphertexts among worker processes; see ``shard``.

Columns are divided among the processes. All processes map the codes and the ciphertexts of a tree,
see ``board``, and each process converts the ciphertexts to numbers once for each tree. Except for
the random masks, the results are bit for bit the same as in one process, because the sums are exact
in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from itertools import pairwise

import numpy as np

from vfl_common.process.workers import Workers
from vfl_party.homomorphic import shard
from vfl_party.homomorphic.paillier import Numbers, PaillierAdder, PaillierKeys
from vfl_party.homomorphic.scheme import (
    Adder,
    CipherError,
    Held,
    Integers,
    Keys,
    PlainAdder,
    Wire,
    apart,
    ciphers_for,
    unpack,
)
from vfl_party.homomorphic.shard import Board
from vfl_party.homomorphic.sums import Codes, Summing, SummingHere, SumPlan

# The number of pieces for each process, so that processes wait less for the last piece. And the
# maximum number of items in a piece, because a message counts the bytes of each part in 32 bits.
_PIECES, _MAX_PIECE = 2, 1 << 19


class Shards:
    """Manages worker processes, which start with the first request and end with ``close``.

    ``first``: The first message to each process, see ``shard``. Futures raise CipherError, and
    InternalError if a process has ended.
    """

    def __init__(self, workers: int) -> None:
        self.workers = workers
        self.first = [shard.NONE]
        self._trees = 0
        self._board: Board | None = None
        self._started: Workers | None = None

    @property
    def board(self) -> Board:
        """Returns the board with the arrays that all processes share."""
        self._board = self._board or Board()
        return self._board

    def submit(self, *request: bytes) -> Future[bytes]:
        """Sends a request to the next idle process."""
        if self._started is None:
            task = "computed with the gradients of trees"
            workers = Workers(
                shard.__name__, self.workers, task, self.first, file=self.board.number
            )
            self._started = workers.__enter__()
        return self._started.submit(_parse_answer, *request)

    def next_tree(self) -> bytes:
        """Returns the number of the next tree."""
        self._trees += 1
        return str(self._trees).encode()

    def pieces(self, count: int) -> list[slice]:
        """Divides ``count`` items into pieces for the processes. No piece is empty."""
        parts = max(1, min(count, _PIECES * self.workers), -(-count // _MAX_PIECE))
        ends = [count * part // parts for part in range(parts + 1)]
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def close(self) -> None:
        """Ends the processes at once."""
        if self._started is not None:
            self._started.__exit__()
        if self._board is not None:
            self._board.close()
        self._started = self._board = None


class SharedKeys(Keys):
    """Implements ``Keys``: all worker processes compute with the same private Paillier key."""

    def __init__(self, keys: PaillierKeys, shards: Shards) -> None:
        self._keys, self._shards, self.public = keys, shards, keys.public
        shards.first = [shard.KEYS, *(_encode_number(prime, keys.width) for prime in keys.primes)]

    def encrypt(self, g_N: Integers, h_N: Integers) -> Wire:
        parts = [
            self._shards.submit(shard.ENCRYPT, g_N[piece].tobytes(), h_N[piece].tobytes())
            for piece in self._shards.pieces(len(g_N))
        ]
        return _join_results(parts, self._keys.width)

    def decrypt(self, wire: Wire, count: int) -> tuple[Integers, Integers]:
        parts = [
            self._shards.submit(shard.DECRYPT, wire[piece].tobytes())
            for piece in self._shards.pieces(len(wire))
        ]
        plain = _join_results(parts, self._keys.width // 2)
        numbers = (int.from_bytes(number.tobytes(), "little", signed=True) for number in plain)
        return unpack(apart(numbers, count))


class SharedAdder(PaillierAdder):
    """Implements ``Adder``: all worker processes compute with the same public Paillier key."""

    def __init__(self, of: PaillierAdder, shards: Shards) -> None:
        super().__init__(of.public, of.bits, of.together)
        self._shards = shards
        numbers = (str(number).encode() for number in (of.bits, of.together))
        shards.first = [shard.ADD, *numbers, of.public]

    def wire(self, held: Numbers) -> Wire:
        count = ciphers_for(len(held), self.together)
        firsts = np.arange(0, len(held), count)
        parts = []
        for piece in self._shards.pieces(count):
            # The sums of these ciphertexts, in the order that ``pack_sums`` expects.
            places = (firsts[:, None] + np.arange(count)[piece]).reshape(-1)
            raw = self.raw(held[places[places < len(held)]])
            wanted = str(piece.stop - piece.start).encode()
            parts.append(self._shards.submit(shard.PACK, wanted, raw.tobytes()))
        return _join_results(parts, self.width)


class SummingInShards(Summing):
    """Implements ``Summing`` in several processes, each for the entries of some columns."""

    def __init__(
        self, shards: Shards, adder: Adder, wire_R: Wire, codes_RF: Codes, plan: SumPlan
    ) -> None:
        """Raises CipherError if a ciphertext is out of range."""
        adder.check(wire_R)
        self._shards, self._adder, self._width = shards, adder, wire_R.shape[1]
        self._tree, board = shards.next_tree(), shards.board
        self._ciphers = board.put(wire_R)
        # In the transposed array, each column is contiguous.
        self._codes = board.put(codes_RF.T, self._ciphers)
        self._entries = plan.entries
        # Each process gets an even number of columns, because columns are summed in pairs.
        step = 2 * -(-len(plan.used) // (2 * shards.workers))
        own = np.searchsorted(plan.used, plan.entries[:, 0]) // step
        self._parts = [np.flatnonzero(own == part) for part in np.unique(own)]

    def sums(self, members: Sequence[Integers]) -> list[Held]:
        rows = self._shards.board.put(np.concatenate(list(members)), self._codes)
        ends = np.cumsum([len(places) for places in members]).astype(np.int64)
        places = (array.to_bytes() for array in (self._ciphers, self._codes, rows))
        plain = b"1" if isinstance(self._adder, PlainAdder) else b"0"
        arguments = plain, self._tree, *places, ends.tobytes()
        parts = [
            self._shards.submit(shard.SUM, *arguments, self._entries[part].tobytes())
            for part in self._parts
        ]
        sums = np.empty((len(members), len(self._entries), self._width), np.uint8)
        for part, future in zip(self._parts, parts, strict=True):
            shape = len(members), len(part), self._width
            sums[:, part] = np.frombuffer(future.result(), np.uint8).reshape(shape)
        return [self._adder.load(part) for part in sums]


def share_keys(keys: Keys, shards: Shards) -> Keys:
    """Returns keys that use all processes, if there are several processes and the scheme's library
    has no threads. Returns ``keys`` otherwise.
    """
    has_several = shards.workers > 1
    return SharedKeys(keys, shards) if has_several and isinstance(keys, PaillierKeys) else keys


def share_adder(adder: Adder, shards: Shards) -> Adder:
    """Returns an adder that uses all processes, under the conditions of ``share_keys``. Returns
    ``adder`` otherwise.
    """
    has_several = shards.workers > 1
    return SharedAdder(adder, shards) if has_several and isinstance(adder, PaillierAdder) else adder


def make_summing(
    shards: Shards, adder: Adder, wire_R: Wire, codes_RF: Codes, plan: SumPlan
) -> Summing:
    """Prepares the sums of a tree from its encrypted gradients and the codes of their rows, in
    several processes if that is faster. Raises CipherError if a ciphertext is out of range.
    """
    is_worthwhile = adder.pays_from is not None and codes_RF.size >= adder.pays_from
    if shards.workers > 1 and is_worthwhile and plan.used:
        return SummingInShards(shards, adder, wire_R, codes_RF, plan)
    return SummingHere(adder, wire_R, codes_RF, plan)


def _parse_answer(answer: list[bytes]) -> bytes:
    kind, content = answer
    if kind == shard.REFUSED:
        raise CipherError(content.decode())
    return content


def _join_results(parts: Sequence[Future[bytes]], width: int) -> Wire:
    content = bytearray().join(part.result() for part in parts)
    return np.frombuffer(content, np.uint8).reshape(-1, width)


def _encode_number(value: int, width: int) -> bytes:
    return int(value).to_bytes(width, "little")
