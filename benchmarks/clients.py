"""Seconds and memory of MocoSFL with many clients on one machine: ``python -m benchmarks.clients
[--clients 1000] [--sample 0.01] [--processes]``.

The images are noise: what is measured is the cost, and not what is learnt. By default 1,000 clients
with 50 images of 32 x 32 each take turns in one process, and 1 % of them are drawn for each epoch;
with ``--processes`` each client is a process of its own, as on machines of their own.
"""

from __future__ import annotations

import json
import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil

import vfl
from benchmarks.studies import Tables

OWNER = "owner"
CLASSES = 10
# Between two looks at the memory of processes.
_LOOK_S = 0.5


def recipe(clients: int, side: int, epochs: int, **moco: Any) -> Tables:
    """Returns MocoSFL-1 on a small network, and a probe."""
    parties: list[Tables] = [{"name": OWNER, "role": "active", "features": False}]
    parties += [{"name": f"client{number:04d}", "role": "passive"} for number in range(clients)]
    phase = {
        "kind": "mocosfl",
        "image": [3, side, side],
        "cut": 1,
        "epochs": epochs,
        "batch_size": 1,
        "queue": 6000,
        "width": 256,
        **moco,
    }
    return {
        "name": "clients",
        "seed": 1,
        "task": {"kind": "multiclass", "classes": CLASSES},
        "parties": parties,
        "rows": {"align": "none", "validation": 0.0, "test": 0.2},
        "model": {"embedding_size": 128, "encoder": {"kind": "cnn", "channels": [16, 32, 64, 128]}},
        "phases": [phase, {"kind": "probe", "splits": ["test"], "least_steps": 200, "epochs": 1}],
        "run": {"join_deadline_s": 600.0, "step_timeout_s": 600.0},
    }


def images(clients: int, rows: int, side: int) -> dict[str, Any]:
    """Returns each client's images, and the owner's labels of all."""
    random = np.random.default_rng(1)
    data: dict[str, Any] = {}
    ids = np.arange(clients * rows)
    labels = random.integers(0, CLASSES, len(ids))
    data[OWNER] = vfl.Data({"id": ids.astype(str), "label": labels}, id="id", label="label")
    for number in range(clients):
        own = ids[number * rows : (number + 1) * rows]
        pixels = random.integers(0, 256, (rows, side, side, 3), np.uint8)
        frame = {"id": own.astype(str), "image": pixels}
        data[f"client{number:04d}"] = vfl.Data(frame, id="id", settings={"scale": "minmax"})
    return data


class Watch:
    """Notes the most memory that this process and its children have had, in MiB (proportional set
    size: pages that several share count once), and when each round ended.
    """

    def __init__(self) -> None:
        self.most = 0.0
        self.processes = 0
        self.ends: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        me = psutil.Process()
        while not self._over.wait(_LOOK_S):
            total, alive = 0.0, 0
            for each in [me, *me.children(recursive=True)]:
                try:
                    total += each.memory_full_info().pss / 2**20
                    alive += 1
                except psutil.Error:
                    continue
            self.most, self.processes = max(self.most, total), max(self.processes, alive)

    def round(self, done: Any) -> None:
        """Takes the end of a round of a party."""
        if done.party == OWNER and done.phase == "mocosfl":
            self.ends.append(time.monotonic())

    def stop(self) -> None:
        self._over.set()
        self._thread.join()


@click.command()
@click.option("--clients", default=1000)
@click.option("--rows", default=50, help="Images of each client, a fifth of them for testing.")
@click.option("--side", default=32, help="Pixels.")
@click.option("--sample", default=0.01, help="The share of clients drawn for an epoch.")
@click.option("--epochs", default=5)
@click.option("--processes", is_flag=True, help="A process for each client.")
@click.option("--json", "output", type=click.Path(path_type=Path))
def main(
    clients: int,
    rows: int,
    side: int,
    sample: float,
    epochs: int,
    processes: bool,
    output: Path | None,
) -> None:
    """Runs it once, and prints what it cost."""
    data, watch = images(clients, rows, side), Watch()
    before = psutil.Process().memory_info().rss / 2**20
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        tables = recipe(clients, side, epochs, sample=sample)
        run = vfl.simulate(
            tables, data, processes=processes, out=folder, quiet=True, on_round=watch.round
        )
        whole = time.monotonic() - began
        payload = run.summary.bytes.total.payload_bytes
    watch.stop()
    rounds = np.diff(watch.ends)
    found = {
        "clients": clients,
        "drawn": max(1, round(sample * clients)),
        "processes": watch.processes,
        "cores": os.cpu_count(),
        "whole s": round(whole, 1),
        "until the first round ended s": round(watch.ends[0] - began, 1),
        "a round s": round(float(np.median(rounds)), 3) if len(rounds) else None,
        "before MiB": round(before),
        "most MiB": round(watch.most),
        "payload MB": round(payload / 1e6, 1),
    }
    print(json.dumps(found, indent=1))
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
