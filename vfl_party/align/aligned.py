"""The result of an alignment, and the protocol of one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np

from vfl_common.files import write_atomic
from vfl_party.data import Table
from vfl_party.declared import Occurrence
from vfl_party.exchange import Ways
from vfl_party.rows import is_division

KEPT = "division.txt"  # a digit a row, in a passive party's folder of a run


@dataclass(frozen=True)
class Aligned:
    """The rows that all parties hold. ``ids``: in the order that all parties use.

    ``division``: a byte a row, see ``vfl_party.rows.division_of``; None: every party divides the rows by itself.
    """

    ids: tuple[str, ...]
    division: bytes | None = None

    def of(self, table: Table) -> Table:
        """Returns the aligned rows of a party's table. Raises KeyError if it lacks one."""
        if self.ids == table.ids:
            return table
        position = {row_id: row for row, row_id in enumerate(table.ids)}
        return table.select(np.array([position[row_id] for row_id in self.ids], dtype=np.int64))

    def save(self, folder: Path) -> None:
        """Keeps the division in the run's folder, if another party has made it. Raises InputError."""
        if self.division is not None:
            write_atomic(folder / KEPT, "".join(map(str, self.division)))

    def with_kept(self, folder: Path) -> Aligned:
        """Returns the rows with the division that the run's folder keeps; without, if it keeps none for these rows."""
        try:
            division = bytes(map(int, (folder / KEPT).read_text()))
        except (OSError, ValueError):
            return self
        return replace(self, division=division) if len(division) == len(self.ids) and is_division(division) else self


class Alignment(Protocol):
    """Decides the rows, before models and phases are made."""

    def occurrences(self, rows: int) -> Sequence[Occurrence]:
        """All that it exchanges in a generation if the parties hold ``rows`` rows each, in order."""
        ...

    def offline(self, table: Table) -> Aligned | None:
        """Returns the rows if this party can know them without the others, else None.

        Without the division, if only the active party knows it.
        """
        ...

    def align(self, name: str, run_id: str, table: Table, ways: Ways) -> Aligned:
        """Decides the rows with the others; all parties call it at the beginning of a generation.

        Args:
            name: this party.
            run_id: the run, so that what is sent has no meaning outside it.
            table: this party's rows, in canonical order.

        Raises PeerError if the parties' rows do not fit together.
        """
        ...
