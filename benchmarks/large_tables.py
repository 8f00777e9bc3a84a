"""Tables of two parties for ``benchmarks.large``: random numbers, ids in another order at each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as parquet

PARTIES = ("bank", "shop")
_BLOCK = 1 << 18
_SEED = 7


def parquet_files(folder: Path, rows: int, columns: int) -> dict[str, Path]:
    """Returns {party: its Parquet file} of ``rows`` rows and half of ``columns``; makes those that
    are missing.
    """
    return {
        party: _made(folder / f"{party}-{rows}x{columns}.parquet", party, rows, columns // 2)
        for party in PARTIES
    }


def one_parquet(folder: Path, rows: int, columns: int) -> Path:
    """Returns a Parquet file of all columns; makes it if it is missing."""
    return _made(folder / f"all-{rows}x{columns}.parquet", "bank", rows, columns)


def one_csv(folder: Path, rows: int, columns: int) -> Path:
    """Returns the same table as CSV; makes it if it is missing."""
    path = folder / f"all-{rows}x{columns}.csv"
    if not path.exists():
        part = path.with_suffix(".part")
        whole = one_parquet(folder, rows, columns)
        with (
            parquet.ParquetFile(whole) as file,
            arrow_csv.CSVWriter(part, file.schema_arrow) as writer,
        ):
            for batch in file.iter_batches():
                writer.write_batch(batch)
        part.rename(path)
    return path


def _made(path: Path, party: str, rows: int, columns: int) -> Path:
    if not path.exists():
        part = path.with_suffix(".part")
        with parquet.ParquetWriter(
            part, next(_blocks(party, min(rows, 2), columns)).schema
        ) as writer:
            for batch in _blocks(party, rows, columns):
                writer.write_batch(batch)
        part.rename(path)
    return path


def _blocks(party: str, rows: int, columns: int) -> Iterator[pa.RecordBatch]:
    """Yields blocks of rows; the label of a customer depends on the first two numbers of the
    bank's.
    """
    place = PARTIES.index(party)
    order = np.random.default_rng([_SEED, place]).permutation(rows)
    for start in range(0, rows, _BLOCK):
        ids = order[start : start + _BLOCK]
        draw = np.random.default_rng([_SEED, place, start])
        values = draw.standard_normal((columns, len(ids)), dtype=np.float32)
        found = {"customer": pa.array(np.char.add("c", ids.astype("U9")))}
        found |= {f"{party[0]}{column}": pa.array(values[column]) for column in range(columns)}
        if party == "bank":
            noise = draw.standard_normal(len(ids))
            found["default"] = pa.array((values[0] - values[1] + noise > 0).astype(np.int8))
        yield pa.record_batch(found)
