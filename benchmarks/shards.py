"""Trees by worker processes: ``python -m benchmarks.shards [--repeats N] [--out FILE]``.

One tree of depth 3 of both sides, without a network: gradients encrypted, sums of all levels added
up, packed and decrypted, by gmpy2 (``paillier``, 2,048 bits) or as they are (``none``), with 1, 2
and 4 processes in turns. Each stage is measured by the wall and by the processor's time of the
program and of its busiest worker: their sum is what the stage takes if every worker has a core.
Results are compared with those of one process, bit for bit.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from vfl_party.homomorphic import Adder, make_adder, make_keys
from vfl_party.homomorphic.paillier import PaillierAdder
from vfl_party.homomorphic.scheme import PlainAdder
from vfl_party.homomorphic.shards import Shards, make_summing, share_adder, share_keys
from vfl_party.homomorphic.sums import BELOW, SumPlan

BITS, CODES = 2048, 32
# Encryption, rows, columns.
TASKS: list[tuple[Any, int, int]] = [
    ("paillier", 30_000, 10),
    ("paillier", 20_000, 100),
    ("none", 30_000, 10),
    ("none", 100_000, 300),
]
WORKERS = (1, 2, 4)
STAGES = ("encrypt", "sums", "pack", "decrypt")


class Stopwatch:
    """Measures stages: wall, and the processor's time of this program and its busiest worker."""

    def __init__(self) -> None:
        self.found: dict[str, dict[str, float]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        before, own, wall = _spent(), time.process_time(), time.perf_counter()
        yield
        after = _spent()
        busiest = max((after[pid] - before.get(pid, 0.0) for pid in after), default=0.0)
        self.found[name] = {
            "wall_s": time.perf_counter() - wall,
            "own_s": time.process_time() - own,
            "busiest_worker_s": busiest,
        }


def _spent() -> dict[int, float]:
    """Returns the processor's seconds of each worker."""
    return {
        each.pid: sum(each.cpu_times()[:2]) for each in psutil.Process().children(recursive=True)
    }


def _peak(pid: int) -> float:
    """Returns the most memory that a process has had, in MiB: with the pages that it shares."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


class Task:
    """One tree's work, and the keys for it."""

    def __init__(self, encryption: Any, rows: int, columns: int) -> None:
        draw = np.random.default_rng(0)
        self.encryption, self.rows, self.columns = encryption, rows, columns
        self.g, self.h = draw.integers(-(2**40), 2**40, rows), draw.integers(0, 2**40, rows)
        self.codes = draw.integers(0, CODES, (rows, columns)).astype(np.int8)
        every = [
            (column, BELOW, code, CODES - 1)
            for column in range(columns)
            for code in range(1, CODES)
        ]
        self.plan = SumPlan.of(np.array(every, np.int32))
        self.order = draw.permutation(len(every)).tolist()
        # Of two brothers the smaller: a half of the rows, then two quarters.
        shuffled, half = draw.permutation(rows), rows // 2
        self.levels = [
            [np.sort(each) for each in level]
            for level in (
                [shuffled],
                [shuffled[:half]],
                [shuffled[: half // 2], shuffled[half : half + half // 2]],
            )
        ]
        self.keys, public = make_keys(encryption, BITS, with_heu=False)
        self.adder = make_adder(encryption, BITS, public)
        self.first: list[Any] = []

    def run(self, workers: int) -> dict[str, Any]:
        """Grows the tree. Returns what each stage took, and the memory of each process."""
        watch, active, passive = Stopwatch(), Shards(workers), Shards(workers)
        keys, own = share_keys(self.keys, active), share_adder(self.adder, passive)
        try:
            with watch.stage("start"):
                few = keys.encrypt(self.g[:8], self.h[:8])
                codes = self.codes[: len(few)]
                for _ in range(workers):
                    make_summing(passive, own, few, codes, self.plan).sums([np.arange(len(few))])
            with watch.stage("encrypt"):
                wire = keys.encrypt(self.g, self.h)
            with watch.stage("sums"):
                of = make_summing(passive, own, wire, self.codes, self.plan)
                sums = [each for level in self.levels for each in of.sums(level)]
            with watch.stage("pack"):
                packed = [own.wire(own.take(each, self.order)) for each in sums]
            with watch.stage("decrypt"):
                found = [keys.decrypt(each, len(self.order)) for each in packed]
            self._compare(own, sums, found)
            pids = [each.pid for each in psutil.Process().children(recursive=True)]
            peaks = [round(_peak(pid)) for pid in pids]
        finally:
            active.close()
            passive.close()
        whole = {
            key: sum(watch.found[stage][key] for stage in STAGES)
            for key in ("wall_s", "own_s", "busiest_worker_s")
        }
        return {
            "workers": workers,
            "stages": watch.found,
            "tree": whole,
            "peaks_MiB": peaks,
            "ciphertexts": sum(map(len, packed)),
            "load": os.getloadavg()[0],
        }

    def _compare(self, own: Adder, sums: list[Any], found: list[Any]) -> None:
        pairs = [np.stack(each, axis=1).tolist() for each in found]
        self.first = self.first or pairs
        assert pairs == self.first
        plain = PlainAdder().raw(np.stack([self.g, self.h], axis=1))
        of = make_summing(Shards(1), PlainAdder(), plain, self.codes, self.plan)
        want = [each[self.order].tolist() for level in self.levels for each in of.sums(level)]
        assert pairs == want
        assert all(len(own.raw(each)) == len(self.order) for each in sums)


def median(results: list[dict[str, Any]], at: Callable[[dict[str, Any]], float]) -> float:
    return statistics.median(at(each) for each in results)


def show(results: list[dict[str, Any]]) -> None:
    table = Table(
        "encryption", "rows x columns", "processes", "wall s", "CPU path s", *STAGES, "start"
    )
    table.add_column("MiB a worker")
    for each in results:
        for workers in WORKERS:
            runs = [run for run in each["runs"] if run["workers"] == workers]
            path = median(runs, lambda run: run["tree"]["own_s"] + run["tree"]["busiest_worker_s"])
            stages = [
                median(
                    runs,
                    lambda run, stage=stage: (
                        run["stages"][stage]["own_s"] + run["stages"][stage]["busiest_worker_s"]
                    ),
                )
                for stage in (*STAGES, "start")
            ]
            table.add_row(
                each["encryption"],
                f"{each['rows']:,} x {each['columns']}",
                str(workers),
                f"{median(runs, lambda run: run['tree']['wall_s']):.2f}",
                f"{path:.2f}",
                *[f"{stage:.2f}" for stage in stages],
                str(max((max(run["peaks_MiB"], default=0) for run in runs), default=0)),
            )
    Console(width=130).print(table)


@click.command()
@click.option("--repeats", default=3, help="How often each is measured, in turns.")
@click.option("--only", type=click.Choice(["paillier", "none"]), help="Measure only this one.")
@click.option("--out", type=click.Path(path_type=Path))
def main(repeats: int, only: str | None, out: Path | None) -> None:
    results = []
    for encryption, rows, columns in TASKS:
        if only not in (None, encryption):
            continue
        PlainAdder.pays_from = PaillierAdder.pays_from = 0
        task = Task(encryption, rows, columns)
        runs = [task.run(workers) for _ in range(repeats) for workers in WORKERS]
        about = {"encryption": encryption, "rows": rows, "columns": columns}
        results.append(about | {"cores": os.cpu_count(), "runs": runs})
        show(results[-1:])
        if out is not None:
            out.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
