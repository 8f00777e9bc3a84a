"""The turns in which the engines of RR22 send each other messages, and their sizes.

An engine pads nothing, but a turn has a size that depends only on the padded sizes of both sets
(``make_turns``). Messages of other names, lengths or announcements are an error, at both parties
and before an engine sees them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.pb.vfl.v1.engine_pb2 import EngineRows

# A set is padded to one of these numbers of rows. {rows of the larger set: (bytes of a message of
# the sender's oblivious transfers, 1-KiB batches of the receiver's transfers, bytes of its encoded
# set)}, as the engine sends them; a test compares them with the engine.
_SIZES = {
    1024: (512, 862, 23_488),
    2048: (768, 869, 44_752),
    4096: (1024, 875, 86_512),
    8192: (1280, 882, 168_928),
    16_384: (1536, 889, 332_336),
    32_768: (1792, 895, 696_512),
    49_152: (2048, 902, 1_052_112),
    65_536: (2048, 902, 1_408_512),
    98_304: (2304, 909, 2_121_888),
    131_072: (2304, 909, 2_831_616),
    163_840: (2560, 915, 3_552_640),
    196_608: (2560, 915, 4_260_864),
    229_376: (2560, 915, 4_964_512),
    262_144: (2560, 915, 5_679_104),
    294_912: (2560, 915, 6_404_832),
    327_680: (2816, 922, 7_119_360),
    360_448: (2816, 922, 7_831_296),
    393_216: (2816, 922, 8_540_928),
}
# The engine sends at most 4 MiB in a message, the window of HTTP/2, and 10 bytes a row.
MAX_ROWS = max(_SIZES)
# The encoded set is sent in pieces of this size.
_PIECE = 1_600_000
# The engine compares hashes of this many bits beyond the logarithm of the number of pairs.
_STATISTICAL_BITS = 40
# Probes find a loss of 0.4 % of the rows of a bucket of 32,768 rows with a probability of 98 %.
_ROWS_A_PROBE, _MIN_PROBES = 32, 64
_KIB, _KIBS_A_MESSAGE = 1024, 64
_TREES, _TREE_CHECK = 53, 13_568
_GATHERED, _OVERHEAD = 64, 64
# The last word of a stage.
FINISHED = b"p_finished"


@dataclass(frozen=True)
class Part:
    """What one party sends in a turn.

    Args:
        names: The names of the engine's messages.
        content: The bytes of all messages together.
        values: {name: the only content that a message may have}.
        rows: If the first message has the positions of common rows: the number of rows that the
            positions are below. ``content`` is then a maximum.
        is_free: Whether ``content`` is a maximum.
    """

    names: tuple[bytes, ...] = ()
    content: int = 0
    values: Mapping[bytes, bytes] = field(default_factory=dict)
    rows: int = 0
    is_free: bool = False

    @property
    def messages(self) -> int:
        """The number of messages."""
        return len(self.names)

    @property
    def size(self) -> int:
        """The bytes on the wire, with room for the names."""
        return self.content + _OVERHEAD * len(self.names)

    def allows(self, messages: Sequence[Message]) -> bool:
        """Returns whether these may be the messages of this turn."""
        content = {message.key: message.value for message in messages}
        if sorted(message.key for message in messages) != sorted(self.names):
            return False
        if any(content[name] != value for name, value in self.values.items()):
            return False
        size = sum(map(len, content.values()))
        if size > self.content or (size < self.content and not (self.is_free or self.rows)):
            return False
        if not self.rows:
            return True
        positions = content[self.names[0]]
        if len(positions) % 4 or len(positions) < size:
            return False
        rows_P = np.frombuffer(positions, "<u4")
        return bool(np.all(rows_P < self.rows)) and len(np.unique(rows_P)) == len(rows_P)


class Turn(NamedTuple):
    """A turn: the passive party sends ``up``, and the active party answers with ``down``."""

    up: Part
    down: Part


class Buckets(NamedTuple):
    """How two sets are divided. Each bucket of a party is padded to the same number of rows.

    ``number``: the number of buckets; ``active``, ``passive``: the padded rows of a bucket.
    """

    number: int
    active: int
    passive: int

    @property
    def probes(self) -> int:
        """The number of known common rows in each bucket, by which lost rows are noticed."""
        return count_probes(min(self.active, self.passive))


def count_probes(size: int) -> int:
    """Returns the number of known common rows in a bucket of ``size`` padded rows."""
    return max(_MIN_PROBES, size // _ROWS_A_PROBE)


def divide(active: int, passive: int) -> Buckets:
    """Returns how sets of these sizes are divided into buckets: few, with little padding.

    Rows are dealt by a hash, so a bucket has room for eight standard deviations above the mean.
    Each bucket has at least one row of padding. So no two sets are equal, and the digests of whole
    sets that engines compare first tell nothing.
    """
    minimum = 1
    while _need(max(active, passive), minimum) > MAX_ROWS - count_probes(MAX_ROWS):
        minimum += max(1, minimum // 16)

    def make(count: int) -> Buckets:
        return Buckets(count, _pad(_need(active, count)), _pad(_need(passive, count)))

    candidates = [make(count) for count in range(minimum, minimum + 1 + minimum // 4 + 4)]
    return min(candidates, key=_estimate_cost)


def _need(rows: int, buckets: int) -> int:
    mean = rows / buckets
    return 1 + (rows if buckets == 1 else math.ceil(mean + 8 * math.sqrt(mean) + 8))


def _pad(rows: int) -> int:
    return next((size for size in _SIZES if size - count_probes(size) >= rows), MAX_ROWS)


def _estimate_cost(buckets: Buckets) -> int:
    """Returns the time of an alignment as a number of rows. A bucket costs half a second more."""
    return buckets.number * (buckets.active + buckets.passive + 100_000)


def make_turns(receiver: int, sender: int) -> list[Turn]:
    """Returns the turns of a bucket. The active party is the receiver, rank 0 of the engine.

    Args:
        receiver: The padded rows of the active party.
        sender: The padded rows of the passive party.
    """
    # The engine encodes the receiver's set with room for the larger set.
    transfers, kibs, encoded = _SIZES[max(receiver, sender)]
    pairs_bits = math.ceil(math.log2(receiver * sender))
    hash_bytes = min(16, math.ceil((_STATISTICAL_BITS + pairs_bits) / 8))
    large, small = divmod(kibs, _KIBS_A_MESSAGE)
    numbers = [EngineRows(rows=rows).SerializeToString() for rows in (sender, receiver)]

    def gather(name: bytes, values: Sequence[bytes] = ()) -> Turn:
        name += b":ALLGATHER"
        fixed = [{name: value} for value in values] or [{}, {}]
        up, down = (Part((name,), _GATHERED, content, is_free=True) for content in fixed)
        return Turn(up, down)

    def direct(context: bytes, first: int, count: int, content: int, *, up: bool) -> Part:
        way = b"1->0" if up else b"0->1"
        names = (b"root-%b:P2P-%d:%b" % (context, n, way) for n in range(first, first + count))
        return Part((*names,), content)

    barrier = Part((b"root:5:BARRIER",))
    masks = direct(b"intersection", 1, 2, hash_bytes * sender, up=True)
    common = direct(b"intersection", 1, 2, 4 * min(receiver, sender), up=False)
    return [
        gather(b"root:1"),
        gather(b"root-0:1", [FINISHED] * 2),
        gather(b"root:2"),
        gather(b"root:3"),
        gather(b"root:4", numbers),
        gather(b"root-1:1", [FINISHED] * 2),
        Turn(barrier, barrier),
        gather(b"root-read:1", numbers),
        Turn(Part(), direct(b"read", 1, 2, 48, up=False)),
        Turn(
            direct(b"read", 1, 1, 4096, up=True),
            direct(b"read", 3, 1 + large + small, 4096 + kibs * _KIB, up=False),
        ),
        Turn(
            direct(b"read", 2, _TREES + 1, _TREES * transfers + _TREE_CHECK, up=True),
            direct(b"run", 1, math.ceil(encoded / _PIECE), encoded, up=False),
        ),
        # The receiver tells the sender which of its rows are common, four bytes each.
        Turn(masks, replace(common, rows=sender)),
        gather(b"root-2:1", [FINISHED] * 2),
        gather(b"root:6", numbers),
        gather(b"root-3:1", [FINISHED] * 2),
    ]


class Message(NamedTuple):
    """A message of an engine: the name of its step and its content."""

    key: bytes
    value: bytes


def pack(messages: Sequence[Message], part: Part) -> bytes:
    """Returns the messages of a turn, padded to its size. Raises InputError if the engine does not
    send what it should.
    """
    if not part.allows(messages):
        raise InputError(
            Code.DATA_INVALID,
            f"rr22: the engine sent unexpected messages (got {len(messages)} in a turn of "
            f'{part.content:,} bytes). Set rows.psi.engine = "x25519", and report this error.',
        )
    data = bytearray()
    for key, value in messages:
        data += len(key).to_bytes(1, "little") + len(value).to_bytes(4, "little") + key + value
    return bytes(data.ljust(part.size, b"\0"))


def unpack(data: bytes, part: Part, party: str) -> list[Message]:
    """Returns the messages of a peer's turn. Raises PeerError, which names ``party``, if they are
    not those of the turn.
    """
    messages, position = [], 0
    for _ in range(part.messages):
        key_end = position + 5 + data[position] if position < len(data) else 0
        end = key_end + int.from_bytes(data[position + 1 : position + 5], "little")
        if not 0 < end <= len(data):
            raise _make_malformed_error(party)
        messages.append(Message(data[position + 5 : key_end], data[key_end:end]))
        position = end
    if any(data[position:]) or not part.allows(messages):
        raise _make_malformed_error(party)
    return messages


def _make_malformed_error(party: str) -> PeerError:
    return PeerError(
        Code.MALFORMED_MESSAGE,
        f"{party}: sent a malformed turn of the engine rr22. Begin a new run.",
        party=party,
    )
