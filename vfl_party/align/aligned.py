"""The result of an alignment, and the protocol of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from vfl_party.data import Table
from vfl_party.declared import Occurrence
from vfl_party.exchange import Ways


@dataclass(frozen=True)
class Aligned:
    """The rows that all parties hold. ``ids``: in the order that all parties use."""

    ids: tuple[str, ...]

    def of(self, table: Table) -> Table:
        """Returns the aligned rows of a party's table. Raises KeyError if it lacks one."""
        if self.ids == table.ids:
            return table
        position = {row_id: row for row, row_id in enumerate(table.ids)}
        return table.select(np.array([position[row_id] for row_id in self.ids], dtype=np.int64))


class Alignment(Protocol):
    """Decides the rows, before models and phases are made."""

    def occurrences(self, rows: int) -> Sequence[Occurrence]:
        """All that it exchanges in a generation if the parties hold ``rows`` rows each, in order."""
        ...

    def offline(self, ids: tuple[str, ...]) -> Aligned | None:
        """Returns the rows if this party can know them without the others, else None."""
        ...

    def align(self, name: str, run_id: str, ids: tuple[str, ...], ways: Ways) -> Aligned:
        """Decides the rows with the others; all parties call it at the beginning of a generation.

        Args:
            name: this party.
            run_id: the run, so that what is sent has no meaning outside it.
            ids: the ids of this party's table, in its canonical order.

        Raises PeerError if the parties' rows do not fit together.
        """
        ...
