"""SecureBoost: ``python -m benchmarks.secureboost --data DIR [--only auc|credit|wide] [--encryption
ou] [--trees N]``.

``auc``: credit default, five seeds, beside LightGBM on the joined columns with the same settings.
``credit`` and ``wide``: seconds a tree on credit default (30,000 x (13 + 10)) and on made-up rows
(100,000 x (30 + 300)), where they go, and bytes. The parties take turns in one thread: the time is
the sum of all parties' work on one core, without their waiting; the CPU time stands beside it. The
time in which keys are made is left out. The limit is what the homomorphic operations alone cost:
their number times the time of one, measured in this process.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table

from vfl.simulation.inprocess import run_in_process
from vfl_common.bundle import load_entries
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_party.base.seeds import split_rows
from vfl_party.data import load_table
from vfl_party.homomorphic import cipher_bytes, has_heu, make_adder, make_keys
from vfl_party.methods.secureboost import active, passive

SETTINGS: dict[str, Any] = {
    "depth": 3,
    "bins": 32,
    "learning_rate": 0.3,
    "lambda": 1.0,
    "min_child_weight": 1.0,
}
BITS = 2048
GOSS = {"top": 0.2, "rest": 0.1}
Tables = dict[str, Any]


class Timed:
    """Keys or an adder that count and time what they do."""

    def __init__(self, of: Any, spent: Counter[str], counts: Counter[str]) -> None:
        self._of, self._spent, self._counts = of, spent, counts

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._of, name)
        return self._timed(name, found) if callable(found) else found

    def _timed(self, name: str, act: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            began = time.process_time()
            result = act(*args)
            self._spent[name] += time.process_time() - began
            self._counts[name] += _length(args[1] if name == "sums" else args[0]) if args else 1
            if name == "wire":
                self._counts["mask"] += len(result)
            return result

        return call


def _length(of: Any) -> int:
    return int(of.shape[0]) if hasattr(of, "shape") else len(of)


def recipe(
    name: str, seed: int, trees: int, encryption: str, test: float, *, goss: bool = False
) -> Recipe:
    phase = {
        "kind": "secureboost",
        "trees": trees,
        "encryption": encryption,
        "key_bits": BITS,
        "splits": ["test"],
    }
    return Recipe.model_validate(
        {
            "name": name,
            "seed": seed,
            "task": {"kind": "binary"},
            "parties": [{"name": "guest", "role": "active"}, {"name": "host", "role": "passive"}],
            "rows": {"test": test, "validation": 0.0},
            "model": {"embedding_size": 2, "encoder": {"kind": "mlp", "hidden": []}},
            "phases": [phase | SETTINGS | ({"goss": GOSS} if goss else {})],
        }
    )


def credit(data: Path) -> Tables:
    found: Tables = {
        name: {"source": str(data / f"default_credit_hetero_{name}.csv.gz"), "id": "id"}
        for name in ("guest", "host")
    }
    found["guest"]["label"] = "y"
    return found


def wide(folder: Path, rows: int, columns: tuple[int, int]) -> Tables:
    """Writes made-up rows: normal values, of which a few from each party decide the label."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(rows, sum(columns))).astype(np.float32)
    y = (
        x[:, 0] + x[:, columns[0]] * x[:, 1] + x[:, columns[0] + 1] + draw.normal(size=rows) > 0
    ).astype(int)
    ids, found = [f"{n:06d}" for n in range(rows)], Tables()
    for name, part in (("guest", slice(0, columns[0])), ("host", slice(columns[0], None))):
        own = x[:, part]
        frame = pd.DataFrame(own, columns=[f"x{c}" for c in range(own.shape[1])])
        frame.insert(0, "id", ids)
        if name == "guest":
            frame["y"] = y
        frame.to_parquet(folder / f"{name}.parquet")
        found[name] = {"source": str(folder / f"{name}.parquet"), "id": "id"}
    found["guest"]["label"] = "y"
    return found


def against_lightgbm(data: Path, trees: int) -> list[tuple[int, float, float]]:
    """Returns (seed, our AUC, LightGBM's) of five seeds."""
    import lightgbm
    from sklearn.metrics import roc_auc_score

    tables = {name: DataSettings(**each) for name, each in credit(data).items()}
    loaded = {name: load_table(each, with_label=name == "guest") for name, each in tables.items()}
    x = np.concatenate([loaded["guest"].numeric_NF, loaded["host"].numeric_NF], axis=1)
    y, found = np.asarray(loaded["guest"].labels, float), []
    for seed in range(5):
        with tempfile.TemporaryDirectory() as folder:
            summary = run_in_process(
                recipe("auc", seed, trees, "none", 0.2), tables, Path(folder) / "run"
            )
        splits = split_rows(seed, len(y), validation=0.0, test=0.2)
        train, test = splits["train"], splits["test"]
        settings = {
            "objective": "binary",
            "learning_rate": SETTINGS["learning_rate"],
            "max_depth": SETTINGS["depth"],
            "num_leaves": 1 << SETTINGS["depth"],
            "max_bin": SETTINGS["bins"],
            "lambda_l2": SETTINGS["lambda"],
            "min_sum_hessian_in_leaf": SETTINGS["min_child_weight"],
            "min_data_in_leaf": 1,
            "min_data_in_bin": 1,
            "num_threads": 1,
            "verbosity": -1,
        }
        model = lightgbm.train(settings, lightgbm.Dataset(x[train], y[train]), trees)
        found.append(
            (
                seed,
                summary.metrics["test"]["auc"],
                float(roc_auc_score(y[test], model.predict(x[test]))),
            )
        )
        print(f"seed {seed}: {found[-1][1]:.5f}, LightGBM {found[-1][2]:.5f}", flush=True)
    return found


def timed(name: str, tables: Tables, trees: int, encryption: Any, *, goss: bool = False) -> Tables:
    """Runs some trees on all rows; returns seconds a tree, where they went, the limit, and bytes a
    tree.
    """
    spent, counts = Counter[str](), Counter[str]()
    real_keys, real_adder = active.make_keys, passive.make_adder

    marks: list[tuple[float, float]] = []

    def keys(*args: Any, **more: Any) -> Any:
        made, public = real_keys(*args, **more)
        if trees == 1:
            marks.append((time.perf_counter(), time.process_time()))
            first.extend([Counter(), Counter()])
        return Timed(made, spent, counts), public

    active.make_keys = keys
    passive.make_adder = lambda *args: Timed(real_adder(*args), spent, counts)
    first: list[Counter[str]] = []

    def observe(party: str, *_: Any) -> None:
        if party == "guest":
            marks.append((time.perf_counter(), time.process_time()))
            if not first:
                first.extend([spent.copy(), counts.copy()])

    try:
        with tempfile.TemporaryDirectory() as folder:
            run_in_process(
                recipe(name, 0, trees, encryption, 0.0, goss=goss),
                {party: DataSettings(**each) for party, each in tables.items()},
                Path(folder) / "run",
                observe=observe,
            )
            entries = load_entries(Path(folder) / "run" / "guest" / "ledger.json")
    finally:
        active.make_keys, passive.make_adder = real_keys, real_adder
    after = max(1, trees - 1)
    (wall, cpu), (wall0, cpu0) = marks[-1], marks[0]
    parts = {key: (spent[key] - first[0][key]) / after for key in spent}
    done = {key: (counts[key] - first[1][key]) / after for key in counts}
    costs = unit_costs(encryption)
    done["shift"] = done["wire"] - done["mask"]
    limit = sum(done[key] * costs[key] for key in costs)
    width = cipher_bytes(encryption, BITS)
    return {
        "rows": name,
        "goss": goss,
        "encryption": encryption,
        "wall s a tree": (wall - wall0) / after,
        "cpu s a tree": (cpu - cpu0) / after,
        "parts": parts,
        "operations": done,
        "unit seconds": costs,
        "limit s": limit,
        "ledger bytes a tree": sum(
            each.payload_bytes for each in entries if each.kind == "gradient"
        )
        / trees,
        "formula bytes a tree": (counts["encrypt"] + counts["mask"]) * width / trees,
        "unpacked bytes a tree": 2 * (counts["encrypt"] + counts["wire"]) * width / trees,
        "load": os.getloadavg()[0],
    }


def unit_costs(encryption: Any, count: int = 400) -> dict[str, float]:
    """Returns the CPU seconds of one operation."""
    made, public = make_keys(encryption, BITS, with_heu=has_heu())
    adds = make_adder(encryption, BITS, public)
    draw = np.random.default_rng(0)
    g, h = draw.integers(-(2**45), 2**45, count), draw.integers(0, 2**43, count)
    found: dict[str, float] = {}

    def of(name: str, number: int, act: Callable[[], Any]) -> Any:
        began = time.process_time()
        result = act()
        found[name] = (time.process_time() - began) / number
        return result

    wire = of("encrypt", count, lambda: made.encrypt(g, h))
    held = adds.load(wire)
    places = draw.integers(0, count, 20 * count)
    of("sums", len(places), lambda: adds.sums(held, places, np.arange(100, len(places) + 1, 100)))
    one, many = adds.take(held, [0]), adds.take(held, list(range(300)))
    # Makes what masks are made of.
    adds.wire(one)
    of("mask", 20, lambda: [adds.wire(one) for _ in range(20)])
    began = time.process_time()
    sums = adds.wire(many)
    found["shift"] = max(0.0, time.process_time() - began - len(sums) * found["mask"]) / max(
        1, 300 - len(sums)
    )
    of("decrypt", len(sums), lambda: made.decrypt(sums, 300))
    return found


def show(results: list[Tables]) -> None:
    table = Table(
        "rows",
        "encryption",
        "wall s",
        "CPU s",
        "limit s",
        "encrypt",
        "sums",
        "add",
        "send",
        "decrypt",
        "MB",
        "load",
    )
    for each in results:
        parts = each["parts"]
        some = [
            f"{parts.get(key, 0.0):.2f}" for key in ("encrypt", "sums", "add", "wire", "decrypt")
        ]
        seconds = [f"{each[key]:.2f}" for key in ("wall s a tree", "cpu s a tree", "limit s")]
        size = f"{each['ledger bytes a tree'] / 1e6:.2f} ({each['formula bytes a tree'] / 1e6:.2f})"
        table.add_row(
            each["rows"], each["encryption"], *seconds, *some, size, f"{each['load']:.1f}"
        )
    Console(width=140).print(table)


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--only", type=click.Choice(["auc", "credit", "wide"]))
@click.option(
    "--encryption",
    type=click.Choice(["ou", "paillier", "none"]),
    multiple=True,
    default=("ou", "paillier"),
)
@click.option("--trees", default=3, help="The first of several is not timed: keys are made in it.")
@click.option(
    "--goss",
    is_flag=True,
    help="Trees see the 20 % of rows with the largest gradients and 10 % of all.",
)
@click.option("--out", type=click.Path(path_type=Path))
def main(
    data: Path,
    only: str | None,
    encryption: tuple[str, ...],
    trees: int,
    goss: bool,
    out: Path | None,
) -> None:
    results: Tables = {}
    if only in (None, "auc"):
        results["auc"] = against_lightgbm(data, 30)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("credit", "wide"):
            if only in (None, name):
                tables = (
                    credit(data) if name == "credit" else wide(Path(folder), 100_000, (30, 300))
                )
                results[name] = [timed(name, tables, trees, each, goss=goss) for each in encryption]
                show(results[name])
    if out is not None:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
