"""What a model is worth when parties are missing: ``python -m benchmarks.missing --data FOLDER``.

Each passive party lacks a share of the training rows and of the test rows, drawn at random: the
grid of MARS-VFL, missing rates in training × test. ``missing_rows`` trains it in one process. Then
the library itself trains with all rows, and its quality of each set of parties is compared with
that on fresh rows, which no run has seen. The page of the results says how settings were chosen.
The JSON is written after each run, and a command that was stopped goes on where it was.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch

from benchmarks import missing_library as library
from benchmarks.missing_rows import WAYS, Mask, Trial
from benchmarks.missing_tables import write
from benchmarks.missing_tasks import TASKS, Setting, divided, load
from benchmarks.studies import RESULTS
from vfl_common.files import write_atomic
from vfl_party.base.seeds import Rows, derive_seed

RATES = (0.0, 0.25, 0.5)
# Rates in training, and the library's own runs: what says most comes first.
ORDER: tuple[float | str, ...] = (0.0, 0.5, "library", 0.25)
# Chosen by rows that were cut from the training rows of seeds that are not among those measured.
EPOCHS = {"credit": 10, "phishing": 40, "UJI": 40, "MNIST-10k": 40}
Found = dict[str, Any]


def drawn(setting: Setting, rows: Rows, rate: float, seed: int, what: str) -> Mask:
    """Draws which passive parties have each of ``rows``, [n, P]; a smaller rate misses fewer of the
    same.
    """
    random = np.random.default_rng(derive_seed(seed, "missing", what))
    found: Mask = random.random((len(rows), len(setting.passives))) >= rate
    return found


def grid(name: str, data: Path, train_rate: float, seed: int) -> Found:
    """Returns {way: [quality for each of ``RATES`` in the test]}."""
    setting, _ = load(name, data, seed)
    train, test = divided(setting, seed)
    known = drawn(setting, np.arange(len(setting.y)), train_rate, seed, "train")
    trial, found = Trial(setting, train, known, seed, EPOCHS[name]), Found()
    for way in WAYS:
        model = trial.trained(way)
        found[way] = [
            trial.quality(model, test, drawn(setting, test, rate, seed, "test")) for rate in RATES
        ]
    return found


def with_library(name: str, data: Path, seed: int) -> Found:
    """Returns what ``library.measured`` finds."""
    setting, fresh = load(name, data, seed)
    _, test = divided(setting, seed)
    masks = [drawn(setting, test, rate, seed, "test") for rate in RATES]
    return library.measured(setting, fresh, test, masks, seed, EPOCHS[name])


@click.command()
@click.option("--data", "folder", required=True, type=click.Path(path_type=Path, exists=True))
@click.option(
    "--json",
    "path",
    default=RESULTS / "missing.json",
    show_default=True,
    type=click.Path(path_type=Path),
)
@click.option("--seeds", default=5, show_default=True)
@click.option("--task", "tasks", multiple=True, default=tuple(TASKS), type=click.Choice([*TASKS]))
def main(folder: Path, path: Path, seeds: int, tasks: Sequence[str]) -> None:
    """Compare ways to train for parties that are missing."""
    torch.set_num_threads(1)
    done: Found = json.loads(path.read_text()) if path.exists() else {}
    for what, seed, task in itertools.product(ORDER, range(1, seeds + 1), tasks):
        key = f"{task}/{what}/{seed}"
        if key in done:
            continue
        if isinstance(what, str):
            done[key] = with_library(task, folder, seed)
        else:
            done[key] = grid(task, folder, what, seed)
        write_atomic(path, json.dumps(done, indent=1, sort_keys=True) + "\n")
        click.echo(key)
    write(done, path, RATES)


if __name__ == "__main__":
    main()
