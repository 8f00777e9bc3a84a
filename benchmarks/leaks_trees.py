"""What trees give away: ``python -m benchmarks.leaks_trees --data DIR [--seeds 1,2,3] [--lies]
[--out FILE]``.

Credit default as FATE divides it, 30 trees with learning rate 0.3, rehearsed without encryption:
the nodes, the sides and the sums are the same with it. Each line is a recipe beside the plain one,
with its test AUC. ``--lies``: what parties that lie would read, by the number of trees.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import vfl
from benchmarks.secureboost import credit

Tables = dict[str, Any]
ATTACKS = ("nodes", "sides", "sums")
VARIANTS: dict[str, Tables] = {
    "plain": {},
    "trees-10": {"trees": 10},
    "depth-5": {"depth": 5},
    "first_tree_own": {"first_tree_own": True},
    "bins-8": {"bins": 8},
    "min_child_weight-200": {"min_child_weight": 200.0},
    "goss-0.2-0.1": {"goss": {"top": 0.2, "rest": 0.1}},
}
LIES = ("sides", "probes", "inventions")
LYING: dict[str, Tables] = {f"trees-{trees}": {"trees": trees} for trees in (1, 3, 5, 10, 30)} | {
    "depth-7-trees-3": {"trees": 3, "depth": 7}
}


def recipe(data: Path, name: str) -> Tables:
    """Returns the recipe of one line."""
    phase = {
        "kind": "secureboost",
        "trees": 30,
        "learning_rate": 0.3,
        "encryption": "none",
        "splits": ["test"],
    }
    return {
        "name": name,
        "task": {"kind": "binary"},
        "parties": [{"name": "guest", "role": "active"}, {"name": "host", "role": "passive"}],
        "rows": {"test": 0.2, "validation": 0.0},
        "model": {"embedding_size": 2, "encoder": {"kind": "mlp", "hidden": []}},
        "phases": [phase | (VARIANTS | LYING)[name]],
        "simulate": {"parties": credit(data.resolve())},
    }


def lines(data: Path, seeds: list[int], *, lies: bool = False) -> Tables:
    """Returns {recipe: {figure: mean and sd of the leak, mean of chance and baselines}}."""
    found: Tables = {}
    for name in LYING if lies else VARIANTS:
        (of,) = vfl.leaks(
            recipe(data, name), attacks=LIES if lies else ATTACKS, seeds=seeds, quiet=True
        ).found
        assert of.utility is not None
        found[name] = {"test auc": {"mean": of.utility.mean, "sd": of.utility.sd}}
        for line in of.lines:
            key = f"{line.attack}: {line.of}; {line.knows}"
            found[name][key] = {
                "unit": line.unit,
                "mean": line.value.mean,
                "sd": line.value.sd,
                "high": line.high.mean if line.high else None,
                "chance": line.chance.mean if line.chance else None,
                **{
                    f"without messages: {each}": spread.mean
                    for each, spread in line.baselines.items()
                },
            }
        print(f"{name}: {json.dumps(found[name])}", flush=True)
    return found


def show(found: Tables) -> None:
    """Prints a line for each recipe: its metric, and the leaks without those of single columns."""
    keys = [key for key in found["plain"] if "host: x" not in key]
    table = Table("recipe", *keys)
    for name, of in found.items():
        cells = [of.get(key) or of.get(key.replace("30 trees", "10 trees"), {}) for key in keys]
        table.add_row(
            name, *(f"{each['mean']:.3f} ± {each['sd']:.3f}" if each else "–" for each in cells)
        )
    Console(width=180).print(table)


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--seeds", default="1,2,3", show_default=True)
@click.option("--lies", is_flag=True)
@click.option("--out", type=click.Path(path_type=Path))
def main(data: Path, seeds: str, lies: bool, out: Path | None) -> None:
    found = lines(data, [int(seed) for seed in seeds.split(",")], lies=lies)
    if not lies:
        show(found)
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
