"""TPE against random search at equal numbers of runs: the default of credit cards over two parties.

    python -m benchmarks.search --data DIR --out runs/search

``DIR`` has FATE's two files, ``default_credit_hetero_guest.csv.gz`` and ``…_host.csv.gz``. Writes
``benchmarks/results/search.csv`` and ``benchmarks/results/search.md``.
"""

from __future__ import annotations

import csv
import time
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import click
import pandas as pd

import vfl

RESULTS = Path(__file__).parent / "results" / "search.csv"
PAGE = RESULTS.with_suffix(".md")
RUNS, REPEATS = 30, 5
WAYS = ("tpe", "random")
SPACES: dict[str, Any] = {
    "phases.splitnn.optimizer.lr": {"from": 1e-4, "to": 1.0, "log": True},
    "phases.splitnn.batch_size": [64, 256, 1024],
    "model.embedding_size": {"from": 2, "to": 32},
    "model.combine": ["concat", "sum"],
}
TABLES: dict[str, Any] = {
    "name": "credit",
    "task": {"kind": "binary"},
    "parties": [{"name": "guest", "role": "active"}, {"name": "host", "role": "passive"}],
    "rows": {"validation": 0.2, "test": 0.2},
    "model": {"embedding_size": 8, "encoder": {"kind": "mlp", "hidden": [16]}},
    "phases": [
        {"kind": "splitnn", "epochs": 3, "early_stopping": {"patience": 3}},
        {"kind": "evaluate"},
    ],
}


@click.command()
@click.option("--data", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--out", required=True, type=click.Path(path_type=Path))
@click.option("--rows", default=6000, show_default=True, help="The first rows of both files.")
@click.option("--runs", default=RUNS, show_default=True)
@click.option("--repeats", default=REPEATS, show_default=True)
def main(data: Path, out: Path, rows: int, runs: int, repeats: int) -> None:
    guest, host = (
        pd.read_csv(data / f"default_credit_hetero_{name}.csv.gz", nrows=rows)
        for name in ("guest", "host")
    )
    frames = {"guest": vfl.Data(guest, label="y"), "host": host}
    lines = []
    for repeat in range(repeats):
        recipe = vfl.Recipe.from_dict(TABLES | {"seed": repeat})
        for by in WAYS:
            began_s = time.monotonic()
            found = vfl.search(
                recipe,
                SPACES,
                frames,
                objective="validation auc",
                runs=runs,
                by=by,  # type: ignore[arg-type]
                seed=repeat,
                out=out / f"{by}-{repeat}",
                quiet=True,
            )
            states = found.columns()["state"]
            line = {
                "by": by,
                "repeat": repeat,
                "runs": runs,
                "rows": rows,
                "validation_auc": found.value,
                "test_auc": found.test["auc"],
                "pruned": states.count("pruned"),
                "failed": states.count("failed"),
                "seconds": round(time.monotonic() - began_s, 1),
            }
            click.echo(line)
            lines.append(line)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)
    PAGE.write_text(page(lines))


def page(lines: list[dict[str, Any]]) -> str:
    """Words the page of results."""
    rows = []
    for by in WAYS:
        own = [each for each in lines if each["by"] == by]
        cells = [
            f"{fmean(each[key] for each in own):.4f} ± {stdev(each[key] for each in own):.4f}"
            for key in ("validation_auc", "test_auc")
        ]
        pruned, seconds = (fmean(each[key] for each in own) for key in ("pruned", "seconds"))
        rows.append(f"| `{by}` | {' | '.join(cells)} | {pruned:.1f} | {seconds:.0f} |")
    by_repeat = {by: [each["validation_auc"] for each in lines if each["by"] == by] for by in WAYS}
    won = sum(a > b for a, b in zip(*by_repeat.values(), strict=True))
    first = lines[0]
    return f"""# TPE against random search

Default of credit cards, split between two parties as FATE does, the first {first["rows"]:,} rows, three
epochs of split training. The learning rate, the batch, the width of embeddings and how they are
combined were searched with {first["runs"]} runs, {len(by_repeat["tpe"])} times with other seeds.
`benchmarks/search.py` makes this page.

| by | validation AUC of the best | its test AUC | pruned runs | seconds |
| --- | --- | --- | --- | --- |
{chr(10).join(rows)}

Mean and standard deviation over the repeats. TPE found the better validation AUC in {won} of
{len(by_repeat["tpe"])} repeats; its first ten runs are chosen at random, as those of random search. So few
repeats show only a large difference. Both searches pruned.
"""


if __name__ == "__main__":
    main()
