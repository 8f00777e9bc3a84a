"""What many images cost: ``python -m benchmarks.images [--rows N] [--side S] [--before DIR]``.

Two parties, each with N random colour images of S x S pixels as bytes, train by split training and
by local contrastive learning: images a second in the last round, and the largest memory of a
party. With ``--before``, a checkout of other code runs the same recipes in turns: first with its
arrays in memory, whatever their size, then as it comes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.large import train

PARTIES = ("one", "two")
CLASSES = 10
# Images that are drawn at once.
AT_ONCE = 4096
METHODS: dict[str, dict[str, Any]] = {
    "splitnn": {"kind": "splitnn", "optimizer": {"lr": 0.001}},
    "contrastive": {"kind": "contrastive", "ssl": "simclr"},
}
# Of a table that always lies in memory.
ALL_MIB = 1 << 16


def write(folder: Path, rows: int, side: int) -> dict[str, Path]:
    """Writes each party's images and, for the first, labels that its images show a little."""
    labels = np.random.default_rng(0).integers(0, CLASSES, rows)
    found = {}
    for number, party in enumerate(PARTIES):
        rng = np.random.default_rng(number + 1)
        path = folder / f"{party}.npy"
        images = np.lib.format.open_memmap(path, "w+", np.uint8, (rows, side, side, 3))
        for start in range(0, rows, AT_ONCE):
            part = images[start : start + AT_ONCE]
            part[:] = rng.integers(0, 200, part.shape, dtype=np.uint8)
            part += (labels[start : start + AT_ONCE, None, None, None] * 5).astype(np.uint8)
        more = {"y": labels} if number == 0 else {}
        found[party] = folder / f"{party}.npz"
        np.savez(found[party], x=images, **more)
        del images
        path.unlink()
    return found


def recipe(
    files: dict[str, Path], method: str, rounds: int, batch: int, **data: Any
) -> dict[str, Any]:
    parties: dict[str, Any] = {
        party: {"source": str(path.resolve()), **data} for party, path in files.items()
    }
    parties[PARTIES[0]]["label"] = "y"
    length = "epochs" if method == "splitnn" else "rounds"
    phase = METHODS[method] | {length: rounds, "batch_size": batch}
    last = [] if method == "splitnn" else [{"kind": "head", "epochs": 1}]
    return {
        "name": method,
        "task": {"kind": "multiclass", "classes": CLASSES},
        "parties": [
            {"name": PARTIES[0], "role": "active"},
            {"name": PARTIES[1], "role": "passive"},
        ],
        "rows": {"validation": 0.01, "test": 0.01},
        "model": {
            "embedding_size": 32,
            "encoder": {"kind": "cnn", "channels": [8, 16, 16]},
        },
        "phases": [phase, *last, {"kind": "evaluate"}],
        "simulate": {"parties": parties},
    }


def measure(tables: dict[str, Any], rows: int, code: Path | None) -> dict[str, Any]:
    """Trains once; returns images a second in the last round, seconds, and a party's memory."""
    with tempfile.TemporaryDirectory() as folder:
        found = train(tables, Path(folder), code)
    rounds = [each for each in found["rounds"] if each.get("phase", "").startswith(tables["name"])]
    seconds = [each["seconds"] for each in rounds]
    return {
        "images_a_s": rows / seconds[-1],
        "wall_s": found["wall_s"],
        # The last 0.1 s are not in it. On a machine with other work it says more than seconds do.
        "cpu_s": sum(each["cpu_s"] for each in found["memory"].values()) / len(PARTIES),
        "resident_mib": max(each["resident"] for each in found["memory"].values()),
        "anonymous_mib": max(each["anonymous"] for each in found["memory"].values()),
        "metrics": found["metrics"],
    }


@click.command()
@click.option("--rows", default=10_000, show_default=True)
@click.option("--side", default=64, show_default=True, help="Pixels.")
@click.option("--batch", default=256, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--repeats", default=3, show_default=True)
@click.option("--method", "methods", multiple=True, type=click.Choice([*METHODS]))
@click.option(
    "--before", type=click.Path(path_type=Path), help="A checkout of the code to compare with."
)
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Writes all figures to a file."
)
def main(
    rows: int,
    side: int,
    batch: int,
    rounds: int,
    repeats: int,
    methods: tuple[str, ...],
    before: Path | None,
    json_file: Path | None,
) -> None:
    """Trains on many images, and says how fast and in how much memory."""
    console = Console()
    ways: dict[str, tuple[Path | None, dict[str, Any]]] = {"ours": (None, {})}
    if before is not None:
        ways["before, in memory"] = (before, {"memory_mib": ALL_MIB})
        ways["before"] = (before, {})
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        files = write(Path(folder), rows, side)
        for method in methods or METHODS:
            for _ in range(repeats):
                for way, (code, data) in ways.items():
                    tables = recipe(files, method, rounds, batch, **data)
                    found.append({"method": method, "way": way} | measure(tables, rows, code))
                    if json_file is not None:
                        json_file.write_text(json.dumps(found, indent=1))
    table = Table(
        "method",
        "code",
        "images a second",
        "seconds",
        "processor s a party",
        "resident MiB",
        "anonymous MiB",
    )
    table.title = f"{rows:,} images of 3 x {side} x {side} a party"
    for method in methods or METHODS:
        for way in ways:
            mine = [each for each in found if (each["method"], each["way"]) == (method, way)]
            medians = (
                statistics.median(each[key] for each in mine)
                for key in ("images_a_s", "wall_s", "cpu_s", "resident_mib", "anonymous_mib")
            )
            table.add_row(method, way, *(f"{each:,.0f}" for each in medians))
    console.print(table)


if __name__ == "__main__":
    main()
