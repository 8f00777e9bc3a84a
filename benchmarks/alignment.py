"""Privately aligned tables beside joint training: ``python -m benchmarks.alignment --data FOLDER
[--seeds 1,2,3,4,5]``.

The default of credit cards as FATE divides it between two organisations. Here both tables are
shuffled, each side loses a tenth of its rows at random, and spells the ids in its own way. The
parties find the rows in common with ``rows.align = "psi"`` and train split learning (``vfl
simulate``). Beside it, on the same rows: ``combined``, one party with all columns and an encoder as
wide as both parties' together, and ``alone``, the active party. All have the same settings of
training; nothing is chosen on the test rows.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
from rich.console import Console
from rich.table import Table

from vfl.simulation.federation import to_toml

# The guest has the labels.
GUEST, HOST = "guest", "host"
# Of each side's rows.
DROPPED = 0.1
# Of a party's embedding.
WIDTH = 16
# AUC.
ASKED = 0.003
_LIMIT_S = 900.0


@dataclass(frozen=True)
class Turn:
    """The test AUC of one seed's runs, and the rows that the parties have in common."""

    seed: int
    rows: int
    federated: float
    combined: float
    alone: float


def write_tables(data: Path, seed: int, folder: Path) -> int:
    """Writes both tables as CSV; returns how many rows they have in common."""
    kept = []
    for number, name in enumerate((GUEST, HOST)):
        table = arrow_csv.read_csv(data / f"default_credit_hetero_{name}.csv.gz")
        drawn = np.random.default_rng((seed, number))
        rows = drawn.permutation(len(table))[round(DROPPED * len(table)) :]
        table = table.take(pa.array(rows))
        ids = table["id"].to_pylist()
        kept.append(set(ids))
        spelt = [
            f" Customer-{each:06d} " if name == GUEST else f"customer-{each:06d}" for each in ids
        ]
        arrow_csv.write_csv(table.set_column(0, "id", pa.array(spelt)), folder / f"{name}.csv")
    return len(kept[0] & kept[1])


def recipe(seed: int, width: int) -> dict[str, Any]:
    """Returns the recipe's tables; sources are in its folder. ``width``: of an encoder's result."""
    training = {
        "kind": "splitnn",
        "epochs": 50,
        "batch_size": 256,
        "optimizer": {"kind": "adam", "lr": 1e-3, "weight_decay": 1e-3},
        # On the validation rows.
        "early_stopping": {"metric": "auc", "patience": 5},
    }
    return {
        "name": "credit",
        "seed": seed,
        "task": {"kind": "binary"},
        "rows": {"align": "psi", "id_rules": ["trim", "casefold"]},
        "parties": [{"name": GUEST, "role": "active"}, {"name": HOST, "role": "passive"}],
        "model": {
            "embedding_size": width,
            "encoder": {"kind": "mlp", "hidden": [2 * width]},
            "top": {"hidden": [16]},
        },
        "phases": [training, {"kind": "evaluate", "splits": ["test"]}],
        "simulate": {
            "parties": {
                GUEST: {"source": f"{GUEST}.csv", "id": "id", "label": "y"},
                HOST: {"source": f"{HOST}.csv", "id": "id"},
            }
        },
    }


def auc(path: Path, *more: str) -> float:
    """Runs a recipe in processes of its own; returns its test AUC."""
    args = [
        sys.executable,
        "-m",
        "vfl.cli",
        "simulate",
        str(path),
        "--out",
        str(path.parent / "runs"),
        "--json",
        *more,
    ]
    done = subprocess.run(args, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    if done.returncode != 0:
        raise click.ClickException(
            f"vfl simulate ended with {done.returncode}: {done.stderr[-1000:]}"
        )
    return float(json.loads(done.stdout.splitlines()[-1])["metrics"]["test"]["auc"])


def turn(data: Path, seed: int) -> Turn:
    with tempfile.TemporaryDirectory(prefix="vfl-alignment-") as place:
        split, joint = Path(place) / "split.toml", Path(place) / "joint.toml"
        rows = write_tables(data, seed, split.parent)
        split.write_text(to_toml(recipe(seed, WIDTH)))
        joint.write_text(to_toml(recipe(seed, 2 * WIDTH)))
        combined, alone = auc(joint, "--baseline", "combined"), auc(split, "--baseline", "alone")
        return Turn(seed, rows, auc(split), combined, alone)


def print_turns(turns: list[Turn], console: Console) -> None:
    table = Table(
        "seed", "rows in common", "federated", "combined", "alone", "federated - combined"
    )
    for each in turns:
        values = (f"{value:.4f}" for value in (each.federated, each.combined, each.alone))
        table.add_row(
            str(each.seed), f"{each.rows:,}", *values, f"{each.federated - each.combined:+.4f}"
        )
    means = [
        statistics.mean(getattr(each, name) for each in turns)
        for name in ("federated", "combined", "alone")
    ]
    table.add_row("mean", "", *(f"{mean:.4f}" for mean in means), f"{means[0] - means[1]:+.4f}")
    console.print(table)
    console.print(f"asked: federated within {ASKED} of combined, in the mean")


@click.command(help=__doc__)
@click.option(
    "--data",
    required=True,
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of data sets.",
)
@click.option("--seeds", default="1,2,3,4,5", show_default=True)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write every turn here.",
)
def main(data: Path, seeds: str, json_path: Path | None) -> None:
    """Run every seed, and print one table."""
    turns = [turn(data, int(seed)) for seed in seeds.split(",")]
    print_turns(turns, Console(width=None if Console().is_terminal else 120))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(each) for each in turns], indent=1) + "\n")


if __name__ == "__main__":
    main()
