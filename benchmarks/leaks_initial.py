"""What an active party reads if it can compute the initial weights: ``python -m
benchmarks.leaks_initial``.

Split training of scikit-learn's breast cancer data (15 columns each) and of 2,000 rows of credit
default (FATE's two organisations; with ``--data DIR``), embeddings of 8, 16 and 32, five seeds. The
runs have secret weights, as those of party files; the attacker computes what it can from the recipe
(after), draws weights (chance), or is told the true ones, as it could compute them before there was
``init``. ``--init recipe``: the same runs with weights that follow from the recipe.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal

import click

import vfl
from benchmarks.leaks import credit
from vfl_common.text import to_json
from vfl_leaks.result import AttackLine, Rehearsed

RESULTS = Path(__file__).parent / "results"
WIDTHS = (8, 16, 32)
EPOCHS = 8
# Of credit default.
ROWS = 2000
BATCH = {"breast cancer": 32, "credit": 256}
Tables = dict[str, Any]


def recipe(name: str, width: int, simulate: Tables) -> Tables:
    """Returns the recipe of one line."""
    training = {
        "kind": "splitnn",
        "epochs": EPOCHS,
        "batch_size": BATCH[name],
        "optimizer": {"lr": 0.003},
    }
    return {
        "name": f"{name} {width}".replace(" ", "-"),
        "task": {"kind": "binary"},
        "parties": [{"name": "active", "role": "active"}, {"name": "passive", "role": "passive"}],
        "rows": {"validation": 0.1, "test": 0.2},
        "model": {
            "embedding_size": width,
            "encoder": {"kind": "mlp", "hidden": [64]},
            "top": {"hidden": [32]},
        },
        "phases": [training, {"kind": "evaluate"}],
        "simulate": simulate,
    }


def table(found: dict[str, list[Rehearsed]]) -> str:
    """Returns a Markdown table of the mean R² of the columns, mean ± standard deviation over the
    seeds.
    """
    lines = [
        "| data, embedding | test AUC | attacker knows | with the recipe | random weights "
        "| with the true weights |"
    ]
    lines.append("| --- " * 6 + "|")
    for name, each in found.items():
        for one in each:
            means = {
                line.knows: line for line in one.lines if line.of == "passive: mean of columns"
            }
            for knows, line in means.items():
                if knows.startswith("the recipe"):
                    told = means.get(knows.replace("the recipe", "the true weights"))
                    also = knows.partition(", ")[2] or "no row"
                    width = one.name.rpartition("-")[2]
                    cells = (
                        f"{name}, {width}",
                        f"{one.utility}",
                        also,
                        *_values(line),
                        str(told.value) if told else "",
                    )
                    lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _values(line: AttackLine) -> tuple[str, str]:
    return str(line.value), str(line.chance)


@click.command()
@click.option(
    "--data", type=click.Path(path_type=Path, exists=True), help="Folder with credit default."
)
@click.option("--only", type=click.Choice([*BATCH]), help="One of the data sets.")
@click.option("--seeds", default=5, show_default=True)
@click.option(
    "--init", type=click.Choice(["secret", "recipe"]), default="secret", show_default=True
)
def main(
    data: Path | None, only: str | None, seeds: int, init: Literal["secret", "recipe"]
) -> None:
    """Plays the attack, and writes one JSON file for each data set."""
    with tempfile.TemporaryDirectory() as own:
        sources: dict[str, Tables] = {
            "breast cancer": {
                "scheme": "columns",
                "data": {"source": "sklearn:breast_cancer", "label": "target"},
            }
        }
        if data is not None:
            parties = {
                name: each | {"limit": ROWS} for name, each in credit(data, Path(own)).items()
            }
            sources["credit"] = {"parties": parties}
        for name, simulate in sources.items():
            if only not in (None, name):
                continue
            made = [recipe(name, width, simulate) for width in WIDTHS]
            found = vfl.leaks(made, attacks=["initial"], seeds=range(seeds), init=init, quiet=True)
            print(table({name: [*found.found]}))
            short = name.replace(" ", "-")
            path = RESULTS / f"leaks-initial-{short}{'' if init == 'secret' else '-recipe'}.json"
            path.write_text(to_json(found.as_json()) + "\n")


if __name__ == "__main__":
    main()
