"""Alignment by comparison: all parties already hold the same ids, and verify this without showing
them.

If only the active party can divide the rows (``rows.split``), its answer holds the split of each
row.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import hmac
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_common.link import OLDEST, StepPassed
from vfl_party.align.aligned import AlignedRows, AlignmentContext
from vfl_party.data import Table
from vfl_party.data.rows import division_of, is_division
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import Exchange, Occurrence, Sent, i64, u8
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.policies import Policy

CPU = torch.device("cpu")
# The phase in which the rows are compared.
OPENING = "open"
REMEDY = "Every party needs the same ids: cut each table to the ids in common."
ROWS = Exchange(
    "rows", Sent(Kind.ROWS, {"count": i64(1), "digest": u8(32)}), when="once a generation"
)
# The step in which the rows are compared.
SHOWN = StepKey(OPENING, 0, 0)
# The step in which a returning party shows its rows again.
AGAIN = StepKey(OPENING, 1, 0)
# The protocol since which a returning party shows its rows again.
SHOWN_AGAIN_SINCE = 8
DIVIDED = replace(ROWS, down=Sent(Kind.ROWS, {"split": u8("rows")}, label_free=True))
# The protocol since which a list's digest is slow.
SLOW_SINCE = 8
# Passes of 0.1 s for lists that were the same before, and for those a private alignment found.
PASSES, PASSES_FOUND = 1, 4
# These parameters take 32 MiB.
_SCRYPT = {"n": 1 << 15, "r": 8, "maxmem": 1 << 26}
# Number of ids that are fed to the digest at once.
_CHUNK = 1 << 12


class DigestAlignment:
    """See ``Alignment``."""

    certain = True
    protocol = OLDEST

    def __init__(
        self, recipe: Recipe, policy: Policy, *, divides: bool = True, remedy: str = REMEDY
    ) -> None:
        self._recipe, self._policy, self._divides, self._remedy = recipe, policy, divides, remedy
        self._gets_division = divides and recipe.rows.split != "random"
        self._exchange = DIVIDED if self._gets_division else ROWS

    def occurrences(self, rows: int) -> list[Occurrence]:
        """See ``Alignment.occurrences``."""
        return [Occurrence.of(self._exchange, StepKey(OPENING, 0, 0), rows=rows)]

    def get_expected(self, table: Table) -> AlignedRows:
        """See ``Alignment.get_expected``."""
        return AlignedRows(table.ids, division_of(self._recipe, table) if self._divides else None)

    def count_earlier(self, _runs: Path, _name: str, _table: Table) -> int | None:
        """See ``Alignment.count_earlier``."""
        return None

    def get_agreed(self, at: AlignmentContext) -> AlignedRows:
        """See ``Alignment.get_agreed``."""
        return self.get_expected(at.table).with_kept(at.folder)

    def show(self, at: AlignmentContext, aligned: AlignedRows) -> None:
        """See ``Alignment.show``."""
        if at.connections.protocol < SHOWN_AGAIN_SINCE:
            return
        show_again(self._asking(at, len(aligned.ids)), at, aligned.ids)

    def _asking(self, at: AlignmentContext, rows: int) -> Asking:
        chains = make_chains(self._recipe, OPENING, self._exchange, "passive", self._policy)
        active = self._recipe.active.name
        return Asking(self._exchange, OPENING, chains, at.connections, active, CPU, {"rows": rows})

    def align(self, at: AlignmentContext) -> AlignedRows:
        """Compares the rows: each passive party sends the number and the keyed digest of its ids to
        the active party.

        Raises PeerError: ROWS_DIFFER at the active party, naming a party that holds other ids;
        MALFORMED_MESSAGE at a passive party if the active party's division is invalid.
        """
        name, table, step, active = at.name, at.table, SHOWN, self._recipe.active.name
        ids, mine = table.ids, describe_rows(at, table.ids)
        if name != active:
            reply = self._asking(at, len(ids)).swap(step, mine)
            if not self._gets_division:
                return AlignedRows(ids)
            division = reply["split"].numpy().tobytes()
            if not is_division(division):
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{active}: sent a division without training rows. Begin a new run.",
                    party=active,
                )
            return AlignedRows(ids, division)
        chains = make_chains(self._recipe, OPENING, self._exchange, "active", self._policy)
        answering = Answering(self._exchange, OPENING, chains, at.connections, CPU, {})
        received = answering.collect(step)
        for party, rows in received.items():
            count = int(rows["count"][0])
            if count != len(ids) or not torch.equal(rows["digest"], mine["digest"]):
                raise PeerError(
                    Code.ROWS_DIFFER,
                    f"{party}: does not hold the same ids as {name}.",
                    party=party,
                ).privately(
                    f"{party}: does not hold the same ids as {name} (got {count} rows, {name} has "
                    f"{len(ids)}). {self._remedy}"
                )
        if at.connections.protocol >= SHOWN_AGAIN_SINCE:
            answering.hub.ask_again(AGAIN)
        aligned = self.get_expected(table)
        if aligned.division is None:
            answering.acknowledge(step, received)
        else:
            split = torch.frombuffer(bytearray(aligned.division), dtype=torch.uint8)
            answering.reply_all(step, received, {"split": split})
        return aligned


def show_again(asking: Asking, at: AlignmentContext, ids: Sequence[str]) -> None:
    """Shows the active party again what this returning passive party showed before. Raises
    PeerError if the rows are others.
    """
    asking.lenient = True
    with contextlib.suppress(StepPassed):
        asking.swap(AGAIN, describe_rows(at, ids))
        raise PeerError(
            Code.STEP_OUT_OF_ORDER,
            f"{asking.peer}: answered a returning party as if it were at the beginning. Begin a "
            "new run.",
            party=asking.peer,
        )


def describe_rows(at: AlignmentContext, ids: Sequence[str]) -> dict[str, Tensor]:
    """Returns the count, int64 [1], and the digest, uint8 [32], of a passive party's ids."""
    digest = rows_digest(at.run_id, ids, at.salt, protocol=at.connections.protocol)
    return {
        "count": torch.tensor([len(ids)]),
        "digest": torch.frombuffer(bytearray(digest), dtype=torch.uint8),
    }


def rows_digest(
    run_id: str, ids: Sequence[str], salt: bytes = b"", *, protocol: int = SLOW_SINCE
) -> bytes:
    """Returns 32 bytes of the ordered ids and the run: equal for equal lists, meaningless
    elsewhere.

    ``salt``: of the private alignment that found the ids; empty without one. ``protocol``: of the
    run's parties; before ``SLOW_SINCE`` the digest is one HMAC.
    """
    if protocol < SLOW_SINCE:
        return digest_with_key(run_id.encode(), ids)
    slow = (
        slow_digest(salt, ids, PASSES_FOUND) if salt else slow_digest(run_id.encode(), ids, PASSES)
    )
    return hmac.digest(slow, b"rows " + run_id.encode(), "sha256")


def slow_digest(salt: bytes, ids: Sequence[str], passes: int) -> bytes:
    """Returns a digest of the ordered ids, 32 bytes; it takes ``passes`` times 0.1 s of one core
    and 32 MiB.

    Someone who knows the salt and all ids but one can still guess that id, but pays as much for
    every guess.
    """
    return _slow(_over(hashlib.sha256(), ids), salt, passes)


@functools.lru_cache(maxsize=16)
def _slow(digest: bytes, salt: bytes, passes: int) -> bytes:
    """Returns the scrypt digest, cached for the parties of one process and the generations of one
    party.
    """
    return hashlib.scrypt(digest, salt=salt, p=passes, dklen=32, **_SCRYPT)


def digest_with_key(key: bytes, ids: Sequence[str]) -> bytes:
    """Returns the HMAC-SHA-256 of the ordered ids, 32 bytes. The key allows guessing lists, so it
    stays at this party.
    """
    return _over(hmac.new(key, digestmod=hashlib.sha256), ids)


def _over(digest: Any, ids: Sequence[str]) -> bytes:
    """Feeds a digest with the length and the bytes of each id; returns its bytes."""
    encoded = map(str.encode, ids)
    while chunk := list(itertools.islice(encoded, _CHUNK)):
        digest.update(b"".join([len(data).to_bytes(4, "little") + data for data in chunk]))
    result: bytes = digest.digest()
    return result
