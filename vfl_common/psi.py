"""What parties and server agree on for private alignment; the protocol is in ``vfl_party.align.psi``."""

from __future__ import annotations

from collections.abc import Sequence

PHASE = "align"  # in step keys, progress and ledger lines
TAG_BYTES = 12  # of a masked row, for the server; see ``vfl_party.psi.curve.tags``


def next_of(ring: Sequence[str]) -> dict[str, str]:
    """Returns {party: the next one in the ring}."""
    return dict(zip(ring, (*ring[1:], *ring[:1]), strict=True))
