"""What a solo student keeps of a federation: ``python -m benchmarks.student --data DIR``.

Three tasks, three situations, several seeds. Each run trains the joint model (``splitnn``), then
the student, and the same model without a teacher: alone, student and together are measured on the
same test rows. Settings were chosen once, before the runs, and never by a test row. The JSON is
written after each run, and a command that was stopped goes on where it was.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import studies
from benchmarks.fedonce_recipes import phishing, places
from vfl.library.simulate import run_files

Tables = dict[str, Any]
ADAM = {"kind": "adam", "lr": 1e-3, "weight_decay": 1e-5}
STOP = {"patience": 5, "metric": "loss"}
TRAINING: Tables = {"epochs": 40, "batch_size": 256, "optimizer": ADAM, "early_stopping": STOP}
# What the student has: everything; few labels; few rows that all parties hold.
SITUATIONS: dict[str, Tables] = {
    "all": {},
    "labels": {"labelled": 300},
    "overlap": {"aligned": 0.1},
}
# Of the joint model with few labels: as many steps as the others make, in rounds of 50.
FEW: Tables = {"steps": 2000, "validate_every": 25}
# The student's own settings. "answers" is the default.
STUDENTS: dict[str, Tables] = {
    "answers": {"weight": 1.0, "temperature": 2.0},
    "match": {"weight": 1.0, "temperature": 2.0, "match": 0.1},
}
WHO = ("alone", "student", "together")


def credit(data: Path, _own: Path) -> Tables:
    """FATE's split: the guest has the label and 13 columns, the host 10."""
    files = {name: data / f"default_credit_hetero_{name}.csv.gz" for name in ("guest", "host")}
    parties: Tables = {n: {"source": str(path), "id": "id"} for n, path in files.items()}
    parties["guest"]["label"] = "y"
    model = {
        "embedding_size": 16,
        "encoder": {"kind": "mlp", "hidden": [64]},
        "top": {"hidden": [32]},
    }
    found = studies.recipe("student", 2, {"kind": "binary"}, model, {"parties": parties})
    found["parties"] = [
        {"name": "guest", "role": "active"},
        {"name": "host", "role": "passive"},
    ]
    return found


# {task: (its recipe, the metric)}. Four parties each, but for credit.
TASKS: dict[str, tuple[Callable[[Path, Path], Tables], str]] = {
    "credit": (credit, "auc"),
    "phishing": (phishing(4, [30], [30]), "accuracy"),
    "uji": (lambda data, own: _four(places(data, own)), "accuracy"),
}


def _four(tables: Tables) -> Tables:
    model = {"embedding_size": 16, "encoder": {"kind": "mlp", "hidden": [64]}}
    return tables | {
        "parties": studies.roster(4),
        "model": model | {"top": {"hidden": [32]}},
    }


def run(tables: Tables, student: str, seed: int) -> dict[str, dict[str, float]]:
    """Trains once; returns {"test student": {metric: value}, …} for all that are compared."""
    own = TRAINING | STUDENTS[student] | {"kind": "student", "alone": True, "together": True}
    model = tables["model"]
    own |= {"embedding_size": model["embedding_size"], "top": model["top"]}
    tables = tables | {
        "seed": seed,
        "phases": [_joint(tables["rows"]), own],
        "run": {"checkpoint_every": 1000},
    }
    with tempfile.TemporaryDirectory() as folder:
        where = Path(folder) / "run"
        run_files(tables, Path(folder), where)
        found: dict[str, dict[str, float]] = json.loads((where / "summary.json").read_text())[
            "metrics"
        ]
    return {f"{split} {who}": found[f"{split} {who}"] for who in WHO for split in _SPLITS}


def _joint(rows: Tables) -> Tables:
    phase = TRAINING | {"kind": "splitnn"}
    if "labelled" not in rows:
        return phase
    return {key: value for key, value in phase.items() if key != "epochs"} | FEW


_SPLITS = ("validation", "test")


@click.command()
@click.option("--data", required=True, type=click.Path(path_type=Path, exists=True))
@click.option("--task", "tasks", multiple=True, type=click.Choice([*TASKS]))
@click.option("--situation", "situations", multiple=True, type=click.Choice([*SITUATIONS]))
@click.option("--student", "students", multiple=True, type=click.Choice([*STUDENTS]))
@click.option("--seeds", default=5, show_default=True)
@click.option(
    "--json",
    "file",
    default=Path("benchmarks/results/student.json"),
    show_default=True,
    type=click.Path(path_type=Path),
)
def main(
    data: Path,
    tasks: tuple[str, ...],
    situations: tuple[str, ...],
    students: tuple[str, ...],
    seeds: int,
    file: Path,
) -> None:
    """Measures alone, student and together."""
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    with tempfile.TemporaryDirectory() as own:
        for seed in range(1, seeds + 1):
            for situation in situations or SITUATIONS:
                for task in tasks or TASKS:
                    for student in students or ("answers",):
                        key = f"{task}/{situation}/{student}/{seed}"
                        if key in found:
                            continue
                        tables = TASKS[task][0](data.resolve(), Path(own))
                        rows = tables["rows"] | SITUATIONS[situation]
                        found[key] = run(tables | {"rows": rows}, student, seed)
                        file.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
                        Console().print(key, said(found, task, situation, student))
    show(found)


def said(found: dict[str, Any], task: str, situation: str, student: str) -> list[str]:
    """Returns the cells of a line: means and deviations over the seeds, and what is closed."""
    metric = TASKS[task][1]
    runs = [each for key, each in found.items() if key.startswith(f"{task}/{situation}/{student}/")]
    values = {who: [100 * each[f"test {who}"][metric] for each in runs] for who in WHO}
    cells = [
        f"{statistics.mean(each):.2f} ± {statistics.stdev(each) if len(each) > 1 else 0:.2f}"
        for each in values.values()
    ]
    alone, own, together = (statistics.mean(each) for each in values.values())
    gained = [b - a for a, b in zip(values["alone"], values["student"], strict=True)]
    better = f"{sum(each > 0 for each in gained)} of {len(gained)}"
    share = f"{(own - alone) / (together - alone):.0%}" if together > alone else "no gap"
    return [*cells, f"{own - alone:+.2f}", better, share]


def show(found: dict[str, Any]) -> None:
    """Prints a line for each task, situation and student that was run."""
    table = Table(
        "task", "metric", "situation", "student", *WHO, "gained", "seeds better", "gap closed"
    )
    for name in dict.fromkeys(key.rpartition("/")[0] for key in found):
        task, situation, student = name.split("/")
        table.add_row(
            task, TASKS[task][1], situation, student, *said(found, task, situation, student)
        )
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
