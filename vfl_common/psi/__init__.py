"""What parties and server agree on for private alignment; the protocol is in
``vfl_party.align.psi``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from vfl_common.errors import Code, PeerError

# In step keys, progress and ledger lines.
PHASE = "align"
# The exchange in which the parties mask each other's rows.
MASKED_IDS = "masked ids"
# Of a masked row, for the server; see ``vfl_party.psi.curve.tags``.
TAG_BYTES = 12
# Of what names an attempt to the server.
WORD_BYTES = 32
# Rows whose tags go to the server at once.
TAG_BATCH = 1 << 20
# Of a party, if nobody says less: what its row numbers can be.
MOST_ROWS = (1 << 63) - 1


def least_common(at_least: int | float, own: int) -> int:
    """Returns how many rows must be common. ``at_least``: of the recipe; ``own``: the rows of the
    party that asks.
    """
    # 0.07 of 100 are 7.
    return at_least if isinstance(at_least, int) else math.ceil(round(at_least * own, 6))


def too_few(at_least: int | float, found: int, *, partial: bool = False) -> PeerError:
    """Returns the error (ROWS_DIFFER) for fewer common rows than ``rows.at_least``; peers do not
    learn how many. ``partial``: as in the recipe.
    """
    share = "" if isinstance(at_least, int) else " of each party's"
    by = "a party and the active party" if partial else "all parties"
    text = f"fewer rows are held by {by} than rows.at_least = {at_least}{share}"
    text = (
        f"{text}; are ids spelt alike everywhere (rows.id_rules, and the order of the columns "
        "in data.id)?"
    )
    held = "in common" if partial else "held by all"
    return PeerError(Code.ROWS_DIFFER, text).privately(f"{text} ({found:,} rows are {held})")


def tag_batches(rows: Iterable[int]) -> int:
    """Returns in how many batches tags go to the server. ``rows``: of each party."""
    return -(-max(rows) // TAG_BATCH)
