"""Contestant ``ours``: the real system, through ``vfl simulate``: TLS, ledger, checks, logs and
checkpoints are on.

The rate is read from the active party's ``metrics.jsonl``: steps per second between the end of the
first epoch (the warm-up) and the end of the last. Weights and order of rows are drawn by the
recipe's seed, so the last loss is not comparable with the other contestants'.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.contest import Measurement
from benchmarks.task import LEARNING_RATE, Task, features_of, labels_of
from vfl.simulation.federation import to_toml
from vfl_common.files import read_lines

TIMEOUT_S = 900.0
PLAIN: Mapping[str, Any] = {}
VFL = Path(sys.executable).with_name("vfl")


def run(task: Task, workdir: Path, settings: Mapping[str, Any] = PLAIN) -> Measurement:
    """Train ``task`` in a federation of K + 2 processes, forked by one launcher if the machine
    allows it.

    ``settings``: further ones of the phase.
    """
    recipe = write_recipe(task, workdir, settings)
    done = _done([str(VFL), "simulate", str(recipe), "--out", str(workdir / "runs"), "--json"])
    summary = json.loads(done.splitlines()[-1])
    return measure_run(
        workdir / "runs" / summary["run_id"], {"tcp_over_message": tcp_over_message(summary)}
    )


def run_in_process(task: Task, workdir: Path) -> Measurement:
    """Train ``task`` through the library, with all parties in one fresh process."""
    recipe = write_recipe(task, workdir)
    code = "import sys, vfl; print(vfl.simulate(sys.argv[1], out=sys.argv[2], quiet=True).folder)"
    done = _done([sys.executable, "-c", code, str(recipe), str(workdir / "runs")])
    return measure_run(Path(done.splitlines()[-1]))


def _done(args: list[str]) -> str:
    """Run a program; return its standard output."""
    environment = os.environ | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(
        args, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment
    )
    if done.returncode != 0:
        raise RuntimeError(f"{args[0]} ended with {done.returncode}: {done.stderr[-2000:]}")
    return done.stdout


def measure_run(folder: Path, more: dict[str, float] | None = None) -> Measurement:
    """Read the rate from a finished run's folder."""
    rounds = [json.loads(line) for line in read_lines(folder / "active" / "metrics.jsonl")]
    summary = json.loads((folder / "summary.json").read_bytes())
    first, last = rounds[0], rounds[-1]
    rate = (last["steps"] - first["steps"]) / (last["seconds"] - first["seconds"])
    total = summary["bytes"]["total"]
    extra = {
        "payload_bytes": total["payload_bytes"],
        "message_bytes": total["message_bytes"],
        "message_over_payload": total["message_bytes"] / total["payload_bytes"],
        "wall_s": summary["wall_s"],
    }
    return Measurement(rate, None, extra | (more or {}))


def write_recipe(task: Task, workdir: Path, settings: Mapping[str, Any] = PLAIN) -> Path:
    """Write the recipe's file and the parties' data to ``workdir``; return the file."""
    recipe = workdir / "recipe.toml"
    recipe.write_text(to_toml(make_recipe(task, workdir, settings)))
    return recipe


def tcp_over_message(summary: dict[str, Any]) -> float:
    """Return the kernel's bytes over the ledger's, on the connections between active and passive
    parties.
    """
    kernel = sum(
        count["sent_bytes"] + count["received_bytes"]
        for count in summary["bytes"]["tcp"]
        if count["party"] == "active" and count["peer"] != "server"
    )
    messages = sum(
        link["message_bytes"]
        for link in summary["bytes"]["by_link"]
        if "server" not in (link["sender"], link["receiver"])
    )
    return float(kernel / messages)


def make_recipe(task: Task, workdir: Path, settings: Mapping[str, Any] = PLAIN) -> dict[str, Any]:
    """Return the task as a recipe whose parties read NPZ files in ``workdir``, with one more epoch,
    as warm-up.
    """
    steps_an_epoch = -(-task.rows // task.batch)
    epochs = 1 + max(1, -(-task.steps // steps_an_epoch))
    np.savez(
        workdir / "active.npz",
        x=np.zeros((task.rows, 1), np.float32),
        y=labels_of(task).numpy(force=True).ravel(),
    )
    passives = [f"passive{k}" for k in range(task.parties)]
    for k, name in enumerate(passives):
        np.savez(workdir / f"{name}.npz", x=features_of(task, k).numpy(force=True))
    encoder = {"kind": "mlp", "hidden": [256]} if task.bottom == "mlp" else {"kind": "resnet18"}
    data: dict[str, Any] = {"active": {"source": "active.npz", "label": "y", "columns": []}}
    data |= {name: {"source": f"{name}.npz", "scale": "none"} for name in passives}
    return {
        "name": task.name,
        "task": {"kind": "binary"},
        "rows": {"validation": 0.0, "test": 0.0},
        "parties": [
            {"name": "active", "role": "active", "features": False},
            *({"name": name, "role": "passive"} for name in passives),
        ],
        "model": {
            "embedding_size": task.embedding,
            "combine": "sum",
            "encoder": encoder,
            "precision": task.precision,
        },
        "phases": [
            {
                "kind": "splitnn",
                "epochs": epochs,
                "batch_size": task.batch,
                "optimizer": {"kind": "sgd", "lr": LEARNING_RATE},
            }
            | dict(settings)
        ],
        "simulate": {
            "parties": data,
            "threads": task.passive_threads,
            "devices": dict.fromkeys(data, task.device),
        },
    }
