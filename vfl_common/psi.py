"""What parties and server agree on for private alignment; the protocol is in ``vfl_party.align.psi``."""

from __future__ import annotations

from collections.abc import Sequence

PHASE = "align"  # in step keys, progress and ledger lines
TAG_BYTES = 12  # of a masked row, for the server: among 2^24 rows a side two differ in them but for a chance of 2^-48


def next_of(ring: Sequence[str]) -> dict[str, str]:
    """Returns {party: the next one in the ring}."""
    return dict(zip(ring, (*ring[1:], *ring[:1]), strict=True))
