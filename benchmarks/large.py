"""What a large table costs: ``python -m benchmarks.large [--rows N] [--reading-rows N]
[--postgresql]``.

Two parties train one epoch of split training on Parquet files of N rows, 50 columns together:
seconds of reading and of the epoch, peak memory of each party. Before that, one table is read from
Parquet, CSV and PostgreSQL, in processes that take turns: by us, and by ``pyarrow`` or the
database's client, as a whole and in blocks that are dropped.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import psutil
from rich.console import Console
from rich.table import Table

from benchmarks.large_tables import PARTIES, one_csv, one_parquet, parquet_files
from benchmarks.ours import VFL
from tests.harness.postgres import postgres
from vfl.simulation.federation import to_toml
from vfl_common.files import read_lines

WAYS = ("ours", "whole", "blocks")
EVERY_S = 0.1
TIMEOUT_S = 3600.0


def reading(way: str, source: str, query: str | None = None) -> dict[str, Any]:
    """Reads a table in a process of its own, see ``large_read``."""
    args = [
        sys.executable,
        "-m",
        "benchmarks.large_read",
        way,
        source,
        *([query] if query is not None else []),
    ]
    done = subprocess.run(
        args, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=_environment()
    )
    if done.returncode != 0:
        raise click.ClickException(
            f"{way} of {source} ended with {done.returncode}: {done.stderr[-1000:]}"
        )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}


def print_readings(kind: str, found: list[dict[str, Any]], console: Console) -> None:
    table = Table(
        "way",
        "seconds",
        "resident + MiB",
        "anonymous + MiB",
        title=f"{kind}, {found[0]['rows']:,} rows",
    )
    for way in WAYS:
        mine = [each for each in found if each["way"] == way]
        values = [
            statistics.median(each[key] for each in mine)
            for key in ("seconds", "resident", "anonymous")
        ]
        table.add_row(way, f"{values[0]:.1f}", f"{values[1]:,.0f}", f"{values[2]:,.0f}")
    console.print(table)


def print_training(found: dict[str, Any], rows: int, console: Console) -> None:
    epoch = found["rounds"][0]
    console.print(
        f"one epoch of {rows:,} rows: {epoch['steps']:,} steps in {epoch['seconds']:.1f} "
        "s; the whole run"
    )
    console.print(f"{found['wall_s']:.1f} s; test {found['metrics']['test']}")
    table = Table("process", "resident MiB", "anonymous MiB", title="largest memory")
    for name, memory in found["memory"].items():
        table.add_row(name, f"{memory['resident']:,.0f}", f"{memory['anonymous']:,.0f}")
    console.print(table)


def recipe(files: dict[str, Path], batch: int) -> dict[str, Any]:
    """One epoch of split training by two parties."""
    data = {
        party: {"source": str(path.resolve()), "id": "customer"} for party, path in files.items()
    }
    data[PARTIES[0]]["label"] = "default"
    return {
        "name": "large",
        "task": {"kind": "binary"},
        "parties": [
            {"name": PARTIES[0], "role": "active"},
            {"name": PARTIES[1], "role": "passive"},
        ],
        "rows": {"validation": 0.01, "test": 0.01},
        "model": {"embedding_size": 32},
        "phases": [{"kind": "splitnn", "epochs": 1, "batch_size": batch}, {"kind": "evaluate"}],
        "simulate": {"parties": data},
    }


@contextlib.contextmanager
def watched(process: psutil.Process) -> Iterator[dict[int, dict[str, float]]]:
    """Yields {process: largest memory in MiB, and processor seconds} of all processes below one,
    while the block runs.
    """
    seen: dict[int, dict[str, float]] = {}
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(EVERY_S):
            for child in process.children(recursive=True):
                with contextlib.suppress(psutil.Error, OSError):
                    memory = child.memory_info()
                    found = {
                        "resident": memory.rss / 2**20,
                        "anonymous": (memory.rss - memory.shared) / 2**20,
                        "cpu_s": sum(child.cpu_times()[:2]),
                    }
                    before = seen.setdefault(child.pid, found)
                    seen[child.pid] = {key: max(value, before[key]) for key, value in found.items()}

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        ended.set()
        thread.join()


def train(tables: dict[str, Any], folder: Path, code: Path | None = None) -> dict[str, Any]:
    """Trains a recipe in a federation of processes; returns its times, its metrics and each
    party's memory.

    ``code``: a checkout of other code, which runs in the place of ours.
    """
    path = folder / "recipe.toml"
    path.write_text(to_toml(tables))
    began = time.time()
    with (
        subprocess.Popen(
            [str(VFL), "simulate", str(path), "--out", str(folder / "runs"), "--json"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=_environment() | ({} if code is None else {"PYTHONPATH": str(code)}),
        ) as process,
        watched(psutil.Process(process.pid)) as seen,
    ):
        said, errors = process.communicate(timeout=TIMEOUT_S)
    if process.returncode != 0:
        raise click.ClickException(
            f"vfl simulate ended with {process.returncode}: {errors[-1000:]}"
        )
    summary = json.loads(said.splitlines()[-1])
    run = folder / "runs" / summary["run_id"]
    first = tables["parties"][0]["name"]
    rounds = [json.loads(line) for line in read_lines(run / first / "metrics.jsonl")]
    return {
        "rounds": rounds,
        "wall_s": time.time() - began,
        "metrics": summary["metrics"],
        "memory": {party["name"]: seen.get(party["pid"]) for party in summary["parties"]},
    }


@click.command()
@click.option("--rows", default=10_000_000, show_default=True, help="Of each party's table.")
@click.option(
    "--reading-rows",
    default=1_000_000,
    show_default=True,
    help="Of the table that is read in several ways.",
)
@click.option("--columns", default=50, show_default=True)
@click.option("--batch", default=4096, show_default=True)
@click.option("--repeats", default=3, show_default=True, help="Turns of reading.")
@click.option(
    "--postgresql", is_flag=True, help="Reads from PostgreSQL too: a server that is started for it."
)
@click.option(
    "--folder", type=click.Path(path_type=Path), help="Keeps the tables; default: a temporary one."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Writes all figures to a file."
)
def main(
    rows: int,
    reading_rows: int,
    columns: int,
    batch: int,
    repeats: int,
    postgresql: bool,
    folder: Path | None,
    json_file: Path | None,
) -> None:
    """Reads large tables, and trains on them."""
    console, figures = Console(), dict[str, Any]()
    with tempfile.TemporaryDirectory(prefix="vfl-large-") as place:
        kept = folder or Path(place)
        kept.mkdir(parents=True, exist_ok=True)
        if reading_rows:
            sources = {
                "Parquet": one_parquet(kept, reading_rows, columns),
                "CSV": one_csv(kept, reading_rows, columns),
            }
            for kind, path in sources.items():
                figures[kind] = [reading(way, str(path)) for _ in range(repeats) for way in WAYS]
                print_readings(kind, figures[kind], console)
            if postgresql:
                with postgres() as server:
                    url = server.url()
                    query = fill(url, sources["Parquet"])
                    figures["PostgreSQL"] = [
                        reading(way, url, query) for _ in range(repeats) for way in WAYS
                    ]
                print_readings("PostgreSQL", figures["PostgreSQL"], console)
        if rows:
            files = parquet_files(kept, rows, columns)
            for way in WAYS:
                figures.setdefault("large", []).append(reading(way, str(files[PARTIES[0]])))
            print_readings("Parquet of one party", figures["large"], console)
            figures["train"] = train(recipe(files, batch), Path(place))
            print_training(figures["train"], rows, console)
    if json_file is not None:
        json_file.write_text(json.dumps(figures, indent=1))


def fill(url: str, path: Path) -> str:
    """Copies a Parquet file into a table of the database; returns the query that reads it."""
    import pyarrow.parquet as parquet
    from adbc_driver_postgresql import dbapi

    with (
        dbapi.connect(url) as connection,
        connection.cursor() as cursor,
        parquet.ParquetFile(path) as file,
    ):
        cursor.adbc_ingest("vfl_large", file.iter_batches(), mode="replace")
        connection.commit()
    return "SELECT * FROM vfl_large"


if __name__ == "__main__":
    main()
