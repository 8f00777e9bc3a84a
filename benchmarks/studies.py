"""The part that benchmarks with studies share: recipes, running them, and reading the results of
their runs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from rich.console import Console

from vfl.simulation.federation import to_toml
from vfl_common.files import read_lines
from vfl_common.summary import Summary, load_summary
from vfl_lab.studies.plan import StudyFile, load_study
from vfl_lab.studies.report import FineTuned
from vfl_lab.studies.run import Make, run_study

Tables = dict[str, Any]
RESULTS = Path(__file__).parent / "results"
ACTIVE = "active"
EVALUATE: Tables = {"kind": "evaluate"}


def roster(parties: int) -> list[Tables]:
    """Makes one active and some passive parties."""
    passives = [{"name": f"passive{number}", "role": "passive"} for number in range(1, parties)]
    return [{"name": ACTIVE, "role": "active"}, *passives]


# Shares of the rows.
VALIDATION, TEST = 0.1, 0.2


def recipe(
    name: str,
    parties: int,
    task: Tables,
    model: Tables,
    simulate: Tables,
    rows: Tables | None = None,
) -> Tables:
    """Makes a recipe; the study adds phases, seeds and labels."""
    return {
        "name": name,
        "task": task,
        "parties": roster(parties),
        "rows": {"validation": VALIDATION, "test": TEST} | (rows or {}),
        "model": model,
        "phases": [EVALUATE],
        "run": {"checkpoint_every": 5},
        "simulate": simulate,
    }


def write_uji(data: Path, own: Path, label: str) -> Path:
    """Writes UJIIndoorLoc's access points and a label: ``LONGITUDE``, ``LATITUDE`` or ``place``
    (building, floor).
    """
    whole = pq.read_table(data / "ujiindoorloc.parquet")
    heard = [name for name in whole.column_names if name.startswith("WAP")]
    # 100 means "not heard": it becomes a strength below the weakest that was heard.
    columns = {name: pc.if_else(pc.equal(whole[name], 100), -105, whole[name]) for name in heard}
    if label == "place":
        values = pc.add(
            pc.multiply(whole["BUILDINGID"].cast(pa.int32()), 10), whole["FLOOR"].cast(pa.int32())
        )
    else:
        values = whole[label]
    path = own / f"uji-{label.lower()}.parquet"
    pq.write_table(pa.table({"id": whole["id"], **columns, label: values}), path)
    return path


def sgd(lr: float, **more: Any) -> Tables:
    return {"kind": "sgd", "lr": lr, "momentum": 0.9} | more


@dataclass(frozen=True)
class Done:
    """A study that was run. ``folder``: holds its runs."""

    study: StudyFile
    folder: Path
    results: list[FineTuned]

    def of(self, method: str) -> list[FineTuned]:
        return [result for result in self.results if result.method == method]

    def summary(self, result: FineTuned) -> Summary:
        """Loads the summary of a fine-tuning run."""
        return load_summary(self.folder / result.finetune.run / "summary.json")


def files_of(name: str, out: Path) -> Path:
    """Makes the folder for the study's own files: recipe, study, data made for it."""
    path = out / f"{name}-files"
    path.mkdir(parents=True, exist_ok=True)
    return path.resolve()


def run(
    name: str, base: Tables, study: Tables, out: Path, jobs: int, make: Make | None = None
) -> Done:
    """Runs the rest of a study and reports each run as it ends. ``study``: all but its name and
    recipe, ``base``; ``make``: as in ``run_study``.
    """
    files, console = files_of(name, out), Console()
    (files / "recipe.toml").write_text(to_toml(base))
    path = files / "study.toml"
    path.write_text(to_toml({"name": name, "recipe": "recipe.toml", **study}))

    def tell(event: Tables) -> None:
        if event["event"] in ("done", "failed"):
            left_s = event.get("left_s")
            left = f", {left_s / 60:.0f} min left" if left_s is not None else ""
            what = event.get("error") or (
                f"{event['metric']:.4f}" if event.get("metric") is not None else "pretrained"
            )
            console.print(
                f"{event['number']}/{event['of']} {event['title']}: {what}{left}", highlight=False
            )

    results = run_study(path, out, jobs=jobs, tell=tell, make=make)
    return Done(load_study(path)[0], out / name, results)


def keep(done: Done, names: Sequence[str] = ("results.csv", "results.png")) -> None:
    """Copies the study's results to the repository's: ``<study>.csv``, ``<study>.png``,
    ``<study>-<other>.csv``.
    """
    RESULTS.mkdir(exist_ok=True)
    for name in names:
        to = (
            name.replace("results", done.study.name)
            if name.startswith("results")
            else f"{done.study.name}-{name}"
        )
        shutil.copy(done.folder / name, RESULTS / to)


def message_bytes(summary: Summary, phase: str, kind: str) -> int:
    links = summary.bytes.by_link
    return sum(link.message_bytes for link in links if (link.phase, link.kind) == (phase, kind))


def curve(
    folder: Path, phase: str, metric: str, split: str = "validation", active: str = ACTIVE
) -> list[tuple[int, float]]:
    """Returns (steps of the phase so far, ``metric`` of the split's rows) for each round of
    ``folder``'s run. ``active``: the name of the active party.
    """
    lines = [json.loads(line) for line in read_lines(folder / active / "metrics.jsonl")]
    before = max((line["steps"] for line in lines[: _first(lines, phase)]), default=0)
    own = [line for line in lines if line["phase"] == phase]
    return [(line["steps"] - before, line["metrics"][split][metric]) for line in own]


def _first(lines: Sequence[Tables], phase: str) -> int:
    return next((at for at, line in enumerate(lines) if line["phase"] == phase), len(lines))


def step_bytes(
    folder: Path, summary: Summary, phase: str, metric: str, active: str = ACTIVE
) -> float:
    """Returns message bytes of a step of split training, all parties: an embedding is as large as
    its gradient.
    """
    steps, _ = curve(folder, phase, metric, active=active)[-1]
    return 2 * message_bytes(summary, phase, "gradient") / steps
