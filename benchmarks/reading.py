"""What DuckDB costs as a source: ``python -m benchmarks.reading [--rows N] [--folder F]``.

Makes a folder of Parquet files, in pieces, of an id and numbers: 80 bytes a row with ten columns.
Each way then reads it in a process of its own, in turns: ours (``duckdb:SELECT …``, every cell as a
block that a table is made of) beside plain DuckDB (the same query, to the same blocks of Arrow),
both with and without ORDER BY, and with the same settings; and, of fewer rows, the whole table.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
from rich.console import Console
from rich.table import Table

from benchmarks.large_read import Memory

WAYS = ("ours", "plain", "ours ordered", "plain ordered", "table")
PIECE = 1 << 20
TIMEOUT_S = 7200.0
_SEED = 11


def made(folder: Path, rows: int, columns: int) -> Path:
    """Returns a folder of Parquet files of ``rows`` rows; makes it if it is missing."""
    whole = folder / f"reading-{rows}x{columns}"
    if not whole.exists():
        part = whole.with_suffix(".part")
        part.mkdir(parents=True, exist_ok=True)
        for number, batch in enumerate(_pieces(rows, columns)):
            # In the order of their names, as Spark names them.
            parquet.write_table(pa.table(batch), part / f"part-{number:05}.parquet")
        (part / "_SUCCESS").touch()
        part.rename(whole)
    return whole


def _pieces(rows: int, columns: int) -> Iterator[dict[str, Any]]:
    for start in range(0, rows, PIECE):
        draw = np.random.default_rng([_SEED, start])
        n = min(PIECE, rows - start)
        # Odd, so that each number comes once: ids in no order.
        ids = (np.arange(start, start + n, dtype=np.uint64) * np.uint64(2654435761)) % (1 << 32)
        numbers = {f"x{each}": draw.standard_normal(n) for each in range(columns - 1)}
        yield {"id": ids.astype(np.int64), **numbers}


def read(way: str, folder: Path, scratch: Path, memory: int) -> int:
    """Reads the folder in one way; returns the number of rows."""
    order = " ORDER BY id" if way.endswith("ordered") else ""
    query = f"SELECT * FROM '{folder}/*.parquet'{order}"  # noqa: S608 - our own folder
    if way.startswith("plain"):
        import duckdb

        memory = max(4 * memory, 512)
        threads = max(1, min(os.cpu_count() or 1, memory // 512))
        limits = {"memory_limit": f"{memory}MiB", "temp_directory": str(scratch)}
        with duckdb.connect(":memory:", config=limits | {"threads": threads}) as connection:
            connection.execute("SET enable_progress_bar = false")
            rows = connection.sql(query).to_arrow_reader(1 << 16)
            return sum(batch.num_rows for batch in rows)
    from vfl_common.config.data import DataSettings
    from vfl_party.data import load_table
    from vfl_party.data.load import open_table

    named = {"source": f"duckdb:{query}", "id": "id", "scratch": str(scratch)}
    settings = DataSettings.model_validate(named | {"memory_mib": memory})
    if way == "table":
        return len(load_table(settings, with_label=False))
    stream = open_table(settings)
    assert stream is not None
    return sum(batch.num_rows for batch in stream.blocks(stream.names))


def alone(way: str, folder: Path, memory: int) -> dict[str, Any]:
    """Reads the folder in a process of its own."""
    code = "from benchmarks.reading import measured; measured()"
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="scratch-") as scratch:
        done = subprocess.run(
            [sys.executable, "-c", code, way, str(folder), scratch, str(memory)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        raise click.ClickException(f"{way} ended with {done.returncode}: {done.stderr[-1000:]}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured() -> None:
    """Reads in this process, and prints seconds and the largest memory of all of it, in MiB."""
    way, folder, scratch, limit = sys.argv[1:]
    if not way.startswith("plain"):
        import vfl_party.data  # noqa: F401 - torch comes before the clock starts
    memory, began = Memory(), time.perf_counter()
    rows = read(way, Path(folder), Path(scratch), int(limit))
    seconds = time.perf_counter() - began
    memory.note()
    print(json.dumps({"way": way, "rows": rows, "seconds": seconds, **memory.most}))


@click.command()
@click.option("--rows", default=5_000_000, show_default=True)
@click.option("--columns", default=10, show_default=True, help="With the id.")
@click.option("--memory", default=256, show_default=True, help="data.memory_mib, in MiB.")
@click.option("--repeats", default=3, show_default=True)
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), help="Default: all.")
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Keeps the files; default: a temporary one."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Writes all figures to a file."
)
def main(
    rows: int,
    columns: int,
    memory: int,
    repeats: int,
    ways: tuple[str, ...],
    folder: Path | None,
    json_file: Path | None,
) -> None:
    """Reads a folder of Parquet files through DuckDB, with us and without."""
    console, chosen = Console(), ways or WAYS
    with tempfile.TemporaryDirectory(prefix="vfl-reading-") as place:
        files = made(folder or Path(place), rows, columns)
        size = sum(each.stat().st_size for each in files.iterdir())
        found = [alone(way, files, memory) for _ in range(repeats) for way in chosen]
    table = Table("way", "seconds", "resident + MiB", "anonymous + MiB")
    table.title = f"{rows:,} rows of {columns} columns, {size / 2**30:.2f} GiB of Parquet"
    for way in chosen:
        mine = [each for each in found if each["way"] == way]
        keys = ("seconds", "resident", "anonymous")
        values = [statistics.median(each[key] for each in mine) for key in keys]
        table.add_row(way, f"{values[0]:.1f}", *(f"{value:,.0f}" for value in values[1:]))
    console.print(table)
    if json_file is not None:
        json_file.write_text(json.dumps({"bytes": size, "runs": found}, indent=1))


if __name__ == "__main__":
    main()
