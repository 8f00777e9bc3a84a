"""What noise on labels costs, and what attacks still read: ``python -m benchmarks.noisy_labels --data DIR
[--only TABLE] [--seeds N]``.

Split training as ``vfl new --protect none`` writes it, with ``task.label_epsilon``, on tables of two
classes, of five, and with a rare class (1 %), at most 3,000 rows (12,000 of the rare class).
*Read* is the strongest of the attack ``epochs``, by a passive party that knows no label, or 50 or
200: AUC of two classes, accuracy of more. *Noisy labels* is the same figure of somebody who reads
every noisy label without an error.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import click
import pandas as pd
from sklearn.datasets import make_classification

import vfl
from benchmarks.defaults_protect import cut, recipe_of
from benchmarks.defaults_tables import TABLES, Shared, shared
from vfl_party.privacy.label_noise import keep_probability

RESULTS = Path(__file__).parent / "results" / "noisy-labels.json"
EPSILONS = (None, 4.0, 2.0, 1.0, 0.5)


def rare() -> Shared:
    """Returns a table with 1 % positives."""
    x, y = make_classification(
        12_000, 16, n_informative=8, n_redundant=2, weights=[0.99], flip_y=0.0, random_state=5
    )
    table = pd.DataFrame(x, columns=[f"x{column}" for column in range(16)])
    return shared("rare class", "binary", table, y, 2)


def tables(data: Path) -> Iterator[Shared]:
    known = TABLES["choose"] | TABLES["show"]
    yield from (cut(known[name](data)) for name in ("credit", "two classes", "five classes"))
    yield rare()


def perfect(table: Shared, epsilon: float | None) -> float:
    """Returns what the noisy labels tell of the true ones: the share that is kept, which is also the
    AUC of two classes.
    """
    classes = table.joined()["label"].nunique()
    return 1.0 if epsilon is None else keep_probability(epsilon, classes)


def measure(table: Shared, epsilon: float | None, seeds: int) -> dict[str, object]:
    with tempfile.TemporaryDirectory() as place:
        recipe = recipe_of(table, "none", Path(place))
        if epsilon is not None:
            recipe = recipe.replace({"task.label_epsilon": epsilon, "rows.split": "random"})
        (found,) = vfl.leaks(
            recipe, attacks=("epochs",), seeds=range(1, seeds + 1), quiet=True
        ).found
    assert found.utility is not None
    read = [line for line in found.lines if not line.detail]
    best = max(read, key=lambda line: line.value.mean)
    return {
        "metric": found.metric,
        "test": [*found.utility.values],
        "read": best.value.mean,
        "attack": f"{best.attack}, {best.knows}",
        "unit": best.unit,
        "noisy labels": perfect(table, epsilon),
        "own columns": max(spread.mean for line in read for spread in line.baselines.values()),
    }


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--only", multiple=True, help="A table; once for each.")
@click.option("--seeds", default=2, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
def main(data: Path, only: tuple[str, ...], seeds: int, out: Path) -> None:
    found = json.loads(out.read_text()) if out.exists() else {}
    for table in tables(data):
        if only and table.name not in only:
            continue
        for epsilon in EPSILONS:
            row = measure(table, epsilon, seeds)
            found.setdefault(table.name, {})[str(epsilon or "none")] = row
            out.write_text(json.dumps(found, indent=1) + "\n")
            test = fmean(row["test"])  # type: ignore[arg-type]
            click.echo(
                f"| {table.name} | {epsilon or 'none'} | {test:.3f} | {row['read']:.2f} "
                f"({row['attack']}) | {row['noisy labels']:.2f} | {row['own columns']:.2f} |"
            )


if __name__ == "__main__":
    main()
