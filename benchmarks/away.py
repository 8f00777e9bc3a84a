"""What the others lose while a party is away: ``python -m benchmarks.away [--data FOLDER] [--json
FILE]``.

Three parties train on digits (scikit-learn), and with ``--data`` on the credit data too. Under each
late policy one passive party is killed after some seconds, and started again ``--away`` seconds
later. The table has the active party's steps a second before, while it was away, and after, and the
final test metric beside that of an undisturbed run.
"""

from __future__ import annotations

import json
import queue
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from vfl.launcher.processes import Process, end_all
from vfl.simulation.federation import Federation
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.files import read_lines
from vfl_common.summary import Summary, load_summary

NAMES, KILLED = ("p0", "p1", "p2"), "p2"
# Of a step.
DEADLINE_S = 1.0
POLICIES = ("cached", "skip", "zeros")
_START_S, _RUN_S = 120.0, 1200.0
# Around a kill and a return, which belong to neither rate.
_EDGE_S = 2.0


@dataclass(frozen=True)
class Case:
    """A data set: each party's [data], the task, the length of training, and the metric to
    compare.
    """

    name: str
    data: dict[str, dict[str, Any]]
    task: dict[str, Any]
    epochs: int
    batch: int
    metric: str


@dataclass(frozen=True)
class Turn:
    """One run: the test metric, the active party's steps a second, and the steps computed without
    the party.
    """

    case: str
    policy: str
    seed: int
    metric: float
    before: float = 0.0
    away: float = 0.0
    after: float = 0.0
    missed: int = 0
    interruptions: int = 0


def digits(_folder: Path | None) -> Case:
    """Divides scikit-learn's digits by columns."""
    view = {"scheme": "columns", "parts": 3}
    data: dict[str, dict[str, Any]] = {
        name: {"source": "sklearn:digits", "view": {**view, "part": part}}
        for part, name in enumerate(NAMES)
    }
    data["p0"]["label"] = "target"
    return Case("digits", data, {"kind": "multiclass", "classes": 10}, 900, 32, "accuracy")


def credit(folder: Path | None) -> Case:
    """Takes FATE's default of credit cards: the guest has the labels, and the host's columns are
    divided in two.
    """
    assert folder is not None
    guest, host = (
        str((folder / f"default_credit_hetero_{who}.csv.gz").resolve()) for who in ("guest", "host")
    )
    data: dict[str, dict[str, Any]] = {"p0": {"source": guest, "id": "id", "label": "y"}}
    for part, name in enumerate(NAMES[1:]):
        data[name] = {
            "source": host,
            "id": "id",
            "view": {"scheme": "columns", "part": part, "parts": 2},
        }
    return Case("credit", data, {"kind": "binary"}, 250, 256, "auc")


CASES: dict[str, Callable[[Path | None], Case]] = {"digits": digits, "credit": credit}


def recipe(case: Case, policy: str, seed: int, scale: float) -> dict[str, Any]:
    """Returns the recipe's tables; ``policy``: "wait" for an undisturbed run. ``scale``: of the
    number of epochs.
    """
    late = {} if policy == "wait" else {"late_policy": policy, "deadline_s": DEADLINE_S}
    training = {
        "kind": "splitnn",
        "epochs": max(1, round(case.epochs * scale)),
        "batch_size": case.batch,
        "optimizer": {"kind": "adam", "lr": 3e-4, "weight_decay": 1e-3},
        **late,
    }
    return {
        "name": case.name,
        "seed": seed,
        "task": case.task,
        "parties": [
            {"name": name, "role": "passive" if number else "active"}
            for number, name in enumerate(NAMES)
        ],
        "model": {
            "embedding_size": 16,
            "encoder": {"kind": "mlp", "hidden": [32]},
            "top": {"hidden": [16]},
        },
        "phases": [training, {"kind": "evaluate", "splits": ["test"]}],
        "run": {"heartbeat_s": 1.0, "rejoin_deadline_s": 120.0},
        "simulate": {"parties": case.data},
    }


class Run:
    """The processes of one run, in a folder of its own."""

    def __init__(self, tables: dict[str, Any], case: Case, folder: Path) -> None:
        data = {name: parse(DataSettings, each, name) for name, each in case.data.items()}
        self.out, self._logs = folder / "runs", folder / "logs"
        self._files = Federation(
            parse(Recipe, tables, "recipe"), self.out, folder / "federation", data, folder
        )
        self._files.write(tables)
        self.processes: dict[str, Process] = {}
        self._address = ""

    def start(self) -> None:
        """Starts the server, then all parties."""
        events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        args = ["vfl-server", "run", str(self._files.recipe_path), "--listen", "127.0.0.1:0"]
        args += [
            "--ca",
            str(self._files.folder / "certs" / "ca.pem"),
            "--out",
            str(self.out),
            "--run-id",
            "run",
        ]
        self.processes["server"] = Process(
            "server", args, self._logs / "server", threads=1, events=events
        )
        while (event := events.get(timeout=_START_S))["event"] != "ready":
            pass
        self._address = event["address"]
        for name in NAMES:
            self.start_party(name)

    def start_party(self, name: str) -> None:
        """Starts a party; it resumes if it was killed."""
        self._files.write_party(name, self._address)
        args = ["vfl-party", "run", str(self._files.party_path(name))]
        self.processes[name] = Process(name, args, self._logs / name, threads=1)

    def seconds(self) -> float:
        """Returns how long the active party has been training."""
        lines = self.lines()
        return float(lines[-1]["seconds"]) if lines else 0.0

    def lines(self) -> list[dict[str, Any]]:
        """Returns the active party's finished rounds of training."""
        text = read_lines(self.out / "run" / "p0" / "metrics.jsonl")
        return [line for line in map(json.loads, text) if line["phase"] == "splitnn"]

    def wait(self, until: Callable[[], bool]) -> None:
        """Waits until ``until`` holds. Raises RuntimeError if a process fails, or if it takes too
        long.
        """
        give_up_s = time.monotonic() + _RUN_S
        while not until():
            failed = [
                each
                for each in self.processes.values()
                if each.status not in (None, 0, -signal.SIGKILL)
            ]
            if failed or time.monotonic() >= give_up_s:
                raise RuntimeError(
                    f"{failed[0].name}: {failed[0].sentence()}"
                    if failed
                    else "the run does not end"
                )
            time.sleep(0.1)

    def finish(self) -> Summary:
        """Waits for all to end."""
        self.wait(lambda: all(each.status is not None for each in self.processes.values()))
        return load_summary(self.out / "run" / "summary.json")


def turn(
    case: Case, policy: str, seed: int, before_s: float, away_s: float, scale: float, folder: Path
) -> Turn:
    """Runs once; with a ``policy`` other than "wait" the party is killed and started again."""
    run = Run(recipe(case, policy, seed, scale), case, folder)
    try:
        run.start()
        killed_s = back_s = 0.0
        if policy != "wait":
            run.wait(lambda: run.seconds() >= before_s)
            killed_s = run.seconds()
            victim = run.processes[KILLED]
            victim.signal(signal.SIGKILL)
            victim.wait()
            run.wait(lambda: run.seconds() >= killed_s + away_s or run.processes["p0"].status == 0)
            back_s = run.seconds()
            run.start_party(KILLED)
        summary = run.finish()
        lines = run.lines()
    finally:
        end_all(list(run.processes.values()))
    metric = summary.metrics["test"][case.metric]
    if policy == "wait":
        return Turn(case.name, policy, seed, metric, before=rate(lines, _EDGE_S, float("inf")))
    missed = [each for each in summary.absences if each.party == KILLED]
    return Turn(
        case.name,
        policy,
        seed,
        metric,
        before=rate(lines, _EDGE_S, killed_s),
        away=rate(lines, killed_s + DEADLINE_S + _EDGE_S, back_s),
        after=rate(lines, back_s + 4 * _EDGE_S, float("inf")),
        missed=sum(each.steps for each in missed),
        interruptions=summary.interruptions,
    )


def rate(lines: Sequence[dict[str, Any]], begin_s: float, end_s: float) -> float:
    """Returns the steps a second between two times of the run; NaN if fewer than two rounds ended
    there.
    """
    within = [line for line in lines if begin_s <= line["seconds"] <= end_s]
    if len(within) < 2:
        return float("nan")
    return float(
        (within[-1]["steps"] - within[0]["steps"]) / (within[-1]["seconds"] - within[0]["seconds"])
    )


def table(turns: Sequence[Turn]) -> Table:
    """Returns medians over the seeds."""
    found = Table(
        "data",
        "policy",
        "steps/s before",
        "away",
        "after",
        "away / before",
        "steps missed",
        "test",
        "- wait",
    )
    for case in dict.fromkeys(each.case for each in turns):
        waited = {
            each.seed: each.metric for each in turns if each.case == case and each.policy == "wait"
        }
        for policy in dict.fromkeys(each.policy for each in turns if each.case == case):
            of = [each for each in turns if (each.case, each.policy) == (case, policy)]
            metric = statistics.mean(each.metric for each in of)
            row = [case, policy, f"{statistics.median(each.before for each in of):.0f}"]
            if policy == "wait":
                row += ["", "", "", "", f"{100 * metric:.2f}", ""]
            else:
                row += [f"{statistics.median(each.away for each in of):.0f}"]
                row += [f"{statistics.median(each.after for each in of):.0f}"]
                row += [f"{statistics.median(each.away / each.before for each in of):.2f}"]
                row += [
                    f"{statistics.median(each.missed for each in of):.0f}",
                    f"{100 * metric:.2f}",
                ]
                row += [
                    f"{100 * statistics.mean(each.metric - waited[each.seed] for each in of):+.2f}"
                ]
            found.add_row(*row)
    return found


@click.command(help=__doc__)
@click.option(
    "--data",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Folder of data sets.",
)
@click.option("--seeds", default="1", show_default=True, help="Like 1,2,3.")
@click.option(
    "--policies", default="cached,skip", show_default=True, help="Of cached, skip, zeros."
)
@click.option(
    "--before",
    "before_s",
    default=10.0,
    show_default=True,
    help="Seconds of training before the kill.",
)
@click.option(
    "--away",
    "away_s",
    default=30.0,
    show_default=True,
    help="Seconds until the party is started again.",
)
@click.option("--scale", default=1.0, show_default=True, help="Multiplies the number of epochs.")
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write every turn here.",
)
def main(
    data: Path | None,
    seeds: str,
    policies: str,
    before_s: float,
    away_s: float,
    scale: float,
    json_path: Path | None,
) -> None:
    """Run every data set, policy and seed, and print one table."""
    chosen = policies.split(",")
    if unknown := [each for each in chosen if each not in POLICIES]:
        raise click.BadParameter(f"{unknown[0]} is none of {', '.join(POLICIES)}")
    turns: list[Turn] = []
    console = Console(stderr=True)
    for name in CASES if data is not None else ("digits",):
        case = CASES[name](data)
        for seed in map(int, seeds.split(",")):
            for policy in ("wait", *chosen):
                with tempfile.TemporaryDirectory(prefix="vfl-away-") as folder:
                    turns.append(turn(case, policy, seed, before_s, away_s, scale, Path(folder)))
                console.print(turns[-1])
    Console(width=None if Console().is_terminal else 120).print(table(turns))
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(each) for each in turns], indent=1) + "\n")


if __name__ == "__main__":
    main()
