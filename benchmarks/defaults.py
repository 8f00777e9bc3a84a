"""What ``vfl new`` writes, beside LightGBM on the joined columns: ``python -m benchmarks.defaults
--data DIR --name NAME [--tables show|choose] [--only TABLE]``.

``vfl new`` itself writes the recipe and the party files, from CSV files, a seed at a time; only
``--align digest`` is given, since alignment learns nothing. LightGBM gets the same training rows,
stops early on the same validation rows, and is judged on the same test rows: its own defaults
(learning rate 0.1, 31 leaves, 20 rows a leaf), at most 1,000 trees, 50 without a better loss.
Texts are categories, dates are days, and missing cells stay missing. The gap of classes is
LightGBM's metric less ours (AUC of two classes, accuracy of more); of a regression it is our RMSE
over LightGBM's, less 1.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import chdir, redirect_stdout
from pathlib import Path
from statistics import fmean
from typing import Any

import click
import lightgbm
import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table
from sklearn.metrics import roc_auc_score

import vfl
from benchmarks.defaults_read import GAPS, Tables, gap, spread
from benchmarks.defaults_tables import LABEL, TABLES, Shared
from vfl.new.flow import RecipeFlags, new_party, new_recipe
from vfl.new.options import Flags

METRICS = {"binary": "auc", "multiclass": "accuracy", "regression": "rmse"}


def generated(table: Shared, folder: Path, **wishes: Any) -> vfl.Recipe:
    """Returns the recipe that ``vfl new`` writes for a table, with the parties' files beside it."""
    active, *passives = table.frames
    paths = table.write(folder)
    with chdir(folder), Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        new_recipe(
            _given(paths[active], LABEL),
            RecipeFlags(active, tuple(passives), table.task, "digest", **wishes),
        )
        for passive in passives:
            new_party(_given(paths[passive], None), Path("recipe.toml"), passive)
    own = {name: vfl_party_data(folder / f"{name}.toml", folder) for name in table.frames}
    return vfl.Recipe.load(folder / "recipe.toml").replace({"simulate": {"parties": own}})


def vfl_party_data(path: Path, folder: Path) -> Tables:
    """Returns the table ``[data]`` of a party file."""
    import tomllib

    data: Tables = tomllib.loads(path.read_text())["data"]
    return data | {"source": str(folder / data["source"])}


def _given(path: Path, label: str | None) -> Flags:
    return Flags(path.name, ("id",), label, (), None, None, Path(), force=True)


def ours(recipe: vfl.Recipe, task: str, seed: int) -> tuple[Tables, dict[str, list[Any]]]:
    """Returns what a run of the recipe shows, and its predictions."""
    began = time.perf_counter()
    run = vfl.simulate(recipe.replace(seed=seed), quiet=True)
    metric = METRICS[task]
    curves = run.curves()
    found = {
        "test": run.metrics["test"][metric],
        "validation": run.metrics["validation"][metric],
        "rounds": len(curves["round"]),
        "bytes": run.bytes.total.payload_bytes,
        "seconds": round(time.perf_counter() - began, 1),
    }
    return found, run.predictions


def joint(table: Shared, predictions: dict[str, list[Any]], seed: int) -> float:
    """Returns LightGBM's metric on the test rows; ``predictions``: say which rows those are."""
    frame = table.joined()
    frame.index = [spelt(each) for each in frame.index]
    label, x = frame.pop(LABEL), frame
    for name in x.columns:
        if not pd.api.types.is_numeric_dtype(x[name]):
            days = pd.to_datetime(x[name], format="%d.%m.%Y", errors="coerce")
            is_date = bool(days.notna().any())
            x[name] = (
                (days - pd.Timestamp("1970-01-01")).dt.days
                if is_date
                else x[name].astype("category")
            )
    splits = pd.Series(predictions["split"], index=[spelt(each) for each in predictions["id"]])
    split = splits.reindex(frame.index).fillna("train").to_numpy()
    of = {name: np.flatnonzero(split == name) for name in ("train", "validation", "test")}
    if table.task == "regression":
        y, objective = label.to_numpy(float), {"objective": "regression"}
    else:
        classes, y = np.unique(label.to_numpy(), return_inverse=True)
        objective = (
            {"objective": "binary"}
            if table.task == "binary"
            else {"objective": "multiclass", "num_class": len(classes)}
        )

    def rows(name: str) -> Any:
        return lightgbm.Dataset(x.iloc[of[name]], y[of[name]], free_raw_data=False)

    train = rows("train")
    more = {"verbosity": -1, "seed": seed, "num_threads": 1, "deterministic": True}
    trees = lightgbm.train(
        objective | more,
        train,
        1_000,
        [rows("validation")],
        callbacks=[lightgbm.early_stopping(50, verbose=False)],
    )
    scores, truth = trees.predict(x.iloc[of["test"]]), y[of["test"]]
    if table.task == "binary":
        return float(roc_auc_score(truth, scores))
    if table.task == "multiclass":
        return float((scores.argmax(1) == truth).mean())
    return float(np.sqrt(np.mean((scores - truth) ** 2)))


def spelt(id_: Any) -> str:
    """Spells an id as the recipes' rules do."""
    return str(id_).strip().casefold()


def lines(table: Shared, seeds: Iterable[int], changes: Tables, wishes: Tables) -> Iterator[Tables]:
    """Yields what each seed shows. ``changes``: of the generated recipe, for a trial."""
    with tempfile.TemporaryDirectory() as place:
        recipe = generated(table, Path(place), **wishes)
        recipe = recipe.replace(changes) if changes else recipe
        for seed in seeds:
            found, predictions = ours(recipe, table.task, seed)
            found |= {"table": table.name, "task": table.task, "seed": seed}
            yield found | {"lightgbm": joint(table, predictions, seed)}


def keep(path: Path, name: str, found: list[Tables]) -> None:
    """Adds lines to a file; those of the same name, table and seed go."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    known = {(each["table"], each["seed"]): each for each in kept.get(name, [])}
    known |= {(each["table"], each["seed"]): each for each in found}
    kept[name] = [*known.values()]
    path.write_text(json.dumps(kept, indent=1) + "\n")


def show(path: Path) -> None:
    """Prints each table's gap, of each name, and their mean."""
    kept: dict[str, list[Tables]] = json.loads(path.read_text())
    names = dict.fromkeys(each["table"] for found in kept.values() for each in found)
    shown = Table("table", *(f"{name}: {what}" for name in kept for what in ("ours", "gap")))
    means: dict[str, list[float]] = {name: [] for name in kept}
    for table in names:
        cells = []
        for name, found in kept.items():
            of = [each for each in found if each["table"] == table]
            if not of:
                cells += ["", ""]
                continue
            gaps = [gap(each) for each in of]
            means[name].append(fmean(gaps))
            theirs = fmean(each["lightgbm"] for each in of)
            cells.append(f"{spread([each['test'] for each in of])} ({theirs:.3f})")
            cells.append(spread(gaps))
        shown.add_row(table, *cells)
    shown.add_row("mean", *(each for of in means.values() for each in ("", f"{fmean(of):.4f}")))
    Console(width=160).print(shown)


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--name", required=True, help="Of these figures, such as before or after.")
@click.option("--tables", type=click.Choice([*TABLES]), default="show", show_default=True)
@click.option("--only", multiple=True, help="A table; once for each.")
@click.option("--seeds", default=5, show_default=True)
@click.option("--change", multiple=True, help="KEY=JSON of the generated recipe, for a trial.")
@click.option("--wish", multiple=True, help="A further argument of `vfl new`, such as method=….")
@click.option("--out", type=click.Path(path_type=Path), default=GAPS)
def main(
    data: Path,
    name: str,
    tables: str,
    only: tuple[str, ...],
    seeds: int,
    change: tuple[str, ...],
    wish: tuple[str, ...],
    out: Path,
) -> None:
    changes = {key: json.loads(text) for key, _, text in (each.partition("=") for each in change)}
    # What is hidden costs something, which ``defaults_protect`` measures.
    wishes: Tables = {"protect": "none"} | {
        key: text for key, _, text in (each.partition("=") for each in wish)
    }
    for table, made in TABLES[tables].items():
        if only and table not in only:
            continue
        for line in lines(made(data), range(1, seeds + 1), changes, wishes):
            keep(out, name, [line])
            click.echo(f"{name}, {table}, seed {line['seed']}: {json.dumps(line)}")
    show(out)


if __name__ == "__main__":
    main()
