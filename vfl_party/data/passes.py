"""The passes of an alignment by several keys: each pass matches the rows that are left by one key.

The id of a row contains its keys (``vfl_party.data.id_rules.spell_ids``). In a pass, the other
parties know a row by the number of the key and the key. Rows that are left and have the same key
cannot be told apart, so the pass leaves them to the next key.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_party.data.id_rules import SEPARATOR, split_keys
from vfl_party.data.ids import Ids, in_order
from vfl_party.data.table import Table


class Matches(NamedTuple):
    """The common rows of a party, in the order that all parties use.

    Args:
        rows: Their positions in the party's table, int64 [N].
        ids: The ids by which all parties know them.
        keys: The number of the key that matched each row, from 0, uint8 [N]; empty without keys.
    """

    rows: npt.NDArray[np.int64]
    ids: Sequence[str]
    keys: npt.NDArray[np.uint8]

    def mark(self, rows: int) -> npt.NDArray[np.bool_]:
        """Returns which rows of the party's table with ``rows`` rows are common, bool [rows]."""
        is_common = np.zeros(rows, bool)
        is_common[self.rows] = True
        return is_common


class KeyPasses:
    """The passes of one party's alignment. Without keys there is one pass, with the whole table.

    Args:
        table: The rows of the party.
        name: The name of the party.
    """

    def __init__(self, table: Table, name: str) -> None:
        self._table, self._name, self._columns = table, name, table.key_columns
        # The number of rows that the last pass leaves because another row has the same key.
        self.shared = 0
        self._is_left = np.ones(len(table), bool)
        self._selected = np.arange(len(table))
        self._ids: Sequence[str] = table.ids
        self._matched: list[tuple[npt.NDArray[np.int64], Ids]] = []

    @property
    def count(self) -> int:
        """The number of passes."""
        return 1 if self._columns is None else len(self._columns.keys)

    @property
    def selected(self) -> int:
        """The number of rows of the last pass that ``select`` returned."""
        return len(self._selected)

    def select(self, number: int) -> Table:
        """Returns the rows of a pass, with ids and nothing else."""
        if self._columns is None:
            return self._table
        left_rows = np.flatnonzero(self._is_left)
        keys = self._columns._replace(keys=self._columns.keys[number : number + 1])
        texts = Ids.of(self._table.ids).take(left_rows).values
        (key_texts,) = split_keys(texts, keys)
        sorted_rows = in_order(key_texts, "drop", self._table.space)
        self.shared = len(key_texts) - key_texts.null_count - len(sorted_rows.rows)
        self._selected = left_rows[sorted_rows.rows]
        prefix = pa.scalar(f"{number + 1}{SEPARATOR}", pa.large_string())
        none = pa.scalar("", pa.large_string())
        self._ids = Ids(
            pc.binary_join_element_wise(prefix, sorted_rows.ids, none), self._table.space
        )
        # A set must have a row, so an empty set gets one that no other party has.
        ids = self._ids if len(self._ids) else Ids.of([f"0{SEPARATOR}{self._name}"])
        return Table(self._table.source, ids)

    def add(self, is_common: npt.NDArray[np.bool_]) -> None:
        """Takes which of the rows that ``select`` returned are common, bool [N]."""
        if self._columns is None:
            self._matched.append((np.flatnonzero(is_common), Ids.of(())))
            return
        places = np.flatnonzero(is_common[: len(self._selected)])
        rows = self._selected[places]
        self._is_left[rows] = False
        self._matched.append((rows, Ids.of(self._ids).take(places)))

    @property
    def matches(self) -> Matches:
        """The common rows of all passes so far."""
        rows = np.concatenate([rows for rows, _ in self._matched])
        if self._columns is None:
            return Matches(rows, Ids.of(self._table.ids).take(rows), np.empty(0, np.uint8))
        sizes = [len(rows) for rows, _ in self._matched]
        ids = Ids(pa.concat_arrays([ids.values for _, ids in self._matched]), self._table.space)
        return Matches(rows, ids, np.repeat(np.arange(len(sizes), dtype=np.uint8), sizes))
