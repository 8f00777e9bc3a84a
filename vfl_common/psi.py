"""What parties and server agree on for private alignment; the protocol is in ``vfl_party.align.psi``."""

from __future__ import annotations

from vfl_common.errors import Code, PeerError

PHASE = "align"  # in step keys, progress and ledger lines
TAG_BYTES = 12  # of a masked row, for the server; see ``vfl_party.psi.curve.tags``
MOST_ROWS = 1 << 28  # of a party: 8 GiB of points in each round; who announces more is refused at once


def too_few(at_least: int, found: int) -> PeerError:
    """Returns the error (ROWS_DIFFER) for fewer common rows than ``rows.at_least``; peers do not learn how many."""
    text = f"fewer rows are held by all parties than rows.at_least = {at_least}"
    text = f"{text}; are ids spelt alike everywhere (rows.id_rules, and the order of the columns in data.id)?"
    return PeerError(Code.ROWS_DIFFER, text).privately(f"{text} ({found:,} rows are held by all)")
