"""What each preset of ``vfl new --protect`` gives away, and costs: ``python -m
benchmarks.defaults_protect --data DIR [--only TABLE] [--preset NAME] [--seeds N]``.

``vfl new`` writes the recipes; ``vfl leaks`` plays the attacks on all epochs. Eight tables: four of
two classes, two of more, two regressions, cut to 3,000 rows. *Labels* is what the passive party
reads that knows no label, or five rows of each class, by the best of the attacks (AUC of two
classes, accuracy of more, |ρ| of a regression); *columns* the mean R² of the passive party's
columns, all epochs together, by an active party that knows a tenth of the rows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

import click

import vfl
from benchmarks.defaults import generated, spread
from benchmarks.defaults_tables import TABLES, Shared
from vfl.leak_meter.report.result import Rehearsed

RESULTS = Path(__file__).parent / "results" / "defaults-protect.json"
USED = (
    "breast cancer",
    "two classes",
    "phishing",
    "credit",
    "five classes",
    "digits",
    "numbers",
    "diabetes",
)
ROWS = 3_000
# The first is in this table of its own: its figures are what the others are compared with.
PRESETS = ("none", "labels", "columns", "both", "trees")
LABELS = {
    "binary": ("epochs", "clusters", "norm"),
    "multiclass": ("epochs", "clusters"),
    "regression": ("residuals",),
}
# Of what is no split training. FedOnce's active party sends nothing.
ATTACKS = {"trees": ("nodes", "sides"), "fedonce": ("columns",)}
UNITS = {"binary": "AUC", "multiclass": "accuracy", "regression": "|ρ|"}
Tables = dict[str, Any]


def cut(table: Shared) -> Shared:
    """Returns the first rows of a table."""
    frames = {name: frame.head(ROWS) for name, frame in table.frames.items()}
    return Shared(table.name, table.task, frames)


def tables(data: Path) -> Iterator[Shared]:
    known = TABLES["choose"] | TABLES["show"]
    for name in USED:
        yield cut(known[name](data))


def encrypted_bytes(table: Shared) -> int:
    """Returns the bytes of encrypted trees by forecast, which are the most."""
    with tempfile.TemporaryDirectory() as place:
        recipe = generated(table, Path(place), method="secureboost", protect="none")
        return vfl.forecast(recipe).total.payload_bytes


def recipe_of(table: Shared, preset: str, folder: Path) -> vfl.Recipe:
    """Returns the recipe of a preset; trees are rehearsed without encryption, which changes no
    message's meaning.
    """
    if preset == "fedonce":
        plain = generated(table, folder, protect="none")
        shared = {"epochs": 60, "batch_size": 64, "optimizer": {"lr": 0.002}}
        head = {"kind": "head", "own_encoder": "trained", **shared}
        phases = [{"kind": "fedonce", "objective": "pca"}, head, {"kind": "evaluate"}]
        # No more principal components than columns.
        return plain.replace({"phases": phases, "model.embedding_size": 8})
    if preset != "trees":
        return generated(table, folder, protect=preset)
    made = generated(table, folder, method="secureboost", protect="none")
    phase = "phases.secureboost"
    return made.replace({f"{phase}.encryption": "none", f"{phase}.splits": ["test"]})


def lines(found: Rehearsed) -> list[Tables]:
    """Returns the figures that are of no single column."""
    return [
        {
            "attack": each.attack,
            "of": each.of,
            "knows": each.knows,
            "unit": each.unit,
            "place": each.place,
            "value": [*each.value.values],
            "chance": each.chance.mean if each.chance else None,
            "without": {name: spread.mean for name, spread in each.baselines.items()},
        }
        for each in found.lines
        if not each.detail
    ]


def labels_read(found: Tables) -> float | None:
    """Returns the most that is read of labels; None if no attack reads those of such a task."""
    of = [
        fmean(each["value"])
        for each in found["lines"]
        if each["of"] == "labels"
        and each["unit"] == UNITS[found["kind"]]
        and each["knows"].startswith(("nothing", "5 "))
    ]
    return max(of, default=None)


def columns_read(found: Tables) -> float | None:
    """Returns the most that is read of the columns of numbers, as their mean R²."""
    of = [
        fmean(each["value"])
        for each in found["lines"]
        if "mean of columns" in each["of"] and each["unit"] == "R²"
    ]
    return max(of, default=None)


def rehearse(table: Shared, preset: str, seeds: int, changes: Tables) -> Tables:
    """Returns what a preset shows on a table."""
    with tempfile.TemporaryDirectory() as place:
        recipe = recipe_of(table, preset, Path(place))
        recipe = recipe.replace(changes) if changes else recipe
        attacks = ATTACKS.get(preset, (*LABELS[table.task], "columns"))
        (found,) = vfl.leaks(recipe, attacks=attacks, seeds=range(1, seeds + 1), quiet=True).found
    assert found.utility is not None
    return {
        "kind": table.task,
        "metric": found.metric,
        "test": [*found.utility.values],
        "bytes": encrypted_bytes(table) if preset == "trees" else found.payload_bytes,
        "lines": lines(found),
    }


def lost(kept: dict[str, Tables], preset: str) -> float:
    """Returns what a preset costs against none: points, or per cent of a regression's RMSE."""
    none, mine = (fmean(kept[name]["test"]) for name in ("none", preset))
    is_error = kept["none"]["kind"] == "regression"
    return 100 * (mine / none - 1) if is_error else 100 * (none - mine)


def means(kept: dict[str, Tables]) -> dict[str, dict[str, tuple[float, float | None, float]]]:
    """Returns {kind: {preset: (what it costs, labels read, columns read)}}, over the tables of a
    kind, as ``vfl.new.protect`` has them.
    """
    by_kind: dict[str, list[Tables]] = {}
    for of in kept.values():
        by_kind.setdefault(of["none"]["kind"], []).append(of)
    found: dict[str, dict[str, tuple[float, float | None, float]]] = {}
    for kind, tables in by_kind.items():
        found[kind] = {}
        for preset in PRESETS:
            labels = [labels_read(of[preset]) for of in tables]
            columns = [columns_read(of[preset]) or 0.0 for of in tables]
            known = [each for each in labels if each is not None]
            found[kind][preset] = (
                round(fmean(lost(of, preset) for of in tables), 2),
                round(fmean(known), 3) if len(known) == len(labels) else None,
                round(fmean(columns), 3),
            )
    return found


def floors(kept: dict[str, Tables]) -> dict[str, float]:
    """Returns {kind: the mean R² of the columns by the active party's own columns, without any
    message}.
    """
    by_kind: dict[str, list[float]] = {}
    for of in kept.values():
        none = of["none"]
        known = [value for each in none["lines"] for value in each["without"].values()]
        by_kind.setdefault(none["kind"], []).append(max(known))
    return {kind: round(fmean(values), 3) for kind, values in by_kind.items()}


def markdown(kept: dict[str, Tables]) -> str:
    """Returns a table: what each preset reaches, gives away and sends, on each table."""
    found = [
        "| table | preset | test | labels read | columns read, R² (without a message) | MB |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, of in kept.items():
        (alone,) = floors({name: of}).values()
        for preset, each in of.items():
            labels, columns = labels_read(each), columns_read(each)
            cells = (
                name if preset == "none" else "",
                preset,
                f"{each['metric'].removeprefix('test ')} {spread(each['test'])}",
                "–" if labels is None else f"{UNITS[each['kind']].strip('|')} {labels:.2f}",
                "–" if columns is None else f"{columns:.2f} ({alone:.2f})",
                f"{(each['bytes'] or 0) / 1e6:.1f}",
            )
            found.append(f"| {' | '.join(cells)} |")
    return "\n".join(found) + "\n"


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--only", multiple=True, help="A table; once for each.")
@click.option("--preset", "presets", multiple=True, default=PRESETS)
@click.option("--seeds", default=2, show_default=True)
@click.option("--name", help="Of these figures, for a trial. [default: the preset]")
@click.option("--change", multiple=True, help="KEY=JSON of the generated recipe, for a trial.")
@click.option("--out", type=click.Path(path_type=Path), default=RESULTS)
def main(
    data: Path,
    only: tuple[str, ...],
    presets: tuple[str, ...],
    seeds: int,
    name: str | None,
    change: tuple[str, ...],
    out: Path,
) -> None:
    changes = {key: json.loads(text) for key, _, text in (each.partition("=") for each in change)}
    for table in tables(data):
        if only and table.name not in only:
            continue
        for preset in presets:
            found = rehearse(table, preset, seeds, changes)
            # Others may have written meanwhile.
            kept: dict[str, Tables] = json.loads(out.read_text()) if out.exists() else {}
            kept.setdefault(table.name, {})[name or preset] = found
            out.write_text(json.dumps(kept, indent=1) + "\n")
            click.echo(f"{table.name}, {name or preset}: {found['test']}")
    text = markdown(json.loads(out.read_text()))
    out.with_suffix(".md").write_text(text)
    click.echo(text)


if __name__ == "__main__":
    main()
