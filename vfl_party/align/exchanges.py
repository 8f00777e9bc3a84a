"""The exchanges of a private set intersection: between the parties, and with the server."""

from __future__ import annotations

import torch
from torch import Tensor

from vfl_common import psi
from vfl_common.bundle import Kind, StepKey
from vfl_common.psi import PHASE, TAG_BYTES, WORD_BYTES, tag_batches
from vfl_party.align import batches
from vfl_party.align.state import NO_ATTEMPT
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Sent, i64, u8
from vfl_party.psi import sealed
from vfl_party.psi.curve import POINT_BYTES

NAME_BYTES = len(NO_ATTEMPT)
# A public key, a certificate and a signature, with their length in front.
INTRODUCTION_BYTES = 4096

HELLO = Exchange(
    "hello",
    Sent(
        Kind.ROWS,
        {
            "rows": i64(1),
            "attempt": u8(NAME_BYTES),
            # Rows that the party keeps of each round.
            "masked": i64("parties"),
            # Whether it knows the common rows already.
            "known": u8(1),
            "introduction": u8(INTRODUCTION_BYTES),
        },
    ),
    Sent(
        Kind.ROWS,
        {
            "rows": i64("parties"),
            "attempt": u8(NAME_BYTES),
            # The first batch of each round that somebody lacks.
            "first": i64("parties"),
            "known": u8(1),
            "introductions": u8("parties", INTRODUCTION_BYTES),
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
SIZES = Exchange(
    "sizes",
    # A word that the parties of one attempt share, so that the server knows what it keeps of it.
    Sent(Kind.ROWS, {"sizes": i64(2), "attempt": u8(WORD_BYTES)}, label_free=True),
    # The first batch of tags that the server lacks.
    Sent(Kind.ROWS, {"first": i64(1)}),
    asks="server",
    when="once",
)
# Bytes of a list's digest.
DIGEST_BYTES = 32
# Most parties compare one list.
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
    # With the answer to the last batch.
    Sent(Kind.ROWS, {"common": u8("bits")}),
    asks="server",
    when="once a batch",
)


def occurrences(parties: int, rows: int) -> list[Occurrence]:
    """Returns all exchanges of one party with ``rows`` rows."""
    result = [Occurrence.of(HELLO, StepKey(PHASE, 0, 0), parties=parties)]
    for round_ in range(1, parties):
        for batch, begin in enumerate(range(0, rows, batches.BATCH)):
            size = min(batches.BATCH, rows - begin) * POINT_BYTES
            size += sealed.OVERHEAD if parties > 2 else 0
            result.append(Occurrence.of(MASKED, StepKey(PHASE, round_, batch), up=size, down=size))
    result.append(Occurrence.of(SIZES, StepKey(PHASE, parties, 0)))
    last = tag_batches([rows])
    for number in range(1, last + 1):
        tags = min(psi.TAG_BATCH, rows - (number - 1) * psi.TAG_BATCH) * TAG_BYTES
        bits = -(-rows // 8) if number == last else 0
        result.append(Occurrence.of(TAGS, StepKey(PHASE, parties, number), tags=tags, bits=bits))
    result.append(Occurrence.of(LISTS, StepKey(PHASE, parties, last + 1), bytes=DIGEST_BYTES))
    return result


def ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    """Returns ``values`` as a tensor [N]."""
    return torch.tensor(values, dtype=dtype)


def raw(data: bytes) -> Tensor:
    """Returns uint8 [B]: a copy of ``data``."""
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
