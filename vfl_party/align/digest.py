"""Alignment by comparison: all parties already hold the same ids. They verify this by comparing
digests, so no party sends its ids.

If only the active party can divide the rows (``rows.split``), its answer contains the split of each
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

from vfl_common.bundle import OLDEST, Kind, StepKey, StepPassed
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
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
# The step in which a returning party compares its rows again.
AGAIN = StepKey(OPENING, 1, 0)
# The first version of the protocol in which a returning party compares its rows again.
SHOWN_AGAIN_SINCE = 8
DIVIDED = replace(ROWS, down=Sent(Kind.ROWS, {"split": u8("rows")}, label_free=True))
# The first version of the protocol in which the digest of a list is slow to compute.
SLOW_SINCE = 8
# scrypt passes of 0.1 s each: for lists that all parties had before, and for lists that a private
# alignment found.
PASSES, PASSES_FOUND = 1, 4
# The parameters of scrypt, which take 32 MiB of memory.
_SCRYPT = {"n": 1 << 15, "r": 8, "maxmem": 1 << 26}
# The number of ids that are hashed in one call.
_CHUNK = 1 << 12


class DigestAlignment:
    """Alignment by comparison of digests; see ``Alignment``."""

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

    def get_agreed(self, context: AlignmentContext) -> AlignedRows:
        """See ``Alignment.get_agreed``."""
        return self.get_expected(context.table).with_saved_division(context.folder)

    def show(self, context: AlignmentContext, aligned: AlignedRows) -> None:
        """See ``Alignment.show``."""
        if context.connections.protocol < SHOWN_AGAIN_SINCE:
            return
        compare_again(self._make_asking(context, len(aligned.ids)), context, aligned.ids)

    def _make_asking(self, context: AlignmentContext, rows: int) -> Asking:
        chains = make_chains(self._recipe, OPENING, self._exchange, "passive", self._policy)
        active = self._recipe.active.name
        return Asking(
            self._exchange, OPENING, chains, context.connections, active, CPU, {"rows": rows}
        )

    def align(self, context: AlignmentContext) -> AlignedRows:
        """Compares the rows: each passive party sends the number and the keyed digest of its ids to
        the active party.

        Raises PeerError: ROWS_DIFFER at the active party, which names a party with different ids;
        MALFORMED_MESSAGE at a passive party if the splits from the active party are invalid.
        """
        name, table, step, active = context.name, context.table, SHOWN, self._recipe.active.name
        ids, own_description = table.ids, describe_rows(context, table.ids)
        if name != active:
            reply = self._make_asking(context, len(ids)).swap(step, own_description)
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
        answering = Answering(self._exchange, OPENING, chains, context.connections, CPU, {})
        received = answering.collect(step)
        for party, description in received.items():
            count = int(description["count"][0])
            if count != len(ids) or not torch.equal(
                description["digest"], own_description["digest"]
            ):
                raise PeerError(
                    Code.ROWS_DIFFER,
                    f"{party}: does not hold the same ids as {name}.",
                    party=party,
                ).privately(
                    f"{party}: does not hold the same ids as {name} (got {count} rows, {name} has "
                    f"{len(ids)}). {self._remedy}"
                )
        if context.connections.protocol >= SHOWN_AGAIN_SINCE:
            answering.hub.ask_again(AGAIN)
        aligned = self.get_expected(table)
        if aligned.division is None:
            answering.acknowledge(step, received)
        else:
            split = torch.frombuffer(bytearray(aligned.division), dtype=torch.uint8)
            answering.reply_all(step, received, {"split": split})
        return aligned


def compare_again(asking: Asking, context: AlignmentContext, ids: Sequence[str]) -> None:
    """Sends the digest of this returning passive party's ids to the active party again. Raises
    PeerError if the ids have changed.
    """
    asking.lenient = True
    with contextlib.suppress(StepPassed):
        asking.swap(AGAIN, describe_rows(context, ids))
        raise PeerError(
            Code.STEP_OUT_OF_ORDER,
            f"{asking.peer}: answered a returning party as if it were at the beginning. Begin a "
            "new run.",
            party=asking.peer,
        )


def describe_rows(context: AlignmentContext, ids: Sequence[str]) -> dict[str, Tensor]:
    """Returns the number of ids, int64 [1], and their digest, uint8 [32]."""
    digest = compute_rows_digest(
        context.run_id, ids, context.salt, protocol=context.connections.protocol
    )
    return {
        "count": torch.tensor([len(ids)]),
        "digest": torch.frombuffer(bytearray(digest), dtype=torch.uint8),
    }


def compute_rows_digest(
    run_id: str, ids: Sequence[str], salt: bytes = b"", *, protocol: int = SLOW_SINCE
) -> bytes:
    """Returns a digest of the ordered ids and the run, 32 bytes. It cannot be compared across runs.

    ``salt``: The salt of the private alignment that found the ids; empty without one.
    ``protocol``: The version of the run's protocol; before ``SLOW_SINCE`` the digest is one HMAC.
    """
    if protocol < SLOW_SINCE:
        return compute_keyed_digest(run_id.encode(), ids)
    slow_digest = (
        compute_slow_digest(salt, ids, PASSES_FOUND)
        if salt
        else compute_slow_digest(run_id.encode(), ids, PASSES)
    )
    return hmac.digest(slow_digest, b"rows " + run_id.encode(), "sha256")


def compute_slow_digest(salt: bytes, ids: Sequence[str], passes: int) -> bytes:
    """Returns a slow digest of the ordered ids, 32 bytes. It takes ``passes`` times 0.1 s of one
    core, and 32 MiB of memory.

    An attacker who knows the salt and all ids but one can still guess that id, but every guess
    takes the same time and memory.
    """
    return _compute_scrypt(_hash_ids(hashlib.sha256(), ids), salt, passes)


@functools.lru_cache(maxsize=16)
def _compute_scrypt(digest: bytes, salt: bytes, passes: int) -> bytes:
    """Returns the scrypt digest. It is cached, because all parties of a process and all generations
    of a run need the same digest.
    """
    return hashlib.scrypt(digest, salt=salt, p=passes, dklen=32, **_SCRYPT)


def compute_keyed_digest(key: bytes, ids: Sequence[str]) -> bytes:
    """Returns the HMAC-SHA-256 of the ordered ids, 32 bytes. Anyone with the key can test guesses
    of the ids, so do not send the digest with the key.
    """
    return _hash_ids(hmac.new(key, digestmod=hashlib.sha256), ids)


def _hash_ids(hasher: Any, ids: Sequence[str]) -> bytes:
    """Updates the hash with the length and the bytes of each id, and returns its digest."""
    encoded = map(str.encode, ids)
    while chunk := list(itertools.islice(encoded, _CHUNK)):
        hasher.update(b"".join([len(data).to_bytes(4, "little") + data for data in chunk]))
    result: bytes = hasher.digest()
    return result
