"""What leaks in split training, and what defences cost: ``python -m benchmarks.leaks --data DIR
[--seeds N]``.

Credit default (22 % positive; FATE's two organisations) and scikit-learn's digits, one against the
rest (10 % positive). Each defence runs with each seed; what the passive party received is attacked.
One table, one picture and one JSON file each; ``--quick``: one seed and few epochs, to try it out.
``--only`` with ``fedhssl``, ``tops``, ``active``, ``images`` or ``watch``: ``leaks_fedhssl.py``,
``leaks_tops.py`` and so on.
"""

from __future__ import annotations

import gzip
import tempfile
from pathlib import Path
from typing import Any

import click
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from rich.console import Console
from sklearn.datasets import load_digits

import vfl
from benchmarks import leaks_active, leaks_fedhssl, leaks_images, leaks_tops, leaks_watch
from vfl_common.text import to_json
from vfl_leaks.picture import draw
from vfl_leaks.result import Rehearsed, Spread, as_json
from vfl_leaks.table import render

RESULTS = Path(__file__).parent / "results"
Tables = dict[str, Any]
PARTS = (
    "credit",
    "digits",
    "methods",
    "columns",
    "dcor",
    "epochs",
    "fedhssl",
    "tops",
    "active",
    "images",
    "watch",
)
GRADIENTS = ("norm", "cosine", "clusters")
MODELS = ("completion", "columns", "reidentify")
COLUMNS = ("columns", "reidentify")
LABELS = ("completion", *GRADIENTS)
DIGIT = 8
EVALUATE = {"kind": "evaluate"}
# Epochs: every second one is attacked.
EVERY = 2
# Read by all rounds together.
OVER_EPOCHS = ("none", "max norm", "iso 4", "marvell 4", "marvell 25")


def defences() -> dict[str, Tables]:
    """Returns {name: the transform of the gradients}."""
    found: dict[str, Tables] = {"none": {}, "max norm": {"kind": "max_norm"}}
    found |= {f"iso {x:g}": {"kind": "iso", "amplifier": x} for x in (0.5, 1.0, 2.0, 4.0)}
    found |= {f"marvell {x:g}": {"kind": "marvell", "scale": x} for x in (1.0, 4.0, 10.0, 25.0)}
    return found


def credit(data: Path, own: Path) -> Tables:
    """Returns the parties' data: the guest has the label and 13 columns, the host 10."""
    for side in ("guest", "host"):
        packed = (data / f"default_credit_hetero_{side}.csv.gz").read_bytes()
        (own / f"{side}.csv").write_bytes(gzip.decompress(packed))
    return {
        "active": {"source": str(own / "guest.csv"), "id": "id", "label": "y"},
        "passive": {"source": str(own / "host.csv"), "id": "id"},
    }


def digits(own: Path) -> Tables:
    """Returns the parties' data: the upper and the lower half of each digit, and whether it is an
    eight.
    """
    x, y = load_digits(return_X_y=True)
    ids = pa.array([str(number) for number in range(len(x))])
    for side, columns in (("active", range(32)), ("passive", range(32, 64))):
        table = {"id": ids} | {f"pixel{c}": pa.array(x[:, c].astype(np.float32)) for c in columns}
        if side == "active":
            table["y"] = pa.array((y == DIGIT).astype(np.int64))
        pq.write_table(pa.table(table), own / f"{side}.parquet")
    return {
        "active": {"source": str(own / "active.parquet"), "id": "id", "label": "y"},
        "passive": {"source": str(own / "passive.parquet"), "id": "id"},
    }


def methods(epochs: int, batch_size: int) -> dict[str, list[Tables]]:
    """Returns {name: phases}: split training, and methods that upload once (SS-VFL-I's objective is
    contrastive).
    """
    shared: Tables = {"batch_size": batch_size, "optimizer": {"lr": 0.003}}
    head = {"kind": "head", "own_encoder": "trained", "epochs": epochs, **shared}
    found = {"splitnn": [{"kind": "splitnn", "epochs": epochs, **shared}]}
    for objective in ("pca", "contrastive", "nat"):
        alone: Tables = {"kind": "fedonce", "objective": objective}
        learns = {"epochs": min(5, epochs), "batch_size": 256, "optimizer": {"lr": 0.001}}
        found[f"fedonce {objective}"] = [alone | ({} if objective == "pca" else learns), head]
    return found


def narrower(parties: Tables, epochs: int, batch_size: int) -> dict[str, Tables]:
    """Returns {name: recipe}: what brings the leak of columns down: a narrower cut, NoPeek, or
    MID.
    """
    made = {
        f"width {width}": recipe(
            f"width {width}", {}, parties, epochs=epochs, batch_size=batch_size, width=width
        )
        for width in (8, 4, 2, 1)
    }
    made |= with_term(made["width 8"], "nopeek", (0.01, 0.1, 1.0))
    made |= with_term(made["width 8"], "mid", (0.0001, 0.001, 0.01, 0.03))
    return made


def with_term(plain: Tables, term: str, weights: tuple[float, ...]) -> dict[str, Tables]:
    """Returns {name: recipe} with ``term`` in the loss of the first phase, split training."""
    phase, *rest = plain["phases"]
    return {
        f"{term} {weight:g}": plain
        | {"name": f"{term}-{weight * 10_000:g}", "phases": [phase | {term: weight}, *rest]}
        for weight in weights
    }


def recipe(
    name: str, transform: Tables, parties: Tables, *, epochs: int, batch_size: int, width: int = 16
) -> Tables:
    """Makes a recipe of split training: an MLP at each party, a top model with one hidden layer."""
    phase: Tables = {
        "kind": "splitnn",
        "epochs": epochs,
        "batch_size": batch_size,
        "optimizer": {"lr": 0.003},
    }
    if transform:
        phase["transforms"] = [{"exchange": "embedding", "sent_by": "active"} | transform]
    return {
        "name": name.replace(" ", "-").replace(".", "-"),
        "task": {"kind": "binary"},
        "parties": [{"name": "active", "role": "active"}, {"name": "passive", "role": "passive"}],
        "rows": {"validation": 0.1, "test": 0.2},
        "model": {
            "embedding_size": width,
            "encoder": {"kind": "mlp", "hidden": [64]},
            "top": {"hidden": [32]},
        },
        "phases": [phase, {"kind": "evaluate"}],
        "run": {"checkpoint_every": 100},
        "simulate": {"parties": parties},
    }


def costs(found: dict[str, Rehearsed]) -> str:
    """Returns a Markdown table: AUC lost against no defence, seed by seed, and each attack's 95 %
    quantile.
    """
    plain = found["none"].utility
    assert plain is not None
    keys = list(
        dict.fromkeys((line.attack, line.knows) for each in found.values() for line in each.lines)
    )
    keys = [key for key in keys if "means" not in key[1]]
    lines = [
        "| defence | test AUC | points lost | "
        + " | ".join(f"{attack}: {knows}" for attack, knows in keys)
        + " |",
        "| --- " * (3 + len(keys)) + "|",
    ]
    for name, each in found.items():
        assert each.utility is not None
        lost = Spread(
            tuple(100 * (a - b) for a, b in zip(plain.values, each.utility.values, strict=True))
        )
        by_key = {(line.attack, line.knows): line for line in each.lines}
        cells = []
        for key in keys:
            line = by_key.get(key)
            cells.append(
                "" if line is None or line.high is None else f"{line.value.mean:.3f} / {line.high}"
            )
        lines.append(
            f"| {name} | {each.utility} | {lost.mean:.2f} ± {lost.sd:.2f} | "
            + " | ".join(cells)
            + " |"
        )
    none = found["none"].lines[0]
    if none.chance is not None and none.chance_high is not None:
        lines.append(
            f"\nChance: median {none.chance.mean:.3f}, 95 % of batches {none.chance_high.mean:.3f}."
        )
    return "\n".join(lines) + "\n"


def baselines(found: dict[str, Rehearsed]) -> str:
    """Returns a Markdown table: what each method gives away, beside what an attacker has without
    it.
    """
    lines = [
        "| method | test AUC | attack | reads | knows | leak | chance | without any message |",
        "| --- " * 8 + "|",
    ]
    for name, each in found.items():
        for line in each.lines:
            beside = ", ".join(f"{key} {value}" for key, value in line.baselines.items())
            of = (name, each.utility, line.attack, line.of, line.knows)
            cells = (*of, f"{line.unit} {line.value}", line.chance or "", beside)
            lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


@click.command()
@click.option(
    "--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option("--seeds", default=5, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(PARTS))
@click.option("--quick", is_flag=True)
def cli(data: Path, seeds: int, only: tuple[str, ...], quick: bool) -> None:
    console = Console(width=150, highlight=False)
    for which in only or ("credit", "digits", "methods"):
        if which in ("fedhssl", "tops"):
            play = leaks_fedhssl.run if which == "fedhssl" else leaks_tops.run
            play(data, range(1, (1 if quick else seeds) + 1), quick=quick, console=console)
            continue
        if which == "images":
            leaks_images.run(
                data, range(1, (1 if quick else seeds) + 1), quick=quick, console=console
            )
            continue
        with tempfile.TemporaryDirectory() as place:
            own = Path(place)
            parties = digits(own) if which == "digits" else credit(data, own)
            epochs, batch_size = (25, 256) if which == "digits" else (12, 1024)
            epochs = 2 if quick else epochs
            if which in ("active", "watch"):
                plain = recipe(which, {}, parties, epochs=epochs, batch_size=batch_size, width=8)
                if which == "watch":
                    leaks_watch.run(plain, quick=quick, console=console)
                    continue
                leaks_active.run(
                    plain, range(1, (1 if quick else seeds) + 1), quick=quick, console=console
                )
                continue
            if which == "methods":
                made = {
                    name: recipe(name, {}, parties, epochs=1, batch_size=1, width=8)
                    | {"phases": [*phases, EVALUATE]}
                    for name, phases in methods(epochs, batch_size).items()
                }
            elif which == "columns":
                made = narrower(parties, epochs, batch_size)
            elif which == "dcor":
                plain = recipe("none", {}, parties, epochs=epochs, batch_size=batch_size, width=8)
                made = {"none": plain} | with_term(plain, "dcor", (0.01, 0.03, 0.1))
            else:
                made = {
                    name: recipe(name, transform, parties, epochs=epochs, batch_size=batch_size)
                    for name, transform in defences().items()
                    if which != "epochs" or name in OVER_EPOCHS
                }
            found: dict[str, Rehearsed] = {}
            for name, each in made.items():
                chosen = range(1, (1 if quick else seeds) + 1)
                of_part = {
                    "methods": MODELS,
                    "columns": COLUMNS,
                    "dcor": LABELS,
                    "epochs": ("epochs", *GRADIENTS),
                }
                attacks = of_part.get(which, GRADIENTS)
                every = 1 if which == "epochs" else EVERY
                found[name] = vfl.leaks(
                    each, attacks=attacks, seeds=chosen, every=every, quiet=True
                ).found[0]
                console.print(f"{which}, {name}: test AUC {found[name].utility}")
                # After each run: what is there is kept if the next one fails.
                if not quick:
                    keep(
                        which,
                        costs(found) if attacks == GRADIENTS else baselines(found),
                        [*found.values()],
                    )
            console.print(render([*found.values()]))


def keep(which: str, table: str, found: list[Rehearsed]) -> None:
    (RESULTS / f"leaks-{which}.md").write_text(table)
    (RESULTS / f"leaks-{which}.json").write_text(to_json(as_json(found)) + "\n")
    draw(found).savefig(RESULTS / f"leaks-{which}.png", dpi=130)


if __name__ == "__main__":
    cli()
