"""No alignment: the parties hold different rows of the same columns, and exchange only the numbers
of their rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from vfl_common.bundle import OLDEST, Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, PeerError
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
    """No alignment, for parties with different rows; see ``Alignment``. All rows of the active
    party are labels in the train split.
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
            # Rows to predict count as rows of the first split.
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

    def get_agreed(self, context: AlignmentContext) -> AlignedRows:
        """See ``Alignment.get_agreed``."""
        return self.get_expected(context.table)

    def show(self, context: AlignmentContext, aligned: AlignedRows) -> None:
        """Does nothing, because the parties have no common rows to compare."""

    def align(self, context: AlignmentContext) -> AlignedRows:
        """Exchanges the number of rows that each passive party holds in each split.

        Raises PeerError: MALFORMED_MESSAGE if a number is impossible, REFUSED if a party has more
        rows than ``at.peer_rows_at_most``.
        """
        name, connections, step, active = (
            context.name,
            context.connections,
            StepKey(OPENING, 0, 0),
            self._recipe.active.name,
        )
        role: Role = "active" if name == active else "passive"
        chains, own_rows = (
            make_chains(self._recipe, OPENING, HOLDINGS, role, self._policy),
            self.get_expected(context.table),
        )
        parties = len(self._passives)
        if role == "passive":
            asking = Asking(
                HOLDINGS, OPENING, chains, connections, active, CPU, {"parties": parties}
            )
            held = own_rows.holdings[name]
            rows = torch.tensor([held[split] for split in SPLITS])
            counts_PS = asking.swap(step, {"rows": rows})["rows"]
            holdings = {
                party: _read_holding(context, active, party, counts)
                for party, counts in zip(self._passives, counts_PS.tolist(), strict=True)
            }
            if holdings[name] != held:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{active}: announced wrong numbers of rows for {name}. Begin a new run.",
                    party=active,
                )
            return AlignedRows(own_rows.ids, own_rows.division, holdings)
        answering = Answering(HOLDINGS, OPENING, chains, connections, CPU, {})
        received = answering.collect(step)
        holdings = {
            party: _read_holding(context, party, party, reply["rows"].tolist())
            for party, reply in received.items()
        }
        counts = torch.tensor(
            [[holdings[party][split] for split in SPLITS] for party in self._passives]
        )
        answering.reply_all(step, received, {"rows": counts})
        return AlignedRows(own_rows.ids, own_rows.division, holdings)


def _read_holding(context: AlignmentContext, sender: str, party: str, counts: list[int]) -> Holding:
    """Returns the numbers of rows of a party. Raises PeerError if a number is negative, if there
    are no training rows, or if there are more rows than this party allows.
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
    rows, limit = sum(counts), context.peer_rows_at_most
    if party != context.name and rows > limit:
        raise PeerError(
            Code.REFUSED,
            f"{party}: announces {rows:,} rows, but {context.name} accepts at most {limit:,} of "
            f"another party. Raise peer_rows_at_most in the party file of {context.name}, or use "
            "fewer rows.",
            party=party,
        )
    return holding
