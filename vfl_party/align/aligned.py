"""Defines the result of an alignment, and the interface of all alignments."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vfl_common.files import write_atomic
from vfl_common.identity.credentials import Credentials
from vfl_common.psi import MAX_ROWS
from vfl_party.base.seeds import HeldRows, Rows
from vfl_party.data import Table
from vfl_party.data.ids import Ids
from vfl_party.data.rows import is_division
from vfl_party.outbound.declared import Occurrence
from vfl_party.outbound.exchange import Connections

# The number of rows in each split.
Holding = Mapping[str, int]
# File with the split of each row, one digit per row, in a passive party's folder of a run.
KEPT = "division.txt"


@dataclass(frozen=True)
class AlignedRows:
    """The rows that all parties hold, or one party's own rows without an alignment.

    Args:
        ids: The ids of the rows, in the order that all parties use.
        division: The split of each row as one byte, see ``vfl_party.data.rows.division_of``; None
            if every party divides the rows itself.
        holdings: For each passive party, the number of its rows in each split, if the parties have
            different rows; else empty.
        held: Which party holds which row, if not all parties hold all rows.
        rows: int64 [N], the positions of ``ids`` in this party's table, if a private alignment
            found the rows; else empty.
        pairs: The similarity and the probability of each link of a fuzzy linkage, float32 [N, 2];
            empty for other alignments. ``ids`` are then not the ids of the table.
        keys: The number of the recipe's key that matched each row, from 0, uint8 [N]; empty without
            keys. ``ids`` are then not the ids of the table.
    """

    ids: Sequence[str]
    division: bytes | None = None
    holdings: Mapping[str, Holding] = field(default_factory=dict)
    held: HeldRows | None = None
    rows: Rows = field(default_factory=lambda: np.empty(0, np.int64), compare=False)
    keys: npt.NDArray[np.uint8] = field(
        default_factory=lambda: np.empty(0, np.uint8), compare=False
    )
    pairs: npt.NDArray[np.float32] = field(
        default_factory=lambda: np.empty((0, 2), np.float32), compare=False
    )

    def of(self, table: Table) -> Table:
        """Returns the aligned rows of a party's table. Raises KeyError if the table lacks a row."""
        positions_N = self.positions(table)
        rows = table if positions_N is None else table.select(positions_N)
        if len(self.pairs):
            return replace(rows, pairs_N2=self.pairs)
        return replace(rows, key_N=self.keys) if len(self.keys) else rows

    def get_own_ids(self, table: Table) -> Sequence[str]:
        """Returns the ids of the aligned rows in a party's table, which differ from ``ids`` with
        several keys and with a fuzzy linkage.
        """
        return Ids.of(table.ids).take(self.rows) if self.has_own_ids else self.ids

    @property
    def has_own_ids(self) -> bool:
        """Whether ``ids`` are not the ids of the party's table."""
        return bool(len(self.keys) or len(self.pairs))

    def positions(self, table: Table) -> Rows | None:
        """Returns the positions of the aligned rows in a party's table, int64 [N]; None if they are
        the whole table in its order.

        Raises KeyError if the table lacks a row.
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
        positions_R = self.find_rest(table)
        return None if positions_R is None else table.select(positions_R)

    def find_rest(self, table: Table) -> Rows | None:
        """Returns the positions of the rows of a party's table that are not aligned, int64 [R];
        None if there are none.
        """
        if len(self.ids) == len(table):
            return None
        if len(self.rows):
            is_rest_N = np.ones(len(table), bool)
            is_rest_N[self.rows] = False
        else:
            is_rest_N = ~table.among(self.ids)
        return np.flatnonzero(is_rest_N)

    def by(self, name: str, active: str) -> str:
        """Returns a sentence that says which parties hold the rows of the party ``name``; '' if all
        parties hold all rows.
        """
        if self.held is None:
            return ""
        if name != active:
            return f"also held by {active}"
        groups = self.held.by_holders(self.held.splits["all"])
        group_texts = (
            f"{len(rows):,} that {' and '.join(names) or 'nobody else'} "
            f"{'hold' if len(names) > 1 else 'holds'}"
            for names, rows in groups
        )
        return f"used: {', '.join(group_texts)}"

    def save(self, folder: Path) -> None:
        """Saves the splits in the run's folder, if another party has divided the rows. Raises
        InputError.
        """
        if self.division is not None:
            write_atomic(folder / KEPT, "".join(map(str, self.division)))

    def with_saved_division(self, folder: Path) -> AlignedRows:
        """Returns these rows with the splits that are saved in the run's folder. Returns them
        unchanged if the folder has no splits for these rows.
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
        name: The name of this party.
        run_id: The id of the run. It makes messages useless in other runs.
        table: The rows of this party, in canonical order.
        folder: The folder of this party in the run.
        connections: The connections to the other parties and the server.
        workers: The maximum number of worker processes.
        credentials: The credentials of this party; None if all parties are in one process.
        begins: Called before a new search for common rows; may raise InputError.
        at_least: The minimum number of common rows that this party requires in addition to the
            recipe.
        peer_rows_at_most: The maximum number of rows that this party masks or accepts from another
            party.
        salt: The salt of the private alignment that found the rows; empty without one.
        show: Reports an event to the person at this party.
        tick: Called after each step with (phase, rounds done, rounds, batches done, batches).
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
    """Decides the rows of a run, before models and phases are created.

    ``certain``: Whether the run fails if the rows are not the expected rows. ``protocol``: The
    oldest version of the protocol that supports this alignment.
    """

    certain: bool
    protocol: int

    def occurrences(self, rows: int) -> Sequence[Occurrence]:
        """Returns all exchanges of a generation in order, for parties of ``rows`` rows each."""
        ...

    def get_expected(self, table: Table) -> AlignedRows:
        """Returns the rows that this party expects before it contacts other parties: all its rows,
        unless the alignment is ``certain``.

        ``division`` is None if only the active party knows the splits.
        """
        ...

    def count_earlier(self, runs: Path, name: str, table: Table) -> int | None:
        """Returns the number of common rows of the earlier run that the recipe names; None if the
        recipe names no earlier run.

        ``runs``: The folder with all runs of the party ``name``. Raises InputError or PeerError if
        the rows of the earlier run cannot be used.
        """
        ...

    def get_agreed(self, context: AlignmentContext) -> AlignedRows:
        """Returns the rows that the parties agreed on earlier in the run."""
        ...

    def show(self, context: AlignmentContext, aligned: AlignedRows) -> None:
        """Proves to the active party that this passive party, which returns to the run, still has
        the rows ``aligned``.

        Raises PeerError if the party had other rows when the generation began.
        """
        ...

    def align(self, context: AlignmentContext) -> AlignedRows:
        """Decides the rows together with the other parties. All parties call this method at the
        beginning of a generation.

        Raises PeerError if the rows of the parties differ.
        """
        ...
