"""No alignment: the parties hold different rows of the same columns, and only exchange their
numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
from vfl_common.link import OLDEST
from vfl_party.align.aligned import AlignedRows, AlignmentContext, Holding
from vfl_party.align.digest import OPENING
from vfl_party.data import Table
from vfl_party.data.rows import CODES, decode_division, divide_rows, division_of
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import Exchange, Occurrence, Role, Sent, i64
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.policies import Policy

CPU = torch.device("cpu")
SPLITS = ("local", "validation", "test")
HOLDINGS = Exchange(
    "holdings",
    Sent(Kind.ROWS, {"rows": i64(len(SPLITS))}),
    Sent(Kind.ROWS, {"rows": i64("parties", len(SPLITS))}, label_free=True),
    when="once a generation",
)


class OwnRows:
    """Parties with different rows; see ``Alignment``. The active party's rows are its labels, in
    the train split only.
    """

    certain = True
    protocol = OLDEST

    def __init__(self, recipe: Recipe, policy: Policy, *, divides: bool = True) -> None:
        self._recipe, self._policy, self._divides = recipe, policy, divides
        self._passives = [party.name for party in recipe.passives]

    def occurrences(self, _rows: int) -> list[Occurrence]:
        """See ``Alignment.occurrences``."""
        return [Occurrence.of(HOLDINGS, StepKey(OPENING, 0, 0), parties=len(self._passives))]

    def get_expected(self, table: Table) -> AlignedRows:
        """See ``Alignment.get_expected``."""
        if table.labels is not None:
            return AlignedRows(table.ids, bytes([CODES.index("train")]) * len(table))
        if not self._divides:
            # All rows to predict come first in the list, as if they were for training.
            held = dict.fromkeys(SPLITS, 0) | {SPLITS[0]: len(table)}
            return AlignedRows(table.ids, None, dict.fromkeys(self._passives, held))
        division = division_of(self._recipe, table)
        splits = (
            decode_division(division)
            if division is not None
            else divide_rows(self._recipe, len(table))
        )
        held = {split: len(splits[split]) for split in SPLITS}
        return AlignedRows(table.ids, division, dict.fromkeys(self._passives, held))

    def count_earlier(self, _runs: Path, _name: str, _table: Table) -> int | None:
        """See ``Alignment.count_earlier``."""
        return None

    def get_agreed(self, at: AlignmentContext) -> AlignedRows:
        """See ``Alignment.get_agreed``."""
        return self.get_expected(at.table)

    def show(self, at: AlignmentContext, aligned: AlignedRows) -> None:
        """Does nothing: each party has rows of its own, and no phase goes on without a party."""

    def align(self, at: AlignmentContext) -> AlignedRows:
        """Shares how many rows each passive party holds in each split.

        Raises PeerError: MALFORMED_MESSAGE if a number is impossible, REFUSED if a party has more
        rows than ``at.peer_rows_at_most``.
        """
        name, connections, step, active = (
            at.name,
            at.connections,
            StepKey(OPENING, 0, 0),
            self._recipe.active.name,
        )
        role: Role = "active" if name == active else "passive"
        chains, mine = (
            make_chains(self._recipe, OPENING, HOLDINGS, role, self._policy),
            self.get_expected(at.table),
        )
        parties = len(self._passives)
        if role == "passive":
            asking = Asking(
                HOLDINGS, OPENING, chains, connections, active, CPU, {"parties": parties}
            )
            held = mine.holdings[name]
            rows = torch.tensor([held[split] for split in SPLITS])
            numbers = asking.swap(step, {"rows": rows})["rows"]
            holdings = {
                party: _read(at, active, party, counts)
                for party, counts in zip(self._passives, numbers.tolist(), strict=True)
            }
            if holdings[name] != held:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{active}: announced other rows for {name} than it holds. Begin a new run.",
                    party=active,
                )
            return AlignedRows(mine.ids, mine.division, holdings)
        answering = Answering(HOLDINGS, OPENING, chains, connections, CPU, {})
        received = answering.collect(step)
        holdings = {
            party: _read(at, party, party, of["rows"].tolist()) for party, of in received.items()
        }
        table = torch.tensor(
            [[holdings[party][split] for split in SPLITS] for party in self._passives]
        )
        answering.reply_all(step, received, {"rows": table})
        return AlignedRows(mine.ids, mine.division, holdings)


def _read(at: AlignmentContext, sender: str, party: str, counts: list[int]) -> Holding:
    """Reads how many rows a party holds. Raises PeerError if a number is impossible, leaves none
    for training, or is more than this party allows.
    """
    holding: Mapping[str, int] = dict(zip(SPLITS, counts, strict=True))
    if min(counts) < 0 or not counts[0]:
        numbers = ", ".join(f"{count:,} {split}" for split, count in holding.items())
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{sender}: announced impossible numbers of rows for {party} (got {numbers}). Give it "
            "training rows.",
            party=sender,
        )
    rows, limit = sum(counts), at.peer_rows_at_most
    if party != at.name and rows > limit:
        raise PeerError(
            Code.REFUSED,
            f"{party}: announces {rows:,} rows, but {at.name} takes at most {limit:,} of another "
            f"party. Raise peer_rows_at_most in the party file of {at.name}, or use fewer rows.",
            party=party,
        )
    return holding
