"""What a model is worth when parties are missing: ``python -m benchmarks.missing --data FOLDER
--json FILE``.

Four parties share phishing's columns, or MNIST-10k's quadrants. Each way of training makes one
model, which all parties train whole. It then scores the test rows, of which each passive party
misses a share that is drawn at random: 0 to 0.5. A row is scored without the parties that miss it.
``zeros`` is plain training, with zeros in the place of who is missing; ``alone`` never asks
anybody. A run that is in FILE already is not made again.
"""

from __future__ import annotations

import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from vfl.library.run import Run
from vfl.simulation.inprocess import run_in_process
from vfl.simulation.origin import Origin
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.files import write_atomic

RATES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
PASSIVES = ("p1", "p2", "p3")
# A plain model is scored with zeros by the policy; nobody is late in training.
ZEROS = {"late_policy": "zeros", "deadline_s": 500.0}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "concat + zeros": ("concat", ZEROS),
    "mean + zeros": ("mean", ZEROS),
    "party dropout": ("concat", {"party_dropout": 0.3}),
    "subsets": ("mean", {"subsets": True}),
    "alone": ("concat", {}),
}
TASKS: dict[str, dict[str, Any]] = {
    "phishing": {
        "task": {"kind": "binary"},
        "data": {"source": "phishing.csv.gz", "id": ["id"]},
        "label": "y",
        # A view would give some party the label, too.
        "parts": [{"columns": [f"f{17 * part + n}" for n in range(17)]} for part in range(4)],
        "encoder": {"kind": "mlp", "hidden": [32]},
    },
    "mnist10k": {
        "task": {"kind": "multiclass", "classes": 10},
        "data": {"source": "mnist10k.npz", "scale": "minmax"},
        "label": "labels",
        "parts": [
            {"columns": ["images"], "view": {"scheme": "quadrants", "part": part, "parts": 4}}
            for part in range(4)
        ],
        "encoder": {"kind": "mlp", "hidden": [64]},
    },
}


def scored(task: str, way: str, seed: int, folder: Path, epochs: int) -> list[float]:
    """Returns the accuracy on test rows for each of ``RATES``."""
    rule, more = WAYS[way]
    names = ("p0",) if way == "alone" else ("p0", *PASSIVES)
    recipe = Recipe.model_validate(
        {
            "name": "missing",
            "seed": seed,
            "task": TASKS[task]["task"],
            "parties": [
                {"name": name, "role": "passive" if name != "p0" else "active"} for name in names
            ],
            "rows": {"validation": 0.1, "test": 0.2},
            "model": {
                "combine": rule,
                "embedding_size": 32,
                "encoder": TASKS[task]["encoder"],
                "top": {"hidden": [32]},
            },
            "phases": [
                {"kind": "splitnn", "epochs": epochs, "batch_size": 128} | more,
                {"kind": "evaluate", "splits": ["test"]},
            ],
        }
    )
    data = _data(task, names, folder)
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        run_in_process(recipe, data, run)
        Origin(run, data).note(run)
        return _accuracies(Run.load(run), names[1:], seed)


def _data(task: str, names: Sequence[str], folder: Path) -> dict[str, DataSettings]:
    own, label = TASKS[task]["data"], {"label": TASKS[task]["label"]}
    return {
        name: DataSettings(
            **own
            | {"source": str((folder / own["source"]).absolute())}
            | TASKS[task]["parts"][part]
            | (label if name == "p0" else {})
        )
        for part, name in enumerate(names)
    }


def _accuracies(run: Run, passives: Sequence[str], seed: int) -> list[float]:
    kept = run.predictions
    ids = next(iter(set(kept) - {"phase", "split", "truth", "class"}), "id")
    ids = "id" if "id" in kept else ids
    truth = {
        id_: true
        for id_, split, true in zip(kept[ids], kept["split"], kept["truth"], strict=True)
        if split == "test"
    }
    right: dict[frozenset[str], dict[Any, bool]] = {}
    for count in range(len(passives) + 1):
        for away in itertools.combinations(passives, count):
            found = run.predict(without=away)
            right[frozenset(away)] = {
                id_: guess == truth[id_]
                for id_, guess in zip(found[ids], found["class"], strict=True)
                if id_ in truth
            }
    found = []
    for rate in RATES:
        random = np.random.default_rng([seed, int(100 * rate)])
        missing = random.random((len(truth), len(passives))) < rate
        sets = [
            frozenset(name for name, is_away in zip(passives, row, strict=True) if is_away)
            for row in missing.tolist()
        ]
        hits = [right[away][id_] for away, id_ in zip(sets, truth, strict=True)]
        found.append(statistics.fmean(hits))
    return found


@click.command()
@click.option("--data", "folder", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--json", "path", required=True, type=click.Path(path_type=Path))
@click.option("--seeds", default=1, show_default=True)
@click.option("--epochs", default=20, show_default=True)
@click.option("--task", "tasks", multiple=True, default=tuple(TASKS), type=click.Choice([*TASKS]))
def main(folder: Path, path: Path, seeds: int, epochs: int, tasks: tuple[str, ...]) -> None:
    """Compare ways to train for parties that are missing."""
    done: dict[str, list[float]] = json.loads(path.read_text()) if path.exists() else {}
    for seed, task, way in itertools.product(range(seeds), tasks, WAYS):
        key = f"{task}: {way}: {epochs} epochs: seed {seed}"
        if key not in done:
            done[key] = scored(task, way, seed, folder, epochs)
            write_atomic(path, json.dumps(done, indent=1) + "\n")
            click.echo(f"{key}: {' '.join(f'{100 * each:.1f}' for each in done[key])}")
    show(done, seeds, epochs, tasks)


def show(done: dict[str, list[float]], seeds: int, epochs: int, tasks: Sequence[str]) -> None:
    """Prints means over seeds, shaded by value."""
    for task in tasks:
        table = Table("way", *(f"{rate:.0%}" for rate in RATES), title=f"{task}: accuracy, %")
        for way in WAYS:
            runs = [done[f"{task}: {way}: {epochs} epochs: seed {seed}"] for seed in range(seeds)]
            means = [100 * statistics.fmean(each) for each in zip(*runs, strict=True)]
            table.add_row(way, *(_shaded(each) for each in means))
        Console().print(table)


def _shaded(percent: float) -> str:
    level = int(min(23, max(0, (percent - 40) / 60 * 23)))
    colour = "black" if level > 11 else "white"
    return f"[{colour} on grey{round(level / 23 * 85) + 3}]{percent:.1f}[/]"


if __name__ == "__main__":
    main()
