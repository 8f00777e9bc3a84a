"""The names of a table's columns, before anybody knows which of them is the id."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as parquet

from vfl_party.data import checks
from vfl_party.data.columns import csv_header


@dataclass(frozen=True)
class Heading:
    """``names``: of all columns; ``notes``: what the reader has guessed, a sentence each, with the key that decides."""

    names: tuple[str, ...]
    notes: tuple[str, ...] = ()


def heading(source: str) -> Heading:
    """Reads the names of the columns of a CSV or Parquet file. Raises InputError."""
    path, name = Path(source), source.lower()
    if not path.is_file():
        raise checks.unreadable(source, "no such file")
    if name.endswith((".csv", ".csv.gz")):
        return Heading(tuple(csv_header(source)))
    if not name.endswith(".parquet"):
        raise checks.unreadable(source, "is no table that can be read; give a .csv, .csv.gz or .parquet file")
    try:
        return Heading(tuple(parquet.read_schema(source).names))
    except (pa.ArrowException, OSError, ValueError):
        raise checks.unreadable(source, "is not a Parquet file that can be read; write it again") from None
