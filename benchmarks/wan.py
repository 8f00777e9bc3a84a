"""Split training over slow links: ``python -m benchmarks.wan --data DIR [--json FILE]``.

Two links, 100 Mbit/s with a round trip of 20 ms and 10 Mbit/s with one of 50 ms, emulated by
``benchmarks.link``: all passive parties reach the active party through it. Three tasks: default of
credit cards (AUC), UJIIndoorLoc's 13 classes and MNIST-10k in quadrants (accuracy); batches of 256,
embeddings of 64. Each is trained plainly, and with settings of wire and pipe that are the same for
all tasks. What is asked: seconds and message bytes until the held-out rows reach a fixed value, the
plain run's final one minus 0.2 points.

A run is a function of its recipe, so the curves (value by epoch) come from runs in one process, for
all seeds. Seconds come from real runs over the link: server and parties are processes, with mutual
TLS, and seed 1 is run until it reaches the value, or for at most ``--most`` seconds; the other
seeds' seconds are their steps times the seconds of a step. In real runs there are no held-out rows,
so that neither time nor bytes contain validation. The settings were chosen with ``--choose`` on the
held-out rows of seeds 11 to 13, which are none of the seeds that are reported.
"""

from __future__ import annotations

import json
import math
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
from rich.console import Console
from rich.table import Table

from benchmarks.wan_runs import Timed, time_run
from benchmarks.wan_tasks import (
    CANDIDATES,
    CHOOSING_SEEDS,
    CHOSEN,
    LINES,
    LOSS,
    PLAIN,
    TASKS,
    Curve,
    Line,
    Setting,
    Tasks,
    read_setting,
)
from vfl.forecasting.network import BatchWork
from vfl.launcher.forks import Launcher, run_launcher


@dataclass(frozen=True)
class Row:
    """One line of the table: a setting on a task and a link; means over the seeds that reach the
    value.
    """

    task: str
    line: str
    setting: str
    seeds: int
    reached: int
    final: float
    loss_points: float
    steps: float
    seconds: float
    bytes: float
    share: float
    forecast_error: float


def row_of(timed: Timed, plain: Mapping[int, Curve], own: Mapping[int, Curve]) -> Row:
    """Joins the curves of all seeds and the seconds of a real run."""
    to = {seed: own[seed].epochs_to(plain[seed].final - LOSS) for seed in own}
    steps = [epochs * own[seed].epoch_steps for seed, epochs in to.items() if epochs is not None]
    mean = statistics.mean(steps) if steps else math.nan
    # The real run's first epoch connects, too; so its own seconds are used for its own steps.
    start_s = timed.seconds - timed.steps * timed.step_s
    return Row(
        timed.task,
        timed.line,
        timed.setting,
        len(own),
        len(steps),
        statistics.mean(each.final for each in own.values()),
        100 * statistics.mean(plain[seed].final - own[seed].final for seed in own),
        mean,
        mean * timed.step_s + start_s,
        mean * timed.step_bytes,
        timed.share,
        timed.forecast_s / timed.seconds - 1,
    )


def table(rows: Sequence[Row]) -> Table:
    """Returns the table; factors are those of the plain run of the same task and link."""
    found = Table(
        title="To the plain run's final value - 0.2 points; bytes are message bytes",
        title_justify="left",
    )
    found.add_column("link", no_wrap=True)
    found.add_column("task")
    found.add_column("setting")
    for heading in (
        "reach it",
        "final",
        "loss",
        "steps",
        "seconds",
        "sooner",
        "MB",
        "fewer",
        "link's share",
        "forecast",
    ):
        found.add_column(heading, justify="right")
    for each in rows:
        plain = next(
            row
            for row in rows
            if (row.task, row.line, row.setting) == (each.task, each.line, PLAIN.name)
        )
        found.add_row(
            each.line,
            each.task,
            each.setting,
            f"{each.reached}/{each.seeds}",
            f"{100 * each.final:.2f}",
            f"{each.loss_points:+.2f}",
            f"{each.steps:.0f}",
            f"{each.seconds:.1f}",
            f"{plain.seconds / each.seconds:.1f} ×",
            f"{each.bytes / 1e6:.2f}",
            f"{plain.bytes / each.bytes:.1f} ×",
            f"{100 * each.share:.0f} %",
            f"{100 * each.forecast_error:+.0f} %",
        )
    return found


def choose(
    tasks: Tasks, names: Sequence[str], settings: Sequence[Setting], console: Console
) -> None:
    """Tries settings on the held-out rows of seeds that are not reported, with a forecast for the
    slower link.
    """
    for name in names:
        plain = {seed: tasks.curve(name, PLAIN, seed) for seed in CHOOSING_SEEDS}
        for setting in [PLAIN, *settings]:
            own = (
                {seed: tasks.curve(name, setting, seed) for seed in CHOOSING_SEEDS}
                if setting != PLAIN
                else plain
            )
            epochs = [own[seed].epochs_to(plain[seed].final - LOSS) for seed in CHOOSING_SEEDS]
            reached = [each for each in epochs if each is not None]
            mean = statistics.mean(reached) if reached else math.nan
            epoch_s = tasks.forecast_s(name, setting, LINES["10"], 4, BatchWork(0.004, 0.002)) / 4
            loss = 100 * statistics.mean(
                plain[seed].final - own[seed].final for seed in CHOOSING_SEEDS
            )
            text = (
                f"{name:7} {setting.name:30} epochs {epochs}, {mean * epoch_s:.1f} s, loss "
                f"{loss:+.2f}"
            )
            console.print(
                f"{text}, final {100 * statistics.mean(each.final for each in own.values()):.2f}"
            )


class Kept:
    """Curves and real runs that are there, written to ``path`` after each, so that none is run
    twice.
    """

    def __init__(self, path: Path | None) -> None:
        found = json.loads(path.read_text()) if path is not None and path.exists() else {}
        self._path = path
        self.curves = [
            Curve(**each | {"values": tuple(each["values"])}) for each in found.get("curves", [])
        ]
        self.runs = [Timed(**each) for each in found.get("runs", [])]
        self.rows: list[Row] = []

    def curve(self, tasks: Tasks, name: str, setting: Setting, seed: int) -> Curve:
        wanted = (name, TASKS[name].training, setting.name, seed)
        for each in self.curves:
            if (each.task, each.training, each.setting, each.seed) == wanted:
                return each
        self.curves.append(tasks.curve(name, setting, seed))
        self.write()
        return self.curves[-1]

    def run(
        self, tasks: Tasks, name: str, setting: Setting, line: Line, epochs: int, launcher: Launcher
    ) -> Timed:
        for each in self.runs:
            if (each.task, each.line, each.setting, each.epochs) == (
                name,
                line.name,
                setting.name,
                epochs,
            ):
                return each
        self.runs.append(time_run(tasks, name, setting, line, epochs, launcher))
        self.write()
        return self.runs[-1]

    def write(self) -> None:
        if self._path is not None:
            found = {"rows": self.rows, "runs": self.runs, "curves": self.curves}
            texts = {key: [asdict(each) for each in of] for key, of in found.items()}  # type: ignore[attr-defined]
            self._path.write_text(json.dumps(texts, indent=1) + "\n")


def measure(
    kept: Kept,
    tasks: Tasks,
    names: Sequence[str],
    lines: Sequence[Line],
    settings: Sequence[Setting],
    seeds: Sequence[int],
    most_s: float,
    console: Console,
) -> None:
    """Runs what is not there: first all curves, then, if there are ``lines``, the real runs; fills
    ``kept.rows``.
    """
    curves: dict[tuple[str, Setting], dict[int, Curve]] = {}
    for name in names:
        for setting in settings:
            curves[name, setting] = {seed: kept.curve(tasks, name, setting, seed) for seed in seeds}
            finals = [round(each.final, 4) for each in curves[name, setting].values()]
            console.print(f"{name}, {setting.name}: {finals}")
    with run_launcher(1) as launcher:
        for line in lines:
            for name in names:
                plain = curves[name, PLAIN]
                for setting in settings:
                    own = curves[name, setting]
                    epochs = own[seeds[0]].epochs_to(plain[seeds[0]].final - LOSS) or tasks.epochs(
                        name
                    )
                    epoch_s = tasks.forecast_s(name, setting, line, 1, BatchWork(0.004, 0.002))
                    epochs = max(2, min(epochs, int(most_s / epoch_s)))
                    timed = kept.run(tasks, name, setting, line, epochs, launcher)
                    console.print(timed)
                    kept.rows.append(row_of(timed, plain, own))
    kept.write()


@click.command(help=__doc__)
@click.option(
    "--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path)
)
@click.option(
    "--tasks", "names", default=",".join(TASKS), show_default=True, help="With commas between."
)
@click.option(
    "--links",
    "lines",
    default=",".join(LINES),
    show_default=True,
    help="Of 100 and 10 (Mbit/s); none: curves alone.",
)
@click.option(
    "--seeds",
    default="1,2,3,4,5",
    show_default=True,
    help="Of the curves; the first is run for real.",
)
@click.option(
    "--setting",
    "texts",
    multiple=True,
    help="BITSxD, like 4x8 or 4/2x8; may be repeated.  [default: the chosen one]",
)
@click.option(
    "--most", "most_s", default=60.0, show_default=True, help="Seconds of a real run, as forecast."
)
@click.option(
    "--choose", "choosing", is_flag=True, help="Only curves, of seeds 11 to 13, with losses."
)
@click.option(
    "--quick", is_flag=True, help="One task, link and seed, two epochs: does it still run?"
)
@click.option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    help="Also write everything here; what is there is not run again.",
)
def main(
    data: Path,
    names: str,
    lines: str,
    seeds: str,
    texts: tuple[str, ...],
    most_s: float,
    choosing: bool,
    quick: bool,
    json_path: Path | None,
) -> None:
    """Run the benchmark and print one table."""
    wanted = ["mnist"] if quick else names.split(",")
    links = [LINES[each] for each in (["100"] if quick else lines.split(",")) if each]
    settings = [*map(read_setting, texts)] if texts else CANDIDATES if choosing else [CHOSEN]
    console, kept = Console(stderr=True), Kept(json_path)
    with tempfile.TemporaryDirectory(prefix="vfl-wan-data-") as own:
        tasks = Tasks(data, Path(own), 2 if quick else None)
        if choosing:
            choose(tasks, wanted, settings, console)
            return
        numbers = [int(seed) for seed in seeds.split(",")][: 1 if quick else None]
        measure(kept, tasks, wanted, links, [PLAIN, *settings], numbers, most_s, console)
    Console(width=None if Console().is_terminal else 170).print(table(kept.rows))
    click.echo(
        "Steps: curves of runs in one process, all seeds. Seconds: of a real run over the "
        "emulated link, seed "
        f"{numbers[0]}; for other seeds their steps times its seconds a step. No "
        "validation in either."
    )


if __name__ == "__main__":
    main()
