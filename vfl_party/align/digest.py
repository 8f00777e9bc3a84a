"""Alignment by comparison: all parties hold the same ids already, and verify it without showing them.

If only the active party can divide the rows (``rows.split``), its answer says the split of each.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_party.align.aligned import Aligned, Aligning
from vfl_party.chains import make_chains
from vfl_party.data import Table
from vfl_party.declared import Exchange, Occurrence, Role, Sent, i64, u8
from vfl_party.exchange import Answering, Asking
from vfl_party.policies import Policy
from vfl_party.rows import division_of, is_division

CPU = torch.device("cpu")
OPENING = "open"  # the phase in which the rows are compared
REMEDY = "every party needs the same ids, so cut each table to the ids in common"
ROWS = Exchange("rows", Sent(Kind.ROWS, {"count": i64(1), "digest": u8(32)}), when="once a generation")
DIVIDED = replace(ROWS, down=Sent(Kind.ROWS, {"split": u8("rows")}))


class DigestAlignment:
    """See ``Alignment``."""

    certain = True

    def __init__(self, recipe: Recipe, policy: Policy, *, divides: bool = True, remedy: str = REMEDY) -> None:
        self._recipe, self._policy, self._divides, self._remedy = recipe, policy, divides, remedy
        self._told = divides and recipe.rows.split != "random"
        self._exchange = DIVIDED if self._told else ROWS

    def occurrences(self, rows: int) -> list[Occurrence]:
        return [Occurrence.of(self._exchange, StepKey(OPENING, 0, 0), rows=rows)]

    def expected(self, table: Table) -> Aligned:
        return Aligned(table.ids, division_of(self._recipe, table) if self._divides else None)

    def found_before(self, _runs: Path, _name: str, _table: Table) -> int | None:
        return None

    def kept(self, at: Aligning) -> Aligned:
        return self.expected(at.table).with_kept(at.folder)

    def align(self, at: Aligning) -> Aligned:
        """Compares: each passive party sends the number and the keyed digest of its ids to the active party.

        Raises PeerError (ROWS_DIFFER) at the active party, naming a party that holds other ids; at a passive party if
        the active party's division is none.
        """
        name, table, ways = at.name, at.table, at.ways
        step, active, ids = StepKey(OPENING, 0, 0), self._recipe.active.name, table.ids
        role: Role = "active" if name == active else "passive"
        exchange, chains = self._exchange, make_chains(self._recipe, OPENING, self._exchange, role, self._policy)
        digest = torch.frombuffer(bytearray(rows_digest(at.run_id, ids)), dtype=torch.uint8)
        if name != active:
            asking = Asking(exchange, OPENING, chains, ways, active, CPU, {"rows": len(ids)})
            reply = asking.swap(step, {"count": torch.tensor([len(ids)]), "digest": digest})
            if not self._told:
                return Aligned(ids)
            division = reply["split"].numpy().tobytes()
            if not is_division(division):
                raise PeerError(Code.MALFORMED_MESSAGE, f"{active} sent a division without training rows", party=active)
            return Aligned(ids, division)
        answering = Answering(exchange, OPENING, chains, ways, CPU, {})
        received = answering.collect(step)
        for party, rows in received.items():
            count = int(rows["count"][0])
            if count != len(ids) or not torch.equal(rows["digest"], digest):
                what = f"{count} and {len(ids)} rows" if count != len(ids) else f"{count} rows each, with other ids"
                text = f"different row sets: {party} and {name} hold {what}; {self._remedy}"
                public = f"different row sets: {party} and {name} do not hold the same ids"
                raise PeerError(Code.ROWS_DIFFER, public, party=party).privately(text)
        aligned = self.expected(table)
        if aligned.division is None:
            answering.acknowledge(step, received)
        else:
            split = torch.frombuffer(bytearray(aligned.division), dtype=torch.uint8)
            answering.reply_all(step, received, {"split": split})
        return aligned


def rows_digest(run_id: str, ids: Sequence[str]) -> bytes:
    """Returns the HMAC-SHA-256 of the ordered ids, keyed by the run: equal for equal lists, meaningless elsewhere."""
    return keyed_digest(run_id.encode(), ids)


def keyed_digest(key: bytes, ids: Sequence[str]) -> bytes:
    """Returns the HMAC-SHA-256 of the ordered ids. Whoever has the key can try out short lists."""
    mac = hmac.new(key, digestmod=hashlib.sha256)
    for row_id in ids:
        encoded = row_id.encode()
        mac.update(len(encoded).to_bytes(4, "little") + encoded)
    return mac.digest()
