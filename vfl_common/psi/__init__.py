"""Constants and checks of private entity alignment that parties and server share. The protocol is
in ``vfl_party.align.psi``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from vfl_common.errors import Code, PeerError

# The name of alignment in step keys, progress and ledger lines.
PHASE = "align"
# The name of the exchange in which the parties mask each other's ids.
MASKED_IDS = "masked ids"
# The length of the tag of a masked id, which the server compares: ``vfl_party.psi.curve.cut_tags``.
TAG_BYTES = 12
# The length of the random value by which the server identifies an attempt.
WORD_BYTES = 32
# The number of masked rows that a party announces to the server if it sends no tags.
NO_TAGS = -1
# The maximum number of tags that are sent to the server in one batch.
TAG_BATCH = 1 << 20
# The maximum number of rows of a party, unless a lower limit is set: row numbers are 64-bit
# integers.
MAX_ROWS = (1 << 63) - 1


def first_round(number: int, parties: int) -> int:
    """Returns the number of the first round of a pass, from 0, among ``parties`` parties.

    A pass has a round for the parties' meeting, ``parties`` - 1 rounds in which they mask sets, and
    a round with the server.
    """
    return number * (parties + 1)


def compute_min_common(minimum: int | float, own: int) -> int:
    """Returns the minimum number of common rows.

    Args:
        minimum: The recipe's ``rows.at_least``: a number of rows, or a share of a party's rows.
        own: The number of rows of the party for which the minimum is computed.
    """
    # The product is rounded first, because 0.07 * 100 is slightly more than 7 in floating point.
    return minimum if isinstance(minimum, int) else math.ceil(round(minimum * own, 6))


def make_too_few_error(minimum: int | float, common: int, *, partial: bool = False) -> PeerError:
    """Returns the error (ROWS_DIFFER) for fewer common rows than ``rows.at_least``. Peers do not
    learn the number of ``common`` rows. ``partial``: the recipe's ``rows.partial``.
    """
    error = PeerError(
        Code.ROWS_DIFFER,
        f"{'two parties' if partial else 'the parties'} have too few rows in common (rows.at_least "
        f"= {minimum}). Spell the ids in the same way at all parties (rows.id_rules, and the order "
        "of the columns in data.id).",
    )
    return error.privately(f"{error} Rows in common: {common:,}.")


def count_tag_batches(rows: Iterable[int]) -> int:
    """Returns the number of batches in which tags are sent to the server. ``rows``: the number of
    rows of each party.
    """
    return -(-max(rows) // TAG_BATCH)
