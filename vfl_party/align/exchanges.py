"""The exchanges of a private set intersection: between the parties, and with the server."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from vfl_common import psi
from vfl_common.bundle import Kind, StepKey
from vfl_common.psi import PHASE, TAG_BYTES, WORD_BYTES, count_tag_batches
from vfl_party.align import batches
from vfl_party.align.state import NO_ATTEMPT
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, i64, u8
from vfl_party.psi import sealed
from vfl_party.psi.curve import POINT_BYTES
from vfl_party.rr22.turns import Buckets, Turn, divide, make_turns

NAME_BYTES = len(NO_ATTEMPT)
# The size of a padded introduction: its length, a public key, a signature and certificates.
INTRODUCTION_BYTES = 4096

HELLO = Exchange(
    "hello",
    Sent(
        Kind.ROWS,
        {
            "rows": i64(1),
            "attempt": u8(NAME_BYTES),
            # The number of masked rows of each round that the party has saved.
            "masked": i64("parties"),
            # The number of passes whose common rows the party already knows.
            "known": u8(1),
            "introduction": u8(INTRODUCTION_BYTES),
            # 1 if the party can use rr22.
            "rr22": u8(1),
            # The number of buckets of rr22 that the party has saved.
            "buckets": i64(1),
        },
    ),
    Sent(
        Kind.ROWS,
        {
            "rows": i64("parties"),
            "attempt": u8(NAME_BYTES),
            # The first batch of each round that some party lacks.
            "first": i64("parties"),
            "known": u8(1),
            "introductions": u8("parties", INTRODUCTION_BYTES),
            # 1 if the parties use rr22; ``first`` is then the first bucket that some party lacks.
            "rr22": u8(1),
        },
        label_free=True,
    ),
    when="once a generation",
)
MASKED = Exchange(
    psi.MASKED_IDS,
    Sent(Kind.ROWS, {"points": u8("up")}),
    Sent(Kind.ROWS, {"points": u8("down")}, label_free=True),
    when="once a batch and round",
)
# What the engines of rr22 send each other, padded.
TURNS = Exchange(
    "rr22",
    Sent(Kind.ROWS, {"messages": u8("up")}),
    Sent(Kind.ROWS, {"messages": u8("down")}, label_free=True),
    when="once a turn and bucket",
)
# The maximum number of bytes in one direction of a step of ``TURNS``.
_TURN_BYTES = 1 << 20
SIZES = Exchange(
    "sizes",
    # The attempt's identifier, by which the server finds the tags that it has saved.
    Sent(Kind.ROWS, {"sizes": i64(2), "attempt": u8(WORD_BYTES)}, label_free=True),
    # The first batch of tags that the server lacks.
    Sent(Kind.ROWS, {"first": i64(1)}),
    asks="server",
    when="once",
)
# The size of the digest of a list, in bytes.
DIGEST_BYTES = 32
# All parties have the server compare the lists of common rows. Most parties send one digest.
LISTS = Exchange(
    "lists",
    Sent(Kind.ROWS, {"digest": u8("bytes")}, label_free=True),
    NOTHING,
    asks="server",
    when="once",
)
TAGS = Exchange(
    "tags",
    Sent(Kind.ROWS, {"tags": u8("tags")}, label_free=True),
    # The common rows, one bit per row. Only the answer to the last batch has them.
    Sent(Kind.ROWS, {"common": u8("bits")}),
    asks="server",
    when="once a batch",
)


def occurrences(parties: int, rows: int, number: int = 0) -> list[Occurrence]:
    """Returns all exchanges of one party with ``rows`` rows, among ``parties`` parties, in the pass
    ``number``.
    """
    first = psi.first_round(number, parties)
    result = [Occurrence.of(HELLO, StepKey(PHASE, first, 0), parties=parties)]
    for round_ in range(1, parties):
        for batch, begin in enumerate(range(0, rows, batches.BATCH)):
            size = min(batches.BATCH, rows - begin) * POINT_BYTES
            size += sealed.OVERHEAD if parties > 2 else 0
            step = StepKey(PHASE, first + round_, batch)
            result.append(Occurrence.of(MASKED, step, up=size, down=size))
    server_round = first + parties
    result.append(Occurrence.of(SIZES, StepKey(PHASE, server_round, 0)))
    last_batch = count_tag_batches([rows])
    for batch in range(1, last_batch + 1):
        tags = min(psi.TAG_BATCH, rows - (batch - 1) * psi.TAG_BATCH) * TAG_BYTES
        bits = -(-rows // 8) if batch == last_batch else 0
        step = StepKey(PHASE, server_round, batch)
        result.append(Occurrence.of(TAGS, step, tags=tags, bits=bits))
    step = StepKey(PHASE, server_round, last_batch + 1)
    return [*result, Occurrence.of(LISTS, step, bytes=DIGEST_BYTES)]


def split_turn(turn: Turn) -> list[tuple[int, int]]:
    """Returns the bytes of each step of a turn, up and down. An answer begins when all is sent."""
    ups, downs = ([*_split(part.size)] for part in turn)
    return [
        *((size, 0) for size in ups[:-1]),
        (ups[-1] if ups else 0, downs[0] if downs else 0),
        *((0, size) for size in downs[1:]),
    ]


def _split(size: int) -> Iterator[int]:
    for start in range(0, size, _TURN_BYTES):
        yield min(_TURN_BYTES, size - start)


def count_turn_steps(division: Buckets) -> int:
    """Returns the number of steps of a bucket."""
    return sum(map(len, map(split_turn, make_turns(division.active, division.passive))))


def rr22_occurrences(rows: int, number: int = 0) -> list[Occurrence]:
    """Returns all exchanges of a party by rr22 in the pass ``number``. Both parties have ``rows``
    rows.
    """
    first = psi.first_round(number, 2)
    result = [Occurrence.of(HELLO, StepKey(PHASE, first, 0), parties=2)]
    division = divide(rows, rows)
    turns = make_turns(division.active, division.passive)
    sizes = [size for turn in turns for size in split_turn(turn)] * division.number
    for batch, (up, down) in enumerate(sizes):
        result.append(Occurrence.of(TURNS, StepKey(PHASE, first + 1, batch), up=up, down=down))
    result.append(Occurrence.of(SIZES, StepKey(PHASE, first + 2, 0)))
    return [*result, Occurrence.of(LISTS, StepKey(PHASE, first + 2, 1), bytes=DIGEST_BYTES)]


def to_tensor(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns ``values`` as a tensor [N]."""
    return torch.tensor(values, dtype=dtype)


def bytes_to_tensor(data: bytes) -> Tensor:
    """Returns a copy of ``data`` as a tensor, uint8 [B]."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
