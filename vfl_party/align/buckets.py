"""Private set intersection of two parties by RR22, bucket by bucket.

Both parties deal their rows to buckets by a keyed hash of the id, and pad each bucket to the same
number of rows. The engines (``vfl_party.rr22``) intersect one bucket after the other. A party
saves the rows that it found in a bucket, so a party that is killed loses one bucket of work.

The active party learns the common rows of a bucket first and then tells the passive party. So both
lose a row that the engines lose, and the digests that the server compares are the same. To notice a
loss, both parties add the same probes to a bucket, and require that the engines find them all.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import write_error
from vfl_common.psi import NO_TAGS, PHASE
from vfl_party.align.exchanges import (
    TURNS,
    bytes_to_tensor,
    count_turn_steps,
    split_turn,
)
from vfl_party.align.rounds import Rounds
from vfl_party.align.state import CommonRows
from vfl_party.rr22 import relay
from vfl_party.rr22.turns import Buckets, Turn, divide, make_turns

# The rows that are hashed at once.
_CHUNK = 1 << 16
# The bytes of an id's hash; hexadecimal digits of a byte; decimal digits of a row's number.
_HASH_BYTES, _ROW_DIGITS = 12, 10
_HEX = np.frombuffer("".join(f"{byte:02x}" for byte in range(256)).encode(), "S2")
_PADDING_ROW = 10**_ROW_DIGITS - 1
# The row number of the first probe.
_FIRST_PROBE = 9 * 10 ** (_ROW_DIGITS - 1)
_HEADER = b"id,row\n"


class BucketRounds(Rounds):
    """One party's side of an alignment by RR22."""

    has_tags = False

    def run(self) -> CommonRows:
        """Intersects the remaining buckets, and returns which of this party's rows are common.

        Raises PeerError if an engine fails, or if the other party does not follow the protocol.
        """
        ring, context, attempt = self._ring, self._ring.context, self._files.attempt
        division, first = divide(*ring.rows), self._agreed.first[0]
        size = division.passive if ring.me else division.active
        room = (division.number, size, division.probes)
        scratch = self._files.buckets
        shutil.rmtree(scratch, ignore_errors=True)
        try:
            sources = deal(context.table.ids, attempt.salt, *room, scratch, first)
            for bucket, source in enumerate(sources, first):
                context.tick(PHASE, 0, 1, bucket, division.number)
                self._files.add_bucket(bucket, self._intersect_bucket(bucket, source, division))
        finally:
            # The folder stays until the end, as a sign that the attempt has used rr22.
            for path in scratch.glob("*"):
                shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        common = np.zeros(len(context.table), bool)
        for bucket in range(division.number):
            common[self._files.read_bucket(bucket)] = True
        self._announce(NO_TAGS)
        return CommonRows(common, attempt.salt)

    def _intersect_bucket(
        self, bucket: int, source: Path, division: Buckets
    ) -> npt.NDArray[np.int64]:
        """Returns the numbers of this party's common rows in a bucket."""
        ring, result = self._ring, source.with_suffix(".out")
        peer = ring.names[1 - ring.me]
        step = bucket * count_turn_steps(division)
        with relay.Engine(source, result, ring.me, peer) as engine:
            for turn in make_turns(division.active, division.passive):
                sizes = split_turn(turn)
                swap = self._ask if ring.me else self._answer
                swap(engine, turn, sizes, step)
                step += len(sizes)
            engine.finish()
            return read_rows(result, len(ring.context.table), division.probes, peer)

    def _ask(
        self, engine: relay.Engine, turn: Turn, sizes: Sequence[tuple[int, int]], step: int
    ) -> None:
        """Swaps a turn at the passive party."""
        asking, up, down = self._ring.make_asking(TURNS), engine.collect(turn.up), b""
        position = 0
        for batch, (up_bytes, down_bytes) in enumerate(sizes, step):
            key = self._ring.make_step(1, batch)
            chunk = up[position : position + up_bytes]
            position += up_bytes
            asking.send(key, {"messages": bytes_to_tensor(chunk)})
            # The other party's engine computes before it answers.
            asking.link.unhurried()
            down += asking.receive(key, down=down_bytes)["messages"].numpy().tobytes()
        engine.deliver(down, turn.down)

    def _answer(
        self, engine: relay.Engine, turn: Turn, sizes: Sequence[tuple[int, int]], step: int
    ) -> None:
        """Swaps a turn at the active party."""
        answering, peer = self._ring.make_answering(TURNS), self._ring.names[1]
        up, down, position = b"", None, 0
        for batch, (up_bytes, down_bytes) in enumerate(sizes, step):
            key = self._ring.make_step(1, batch)
            received = answering.collect(key, each={peer: {"up": up_bytes}})
            up += received[peer]["messages"].numpy().tobytes()
            if down is None and len(up) == turn.up.size:
                engine.deliver(up, turn.up)
                down = engine.collect(turn.down)
            chunk = (down or b"")[position : position + down_bytes]
            position += down_bytes
            answering.reply(key, {peer: {"messages": bytes_to_tensor(chunk)}})


def deal(
    ids: Sequence[str],
    salt: bytes,
    count: int,
    size: int,
    probes: int,
    folder: Path,
    first: int = 0,
) -> Iterator[Path]:
    """Deals rows to buckets, and yields the file of each bucket from ``first`` on, which is removed
    when the next one is asked for.

    Args:
        ids: The ids of this party.
        salt: The key of the hashes, 32 bytes, which both parties have.
        count: The number of buckets.
        size: The number of rows of a bucket with its probes and its padding.
        probes: The number of known common rows in a bucket.
        folder: A folder for the files, which only this user may read. It is created.
        first: The first bucket that is needed.

    Raises InputError if the folder cannot be written, or if a bucket has no room for its rows,
    which has a probability below 2^-45.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        paths = [folder / f"{bucket}.csv" for bucket in range(count)]
        held = np.zeros(count, np.int64)
        for bucket in range(first, count):
            paths[bucket].write_bytes(_HEADER)
        for start in range(0, len(ids), _CHUNK):
            chunk = ids[start : start + _CHUNK]
            hashes_NB = _hash((id_.encode() for id_ in chunk), salt, b"row")
            bucket_N = hashes_NB[:, :4].copy().view("<u4")[:, 0] % count
            lines_N = _make_lines(hashes_NB, np.arange(start, start + len(hashes_NB)))
            order_N = np.argsort(bucket_N, kind="stable")
            ends = np.searchsorted(bucket_N[order_N], np.arange(count + 1))
            held += np.diff(ends)
            for bucket in range(first, count):
                _append(paths[bucket], lines_N[order_N[ends[bucket] : ends[bucket + 1]]])
        padding = size - probes - held
        if padding.min() < 1:
            raise InputError(
                Code.DATA_INVALID,
                f"rows.psi.engine: a bucket of {size:,} rows has no room for {held.max():,} rows. "
                "Begin a new run.",
            )
        for bucket in range(first, count):
            names = (f"{bucket} {number}".encode() for number in range(probes))
            probe_rows = np.arange(_FIRST_PROBE, _FIRST_PROBE + probes)
            _append(paths[bucket], _make_lines(_hash(names, salt, b"probe"), probe_rows))
            random = np.frombuffer(os.urandom(_HASH_BYTES * int(padding[bucket])), np.uint8)
            hashes_PB = random.reshape(-1, _HASH_BYTES)
            _append(paths[bucket], _make_lines(hashes_PB, np.full(len(hashes_PB), _PADDING_ROW)))
            yield paths[bucket]
            paths[bucket].unlink()
    except OSError as error:
        raise write_error(folder, error) from None


def _hash(values: Iterable[bytes], key: bytes, kind: bytes) -> npt.NDArray[np.uint8]:
    """Returns the keyed hashes of the values, uint8 [N, bytes of a hash]."""
    hashes = b"".join(
        blake2b(value, digest_size=_HASH_BYTES, key=key, person=kind).digest() for value in values
    )
    return np.frombuffer(hashes, np.uint8).reshape(-1, _HASH_BYTES)


def _append(path: Path, lines: npt.NDArray[np.uint8]) -> None:
    with path.open("ab") as file:
        file.write(lines.tobytes())


def _make_lines(
    hashes_NB: npt.NDArray[np.uint8], rows_N: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Returns lines of CSV, uint8 [N, bytes of a line]: a hash in hexadecimal digits and a row's
    number.
    """
    lines = np.empty((len(hashes_NB), 2 * _HASH_BYTES + 1 + _ROW_DIGITS + 1), np.uint8)
    lines[:, : 2 * _HASH_BYTES] = _HEX[hashes_NB].view(np.uint8).reshape(len(lines), -1)
    lines[:, 2 * _HASH_BYTES], lines[:, -1] = ord(","), ord("\n")
    for digit in range(_ROW_DIGITS):
        lines[:, -2 - digit] = ord("0") + rows_N // 10**digit % 10
    return lines


def read_rows(result: Path, rows: int, probes: int, party: str) -> npt.NDArray[np.int64]:
    """Returns the rows in the engine's result, without the probes. Raises PeerError, which names
    ``party``, if these cannot be rows of this party, or if a probe is missing.
    """
    rows_F: npt.NDArray[np.int64]
    try:
        rows_F = np.loadtxt(result, np.int64, delimiter=",", skiprows=1, usecols=1, ndmin=1)
    except OSError as error:
        raise write_error(result, error) from None
    except (ValueError, OverflowError):
        rows_F = np.array([-1])
    is_probe = (rows_F >= _FIRST_PROBE) & (rows_F < _FIRST_PROBE + probes)
    probes_P = np.unique(rows_F[is_probe])
    rows_F = rows_F[~is_probe]
    is_valid = np.all((rows_F >= 0) & (rows_F < rows)) and len(np.unique(rows_F)) == len(rows_F)
    if not is_valid:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{party}: the engine rr22 found rows that are not in the table. Begin a new run.",
            party=party,
        )
    if len(probes_P) < probes:
        raise PeerError(
            Code.ROWS_DIFFER,
            f"{party}: the engine rr22 loses rows: it found {len(probes_P):,} of {probes:,} "
            'rows that are known to be common. Set rows.psi.engine = "x25519".',
            party=party,
        )
    return rows_F
