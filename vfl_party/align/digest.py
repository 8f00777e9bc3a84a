"""Alignment by comparison: all parties hold the same ids already, and verify it without showing them."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

import torch

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_party.align.aligned import Aligned
from vfl_party.chains import make_chains
from vfl_party.declared import Exchange, Occurrence, Sent, i64, u8
from vfl_party.exchange import Answering, Asking, Ways
from vfl_party.policies import Policy

CPU = torch.device("cpu")
OPENING = "open"  # the phase in which the rows are compared
REMEDY = "every party needs the same ids, so cut each table to the ids in common"
ROWS = Exchange("rows", Sent(Kind.ROWS, {"count": i64(1), "digest": u8(32)}), when="once a generation")


class DigestAlignment:
    """See ``Alignment``."""

    def __init__(self, recipe: Recipe, policy: Policy) -> None:
        self._recipe, self._policy = recipe, policy

    def occurrences(self, rows: int) -> list[Occurrence]:
        _ = rows
        return [Occurrence.of(ROWS, StepKey(OPENING, 0, 0))]

    def offline(self, ids: tuple[str, ...]) -> Aligned:
        return Aligned(ids)

    def align(self, name: str, run_id: str, ids: tuple[str, ...], ways: Ways) -> Aligned:
        """Compares: each passive party sends the number and the keyed digest of its ids to the active party.

        Raises PeerError (ROWS_DIFFER) at the active party, naming a party that holds other ids.
        """
        step, active = StepKey(OPENING, 0, 0), self._recipe.active.name
        chains = make_chains(self._recipe, OPENING, ROWS, "active" if name == active else "passive", self._policy)
        digest = torch.frombuffer(bytearray(rows_digest(run_id, ids)), dtype=torch.uint8)
        if name != active:
            asking = Asking(ROWS, OPENING, chains, ways, active, CPU, {})
            asking.swap(step, {"count": torch.tensor([len(ids)]), "digest": digest})
            return Aligned(ids)
        answering = Answering(ROWS, OPENING, chains, ways, CPU, {})
        received = answering.collect(step)
        for party, rows in received.items():
            count = int(rows["count"][0])
            if count != len(ids) or not torch.equal(rows["digest"], digest):
                what = f"{count} and {len(ids)} rows" if count != len(ids) else f"{count} rows each, with other ids"
                text = f"different row sets: {party} and {name} hold {what}; {REMEDY}"
                public = f"different row sets: {party} and {name} do not hold the same ids"
                raise PeerError(Code.ROWS_DIFFER, public, party=party).privately(text)
        answering.acknowledge(step, received)
        return Aligned(ids)


def rows_digest(run_id: str, ids: Sequence[str]) -> bytes:
    """Returns the HMAC-SHA-256 of the ordered ids, keyed by the run: equal for equal lists, meaningless elsewhere."""
    mac = hmac.new(run_id.encode(), digestmod=hashlib.sha256)
    for row_id in ids:
        encoded = row_id.encode()
        mac.update(len(encoded).to_bytes(4, "little") + encoded)
    return mac.digest()
