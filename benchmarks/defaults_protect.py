"""What each preset of ``vfl new --protect`` gives away, and costs: ``python -m
benchmarks.defaults_protect --data DIR [--only TABLE] [--preset NAME] [--seeds N]``. Further names, which are no presets: ``fedonce``,
and ``alone``, ``combined`` and ``seeded``, which ``vfl.simulate`` runs.

``vfl new`` writes the recipes; ``vfl leaks`` plays the attacks on all epochs. Eight tables: four of
two classes, two of more, two regressions, cut to 3,000 rows. *Labels* is what the passive party
reads that knows no label, or 50 to 200 labels, by the strongest of the attacks (AUC of two
classes, accuracy of more, |ρ| of a regression); with ``labels`` and ``both`` none are sent, and
tests show that. *Columns* is the mean R² of the passive party's
columns, from all epochs and its own columns, by an active party that knows a tenth of the rows.
The command also writes the tables of README and of docs/results/defaults.md anew.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

import click

import vfl
from benchmarks.defaults import METRICS, generated
from benchmarks.defaults_read import PRESETS, PROTECT, Tables, markdown
from benchmarks.defaults_tables import TABLES, Shared
from scripts.reference.__main__ import main as write_pages
from vfl.new.files import LABEL_FREE
from vfl_leaks.result import Rehearsed

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
LABELS = {
    "binary": ("epochs",),
    "multiclass": ("epochs",),
    "regression": ("residuals",),
}
# Of what is no split training. With an upload alone no message of the active party depends on labels.
UPLOADS = dict.fromkeys((*LABEL_FREE, "fedonce"), ("columns",))
ATTACKS = {"trees": ("nodes", "sides"), **UPLOADS}
# What ``vfl.simulate`` runs, whose initial weights follow the seed; rehearsals draw theirs from secrets.
# Only what they reach is measured.
SIMULATED = {"alone": "alone", "combined": "combined", "seeded": None}


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
        return generated(table, folder, protect="none" if preset in SIMULATED else preset)
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


def rehearse(table: Shared, preset: str, seeds: int, changes: Tables) -> Tables:
    """Returns what a preset shows on a table."""
    with tempfile.TemporaryDirectory() as place:
        recipe = recipe_of(table, preset, Path(place))
        recipe = recipe.replace(changes) if changes else recipe
        if preset in SIMULATED:
            return simulated(recipe, table.task, preset, seeds)
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


def simulated(recipe: vfl.Recipe, task: str, kind: str, seeds: int) -> Tables:
    """Returns what the recipe reaches: at the active party alone, with all columns in one place, or
    as it is.
    """
    metric = METRICS[task]
    runs = [
        vfl.simulate(recipe.replace(seed=seed), baseline=SIMULATED[kind], quiet=True)
        for seed in range(1, seeds + 1)
    ]
    test = [run.metrics["test"][metric] for run in runs]
    sent = round(fmean(run.bytes.total.payload_bytes for run in runs))
    return {"kind": task, "metric": f"test {metric}", "test": test, "bytes": sent, "lines": []}


@click.command()
@click.option("--data", type=click.Path(path_type=Path, exists=True), required=True)
@click.option("--only", multiple=True, help="A table; once for each.")
@click.option("--preset", "presets", multiple=True, default=PRESETS)
@click.option("--seeds", default=2, show_default=True)
@click.option("--name", help="Of these figures, for a trial. [default: the preset]")
@click.option("--change", multiple=True, help="KEY=JSON of the generated recipe, for a trial.")
@click.option("--out", type=click.Path(path_type=Path), default=PROTECT)
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
    click.echo(markdown(json.loads(out.read_text())))
    if out == PROTECT:
        write_pages()


if __name__ == "__main__":
    main()
