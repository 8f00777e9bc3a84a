"""Boosted trees on representations that carry no label, beside trees on the joined columns and on
the active party's own: ``python -m benchmarks.label_free --data DIR [--only TABLE]``.

The recipe of ``vfl new`` gives the data and the rows; its phases and its model are replaced: each
passive party uploads principal components of its columns once, after standard or quantile scaling,
and the active party grows scikit-learn's trees (learning rate 0.05, at most 400 rounds, 30 without
a lower validation loss). *Joined* are the trees of ``benchmarks.defaults`` (LightGBM), *alone* the
same trees as ours without the other parties' columns; all have the same rows of the same splits.
The metric is the AUC (two classes), the accuracy (several) or R² of the test rows.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
import numpy as np

import vfl
from benchmarks.defaults import generated, joint
from benchmarks.defaults_tables import LABEL, TABLES, Shared

WIDTHS, SCALES = (4, 8, 16), ("standard", "quantile")
TREES: dict[str, Any] = {"kind": "gbdt", "trees": 400, "lr": 0.05, "early_stopping": 30}
METRICS = {"binary": "auc", "multiclass": "accuracy", "regression": "rmse"}


def label_free(table: Shared, recipe: vfl.Recipe, width: int, scale: str) -> vfl.Recipe:
    """Returns the recipe with one upload of at most ``width`` numbers a row of each party."""
    tables = json.loads(json.dumps(recipe.to_dict()))
    active, *others = table.frames
    tables["parties"] = [{"name": active, "role": "active"}]
    for name in others:
        columns = table.frames[name].shape[1] - 1
        place = {"name": name, "role": "passive", "embedding_size": min(width, columns)}
        tables["parties"].append(place)
        tables["simulate"]["parties"][name]["scale"] = scale
    return _with_trees(tables, bool(others))


def _with_trees(tables: dict[str, Any], has_others: bool) -> vfl.Recipe:
    tables["model"] = {"embedding_size": 1, "top": TREES}
    pca = [{"kind": "fedonce", "objective": "pca"}] if has_others else []
    tables["phases"] = [*pca, {"kind": "head"}, {"kind": "evaluate"}]
    return vfl.Recipe.from_dict(tables)


def alone(table: Shared, recipe: vfl.Recipe) -> vfl.Recipe:
    """Returns the recipe without the passive parties."""
    tables = json.loads(json.dumps(recipe.to_dict()))
    active = next(iter(table.frames))
    tables["parties"] = [{"name": active, "role": "active"}]
    own = tables["simulate"]["parties"]
    tables["simulate"]["parties"] = {active: own[active]}
    return _with_trees(tables, has_others=False)


def figures(table: Shared, seed: int) -> dict[str, float]:
    """Returns {how: the metric of the test rows}."""
    found: dict[str, float] = {}
    spread = float(np.var(table.joined()[LABEL])) if table.task == "regression" else 1.0

    def shown(value: float) -> float:
        return 1.0 - value**2 / spread if table.task == "regression" else value

    with tempfile.TemporaryDirectory() as place:
        recipe = generated(table, Path(place), protect="none").replace(seed=seed)
        own = vfl.simulate(alone(table, recipe), quiet=True)
        found["alone"] = shown(own.metrics["test"][METRICS[table.task]])
        found["joined"] = shown(joint(table, own.predictions, seed))
        for scale in SCALES:
            for width in WIDTHS:
                run = vfl.simulate(label_free(table, recipe, width, scale), quiet=True)
                found[f"{scale} {width}"] = shown(run.metrics["test"][METRICS[table.task]])
    return found


@click.command()
@click.option("--data", type=click.Path(path_type=Path), default=Path("data"))
@click.option("--only", multiple=True, help="The table; several times for several.")
@click.option("--seeds", default=3)
@click.option("--out", type=click.Path(path_type=Path), help="Where each seed's line is added.")
def main(data: Path, only: tuple[str, ...], seeds: int, out: Path | None) -> None:
    """Prints a line for each table and seed, then the means."""
    tables = {name: make for each in TABLES.values() for name, make in each.items()}
    for name in only or tables:
        table, of = tables[name](data), defaultdict(list)
        for seed in range(1, seeds + 1):
            began = time.perf_counter()
            found = figures(table, seed)
            for how, value in found.items():
                of[how].append(value)
            line = {"table": name, "seed": seed, **{how: round(v, 4) for how, v in found.items()}}
            line["seconds"] = round(time.perf_counter() - began, 1)
            print(json.dumps(line), flush=True)
            if out is not None:
                with out.open("a") as file:
                    file.write(f"{json.dumps(line)}\n")
        means = ", ".join(
            f"{how} {fmean(each):.4f}" + (f" ± {stdev(each):.4f}" if len(each) > 1 else "")
            for how, each in of.items()
        )
        print(f"{name}: {means}", flush=True)


if __name__ == "__main__":
    main()
