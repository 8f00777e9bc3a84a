"""FedHSSL beside FedSplitNN and FedLocal, ResNet-18 on halves of CIFAR-10 (JPEG): ``python -m
benchmarks.gpu.learn --data DIR``.

1,000 labels, 40 % of the training rows aligned. Each line is a process, all runs in one.
"""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from benchmarks.gpu.tell import device_option, tell, tiny_option
from benchmarks.mocosfl import cifar10
from benchmarks.studies import Tables, roster, sgd
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe

LINES: dict[str, Tables | None] = {
    "FedSplitNN": None,
    "FedHSSL-SimSiam": {},
    "FedLocalSimSiam": {"cross": False, "aggregate": False},
}


def recipe(line: str, device: str, seed: int, rounds: int, tiny: bool) -> Tables:
    names = [party["name"] for party in roster(2)]
    switches = LINES[line]
    pretrained: list[Tables] = []
    if switches is not None:
        phase = {
            "kind": "fedhssl",
            "ssl": "simsiam",
            "rounds": rounds,
            "batch_size": 16 if tiny else 256,
            "optimizer": sgd(0.06, weight_decay=3e-5, schedule="cosine"),
        }
        pretrained = [phase | switches]
    fine: Tables = {
        "kind": "splitnn",
        "steps": 2 if tiny else 200,
        "batch_size": 16 if tiny else 128,
        "optimizer": sgd(0.01),
    }
    return {
        "name": "learn",
        "seed": seed,
        "task": {"kind": "multiclass", "classes": 10},
        "parties": roster(2),
        "rows": {
            "validation": 0.05,
            "test": 0.25,
            "aligned": 0.4,
            "labelled": 20 if tiny else 1000,
        },
        "model": {"embedding_size": 512, "encoder": {"kind": "resnet18"}},
        "phases": [*pretrained, fine, {"kind": "evaluate"}],
        "simulate": {"devices": dict.fromkeys(names, device), "threads": 4},
    }


def score(line: str, source: str, device: str, seed: int, rounds: int, tiny: bool) -> None:
    began = time.monotonic()
    tables = recipe(line, device, seed, rounds, tiny)
    data = {
        name: DataSettings.model_validate(
            {
                "source": source,
                "id": "id",
                "columns": ["image"],
                "scale": "minmax",
                "view": {"scheme": "halves", "part": part, "parts": 2},
                **({"label": "label"} if part == 0 else {}),
            }
        )
        for part, name in enumerate(tables["simulate"]["devices"])
    }
    with tempfile.TemporaryDirectory() as folder:
        summary = run_in_process(Recipe.model_validate(tables), data, Path(folder) / "run")
    metrics: dict[str, Any] = summary.metrics
    seconds = round(time.monotonic() - began, 1)
    tell("learn", line=line, seed=seed, rounds=rounds, test=metrics["test"], seconds=seconds)


@click.command()
@device_option
@tiny_option
@click.option("--data", type=click.Path(path_type=Path), required=True)
@click.option("--seed", default=1)
@click.option("--rows", default=10_000, show_default=True, help="Images; 70 % are for training.")
@click.option("--rounds", default=3, show_default=True)
@click.option("--line", help="Only this line, in this process, from the images in DATA.")
def main(
    device: str, tiny: bool, data: Path, seed: int, rows: int, rounds: int, line: str | None
) -> None:
    """Run the lines beside each other."""
    rows, rounds = (200, 1) if tiny else (rows, rounds)
    if line is not None:
        score(line, str(data), device, seed, rounds, tiny)
        return
    with tempfile.TemporaryDirectory() as folder:
        images = cifar10(data, rows, 1, 0, validate=False)
        arrays = {"id": images.ids, "image": images.pixels, "label": images.labels}
        np.savez(Path(folder) / "images.npz", **arrays)
        words = [sys.executable, "-m", "benchmarks.gpu.learn", "--device", device]
        words += ["--data", f"{folder}/images.npz", "--seed", str(seed), "--rounds", str(rounds)]
        words += ["--tiny"] if tiny else []

        def run(name: str) -> None:
            subprocess.run([*words, "--line", name], check=True)

        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            for each in [pool.submit(run, name) for name in LINES]:
                each.result()


if __name__ == "__main__":
    main()
