"""Contestant ``joint``: the same network in one process, no wire at all: the ceiling of one
core.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.contest import Measurement, measurement
from benchmarks.processes import Processes, announce
from benchmarks.stopwatch import Stopwatch
from benchmarks.task import Task, batches, begin, bottom_of, features_of, labels_of, sgd, top_of


def run(task: Task, workdir: Path) -> Measurement:
    """Train ``task`` in one fresh process."""
    with Processes(workdir, timeout_s=600) as processes:
        processes.start(
            "joint", "benchmarks.joint", [json.dumps(task.to_json())], threads=task.joint_threads
        )
        done = processes.expect("joint", "done")
    return measurement(done)


def train(task: Task) -> dict[str, Any]:
    """Run warm-up and measured steps; return the stopwatch's fields and the last loss."""
    precision = begin(task, task.joint_threads)
    x = [features_of(task, party) for party in range(task.parties)]
    y_N1 = labels_of(task)
    bottoms = nn.ModuleList(bottom_of(task, party) for party in range(task.parties))
    top = top_of(task)
    optimizer = sgd(nn.ModuleList([*bottoms, top]))
    criterion = nn.BCEWithLogitsLoss()
    loss = torch.zeros(())
    watch = Stopwatch(task)
    for i_B in batches(task):
        watch.lap()
        optimizer.zero_grad()
        with precision:
            z_BE = sum(bottom(x_k[i_B]) for bottom, x_k in zip(bottoms, x, strict=True))
            outputs_B1 = top(z_BE)
        loss = criterion(outputs_B1.float(), y_N1[i_B])
        loss.backward()
        optimizer.step()
    # Waits for a GPU.
    last = loss.item()
    return {**watch.stop(), "loss": last}


if __name__ == "__main__":
    announce("done", **train(Task.from_json(json.loads(sys.argv[1]))))
