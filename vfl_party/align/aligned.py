"""The result of an alignment, and the protocol of one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from vfl_common.files import write_atomic
from vfl_common.identity.credentials import Credentials
from vfl_common.psi import MAX_ROWS
from vfl_party.base.held import HeldRows
from vfl_party.base.seeds import Rows
from vfl_party.data import Table
from vfl_party.data.rows import is_division
from vfl_party.outbound.declared import Occurrence
from vfl_party.outbound.exchange import Connections

# {split: how many rows}.
Holding = Mapping[str, int]
# File with a digit a row, in a passive party's folder of a run.
KEPT = "division.txt"


@dataclass(frozen=True)
class AlignedRows:
    """The rows that all parties hold, or one party's own rows without an alignment.

    Args:
        ids: in the order that all parties use.
        division: a byte a row, see ``vfl_party.data.rows.division_of``; None if every party divides
            the rows itself.
        holdings: {passive party: number of its rows in each split}, if the parties have different
            rows; else empty.
        held: which party holds which row, if not all parties hold each.
        rows: int64 [N], positions in this party's table in the order of ``ids``, if a private
            alignment found them; else empty.
    """

    ids: Sequence[str]
    division: bytes | None = None
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    held: HeldRows | None = None
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64), compare=False)

    def of(self, table: Table) -> Table:
        """Returns the aligned rows of a party's table. Raises KeyError if it lacks one."""
        at = self.positions(table)
        return table if at is None else table.select(at)

    def positions(self, table: Table) -> Rows | None:
        """Returns the positions of the aligned rows in a party's table, int64 [N]; None if they are
        the whole table in its order.

        Raises KeyError if the table lacks one.
        """
        if self.held is None and self.ids == table.ids:
            return None
        if self.held is not None or len(self.rows):
            return self.rows
        aligned_N = table.among(self.ids)
        if aligned_N.sum() != len(self.ids):
            raise KeyError("the table lacks an aligned row")
        return np.flatnonzero(aligned_N)

    def rest(self, table: Table) -> Table | None:
        """Returns the rows of a party's table that are not aligned; None if there are none."""
        at = self.rest_positions(table)
        return None if at is None else table.select(at)

    def rest_positions(self, table: Table) -> Rows | None:
        """Returns the positions of the other rows in a party's table, int64 [R]; None if there are
        none.
        """
        if len(self.ids) == len(table):
            return None
        if len(self.rows):
            others = np.ones(len(table), bool)
            others[self.rows] = False
        else:
            others = ~table.among(self.ids)
        return np.flatnonzero(others)

    def by(self, name: str, active: str) -> str:
        """Returns who holds the rows of the party ``name``, for a person: at the active party how
        many each set of parties holds. '' if all parties hold all rows.
        """
        if self.held is None:
            return ""
        if name != active:
            return f"also held by {active}"
        groups = self.held.by_holders(self.held.splits["all"])
        sets = (
            f"{len(rows):,} that {' and '.join(names) or 'nobody else'} "
            f"{'hold' if len(names) > 1 else 'holds'}"
            for names, rows in groups
        )
        return f"used: {', '.join(sets)}"

    def save(self, folder: Path) -> None:
        """Writes the division to the run's folder, if another party made it. Raises InputError."""
        if self.division is not None:
            write_atomic(folder / KEPT, "".join(map(str, self.division)))

    def with_kept(self, folder: Path) -> AlignedRows:
        """Returns the rows with the division saved in the run's folder; unchanged if it has none
        that fits.
        """
        try:
            division = bytes(map(int, (folder / KEPT).read_text()))
        except (OSError, ValueError):
            return self
        return (
            replace(self, division=division)
            if len(division) == len(self.ids) and is_division(division)
            else self
        )


@dataclass(frozen=True)
class AlignmentContext:
    """The context of an alignment in one generation of a run.

    Args:
        name: this party.
        run_id: the run, so that messages have no meaning outside it.
        table: this party's rows, in canonical order.
        folder: this party's folder of the run.
        connections: to the others.
        workers: how many processes may compute.
        credentials: identify this party to the others; None if all are in one process.
        begins: called when rows are searched, not only compared; may raise InputError.
        at_least: minimum number of common rows for this party, whatever the recipe says.
        peer_rows_at_most: maximum number of rows of another party for this one to mask or accept.
        salt: of the private alignment that found the table's rows; empty without one.
        show: reports an event, which is already in the log, to the person at the party.
        tick: called after each step with (phase, rounds done, rounds, batches done, batches).
    """

    name: str
    run_id: str
    table: Table
    folder: Path
    connections: Connections
    workers: int = 1
    credentials: Credentials | None = None
    begins: Callable[[], None] = lambda: None
    at_least: int = 1
    peer_rows_at_most: int = MAX_ROWS
    salt: bytes = b""
    show: Callable[..., None] = lambda _event, **_facts: None
    tick: Callable[[str, int, int, int, int], None] = (
        lambda _phase, _round, _rounds, _batch, _batches: None
    )


class Alignment(Protocol):
    """Decides the rows, before models and phases are made.

    ``certain``: whether the run fails if the rows are not the expected ones. ``protocol``: the
    oldest protocol that supports it.
    """

    certain: bool
    protocol: int

    def occurrences(self, rows: int) -> Sequence[Occurrence]:
        """Returns all exchanges of a generation in order, for parties of ``rows`` rows each."""
        ...

    def get_expected(self, table: Table) -> AlignedRows:
        """Returns the rows that this party expects before it asks the others: all its rows, if not
        ``certain``.

        Without the division, if only the active party knows it.
        """
        ...

    def count_earlier(self, runs: Path, name: str, table: Table) -> int | None:
        """Returns how many common rows the earlier run found that the recipe names; None if it
        names none.

        ``runs``: the folder of runs of the party ``name``. Raises InputError or PeerError if they
        cannot be used.
        """
        ...

    def get_agreed(self, at: AlignmentContext) -> AlignedRows:
        """Returns the rows that this party and the others agreed on earlier in the run."""
        ...

    def show(self, at: AlignmentContext, aligned: AlignedRows) -> None:
        """Shows the active party the rows ``aligned`` of this passive party, which returns to the
        run.

        Raises PeerError if they are not those that it had when the generation began.
        """
        ...

    def align(self, at: AlignmentContext) -> AlignedRows:
        """Decides the rows with the others; all parties call it at the beginning of a generation.

        Raises PeerError if the parties' rows do not fit together.
        """
        ...
