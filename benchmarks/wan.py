"""Split training over slow links: ``python -m benchmarks.wan --data DIR [--json FILE]``.

Two links, 100 Mbit/s with a round trip of 20 ms and 10 Mbit/s with one of 50 ms, emulated by ``benchmarks.link``: all
passive parties reach the active party through it. Three tasks: default of credit cards (AUC), UJIIndoorLoc's 13 classes
and MNIST-10k in quadrants (accuracy); batches of 256, embeddings of 64. Each is trained plainly, and with settings of
wire and pipe that are the same for all tasks. What is asked: seconds and message bytes until the held-out rows reach a
fixed value, the plain run's final one minus 0.2 points.

A run is a function of its recipe, so the curves (value by epoch) come from runs in one process, for all seeds. Seconds
come from real runs over the link: server and parties are processes, with mutual TLS, and seed 1 is run until it reaches
the value, or for at most ``--most`` seconds; the other seeds' seconds are their steps times the seconds of a step. In
real runs there are no held-out rows, so that neither time nor bytes contain validation. The settings were chosen with
``--choose`` on the held-out rows of seed 11, which is none of the seeds that are reported.
"""

from __future__ import annotations

import json
import math
import os
import queue
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from benchmarks import studies
from benchmarks.studies import ACTIVE, Tables
from vfl.forecasting.network import Network, Work
from vfl.launcher.forks import Launcher, launching
from vfl.launcher.processes import Process, end_all
from vfl.simulation.federation import Federation
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.base import parse
from vfl_common.config.division import divide
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InputError
from vfl_common.files import read_lines
from vfl_common.summary import Summary, load_summary
from vfl_party.forecast.count import forecast, outlook_of

PHASE = "splitnn"
HELD_OUT = 0.2
LOSS = 0.002  # of the final value: 0.2 points
BATCH, WIDTH = 256, 64
CHOOSING_SEED = 11
_START_S, _RUN_S = 120.0, 1500.0


@dataclass(frozen=True)
class Line:
    """A link between the active party and all others. ``latency``: one way."""

    rate: str
    latency: str

    @property
    def name(self) -> str:
        return f"{self.rate}, {self.latency} one way"

    @property
    def network(self) -> Network:
        return Network.read(self.rate, self.latency)


LINES = {"100": Line("100Mbit/s", "10ms"), "10": Line("10Mbit/s", "25ms")}


@dataclass(frozen=True)
class Setting:
    """Settings of wire and pipe; ``more``: further settings of the phase. The default is the plain run.

    ``bits``: of a value on its way up; ``down``: of gradients, if they have others.
    """

    bits: int = 32
    in_flight: int = 1
    more: tuple[tuple[str, Any], ...] = ()
    down: int = 0

    @property
    def name(self) -> str:
        parts = [
            f"{self.bits}{f' and {self.down}' if self.down else ''} bits",
            f"D = {self.in_flight}",
            *(f"{key} = {value}" for key, value in self.more),
        ]
        return "plain" if self == PLAIN else ", ".join(parts)

    @property
    def phase(self) -> Tables:
        return ({"in_flight": self.in_flight} if self.in_flight > 1 else {}) | dict(self.more)

    @property
    def wire(self) -> list[Tables]:
        if self.down:
            return [_codec(self.bits) | {"direction": "up"}, _codec(self.down) | {"direction": "down"}]
        return [] if self.bits == 32 else [_codec(self.bits)]


def _codec(bits: int) -> Tables:
    return {32: {"codec": "identity"}, 16: {"codec": "float16"}}.get(bits) or {"codec": "bits", "bits": bits}


PLAIN = Setting()
CANDIDATES = [Setting(bits, in_flight) for bits in (8, 4) for in_flight in (4, 6, 8)]
CHOSEN = Setting(4, 4)  # on seed 11 the most in flight that lose at most 0.2 points on each task


@dataclass(frozen=True)
class Task:
    """A recipe without phases and seed, made from the folder of data and one for own files; and how long it trains."""

    recipe: Callable[[Path, Path], Tables]
    metric: str
    epochs: int
    lr: float


def _recipe(name: str, parties: int, task: Tables, simulate: Tables) -> Tables:
    model = {"embedding_size": WIDTH, "encoder": {"kind": "mlp", "hidden": [256]}, "top": {"hidden": [64]}}
    return studies.recipe(f"wan-{name}", parties, task, model, simulate)


def credit(data: Path, _own: Path) -> Tables:
    sources = {
        ACTIVE: {"source": str(data / "default_credit_hetero_guest.csv.gz"), "id": "id", "label": "y"},
        "passive1": {"source": str(data / "default_credit_hetero_host.csv.gz"), "id": "id"},
    }
    return _recipe("credit", 2, {"kind": "binary"}, {"parties": sources})


def uji(data: Path, own: Path) -> Tables:
    source = {"id": "id", "label": "place", "scale": "minmax", "source": str(studies.write_uji(data, own, "place"))}
    return _recipe("uji", 2, {"kind": "multiclass", "classes": 13}, {"scheme": "columns", "data": source})


def mnist(data: Path, _own: Path) -> Tables:
    source = {"source": str(data / "mnist10k.npz"), "label": "labels"}
    return _recipe("mnist", 4, {"kind": "multiclass", "classes": 10}, {"scheme": "quadrants", "data": source})


# Chosen on seed 11: credit and UJI by the plain run alone; MNIST also by what packed runs then lost (see the README).
TASKS = {
    "credit": Task(credit, "auc", 12, 2e-3),
    "uji": Task(uji, "accuracy", 12, 1e-3),
    "mnist": Task(mnist, "accuracy", 30, 1e-3),
}


@dataclass(frozen=True)
class Curve:
    """The value of the held-out rows after each epoch. ``epoch_steps``: exchanges of an epoch."""

    task: str
    setting: str
    seed: int
    epoch_steps: int
    values: tuple[float, ...]

    @property
    def final(self) -> float:
        return self.values[-1]

    def epochs_to(self, value: float) -> int | None:
        """Returns after how many epochs the value is reached; None if never."""
        return next((epoch for epoch, found in enumerate(self.values, 1) if found >= value), None)


@dataclass(frozen=True)
class Timed:
    """One real run over a link. ``share``: payload bytes of the fuller direction, as a share of what the link carries.

    ``step_s``: mean of the epochs after the first; ``seconds``: of the whole training, connecting included;
    ``forecast_s``: what ``vfl forecast`` says of the same steps, with the computation that was measured.
    """

    task: str
    line: str
    setting: str
    epochs: int
    steps: int
    seconds: float
    step_s: float
    step_bytes: float
    share: float
    forecast_s: float
    waits: float  # share of the active party's time


def tables_of(task: Task, setting: Setting, base: Tables, seed: int, epochs: int, *, held_out: bool) -> Tables:
    """Returns a whole recipe; held-out rows are validated after each epoch, or are test rows that nobody asks for."""
    rows = {"validation": HELD_OUT, "test": 0.0} if held_out else {"validation": 0.0, "test": HELD_OUT}
    optimizer = {"kind": "adam", "lr": task.lr, "schedule": "cosine"}
    phase = {"kind": PHASE, "epochs": epochs, "batch_size": BATCH, "optimizer": optimizer} | setting.phase
    run = {"run": {"checkpoint_every": 1000, "step_timeout_s": 600.0}}
    wire = {"wire": setting.wire} if setting.wire else {}
    return base | {"seed": seed, "rows": rows, "phases": [phase]} | run | wire


class Tasks:
    """The recipes of the tasks, on data in ``data``; ``own``: a folder for files that are made."""

    def __init__(self, data: Path, own: Path, epochs: int | None) -> None:
        self._data, self._own, self._epochs = data.resolve(), own, epochs
        self._bases: dict[str, Tables] = {}

    def epochs(self, name: str) -> int:
        return self._epochs or TASKS[name].epochs

    def tables(self, name: str, setting: Setting, seed: int, epochs: int, *, held_out: bool) -> Tables:
        if name not in self._bases:
            self._bases[name] = TASKS[name].recipe(self._data, self._own)
        return tables_of(TASKS[name], setting, self._bases[name], seed, epochs, held_out=held_out)

    def recipe(self, name: str, setting: Setting, seed: int, epochs: int, *, held_out: bool) -> Recipe:
        return parse(Recipe, self.tables(name, setting, seed, epochs, held_out=held_out), "recipe")

    def curve(self, name: str, setting: Setting, seed: int) -> Curve:
        """Trains in this process and returns what its epochs reach."""
        recipe = self.recipe(name, setting, seed, self.epochs(name), held_out=True)
        with tempfile.TemporaryDirectory(prefix="vfl-wan-") as place:
            folder = Path(place) / "run"
            run_in_process(recipe, divide(recipe, self._own), folder)
            found = studies.curve(folder, PHASE, TASKS[name].metric)
        return Curve(name, setting.name, seed, found[0][0], tuple(value for _, value in found))

    def forecast_s(self, name: str, setting: Setting, line: Line, epochs: int, work: Work) -> float:
        """Returns what a forecast says of the training of a real run."""
        recipe = self.recipe(name, setting, 1, epochs, held_out=False)
        network = Network(line.network.bandwidth, line.network.latency_s, any_work=work)
        found = forecast(outlook_of(recipe, self._own))
        return sum(network.seconds(phase.name, phase.runs) for phase in found.phases)


# -- real runs ------------------------------------------------------------------------------------------------------


@contextmanager
def slow_link(line: Line, target: str) -> Iterator[str]:
    """Runs the emulated link as a process of its own; yields its address."""
    command = [sys.executable, "-m", "benchmarks.link", "--target", target]
    command += ["--rate", line.rate, "--latency", line.latency]
    root = Path(__file__).resolve().parents[1]
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield json.loads(process.stdout.readline())["address"]
    finally:
        process.stdin.close()  # it ends by itself then
        process.stdout.read()
        process.wait(timeout=10)
        process.stdout.close()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


class Run:
    """The processes of one run, of which the passive parties reach the active one through a link."""

    def __init__(self, tables: Tables, folder: Path, launcher: Launcher) -> None:
        self.out, self._logs, self._launcher = folder / "runs", folder / "logs", launcher
        recipe = parse(Recipe, tables, "recipe")
        self._names = [party.name for party in recipe.parties]
        self._files = Federation(recipe, self.out, folder / "federation", divide(recipe, folder), folder)
        self._files.write(tables)

    def through(self, line: Line) -> Summary:
        """Runs to the end. Raises RuntimeError if a process fails, or if it takes too long."""
        target, processes = f"127.0.0.1:{free_port()}", dict[str, Process]()
        with slow_link(line, target) as address:
            try:
                events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
                args = ["vfl-server", "serve", str(self._files.recipe_path), "--listen", "127.0.0.1:0", "--fresh"]
                args += ["--ca", str(self._files.folder / "certs" / "ca.pem"), "--out", str(self.out)]
                processes["server"] = self._process("server", [*args, "--run-id", "run"], events)
                while (event := events.get(timeout=_START_S))["event"] != "ready":
                    pass
                for name in self._names:
                    self._write_party(name, event["address"], target, address)
                    path = self._files.party_path(name)
                    processes[name] = self._process(name, ["vfl-party", "run", str(path), "--fresh"])
                self._wait(list(processes.values()))
            finally:
                end_all(list(processes.values()))
        return load_summary(self.out / "run" / "summary.json")

    def rounds(self) -> list[tuple[int, float]]:
        """Returns (steps so far, seconds since the generation began) at the end of each epoch."""
        lines = map(json.loads, read_lines(self.out / "run" / ACTIVE / "metrics.jsonl"))
        return [(line["steps"], line["seconds"]) for line in lines if line["phase"] == PHASE]

    def _write_party(self, name: str, server: str, target: str, address: str) -> None:
        """Writes a party file; the active party listens at ``target`` and names ``address`` to the others."""
        self._files.write_party(name, server)
        if name == ACTIVE:
            path = self._files.party_path(name)
            path.write_text(f'listen = "{target}"\nadvertise = "{address}"\n{path.read_text()}')

    def _process(self, name: str, args: list[str], events: queue.SimpleQueue[dict[str, Any]] | None = None) -> Process:
        return Process(name, args, self._logs / name, threads=1, events=events, launcher=self._launcher)

    @staticmethod
    def _wait(processes: Sequence[Process]) -> None:
        give_up_s = time.monotonic() + _RUN_S
        while any(each.status is None for each in processes):
            failed = [each for each in processes if each.status not in (None, 0)]
            if failed or time.monotonic() >= give_up_s:
                raise RuntimeError(f"{failed[0].name}: {failed[0].sentence()}" if failed else "the run does not end")
            time.sleep(0.05)


def time_run(tasks: Tasks, name: str, setting: Setting, line: Line, epochs: int, launcher: Launcher) -> Timed:
    """Runs seed 1 over the link for so many epochs, and reads what it took."""
    epochs = max(2, epochs)
    tables = tasks.tables(name, setting, 1, epochs, held_out=False)
    with tempfile.TemporaryDirectory(prefix="vfl-wan-") as folder:
        run = Run(tables, Path(folder), launcher)
        summary = run.through(line)
        rounds = run.rounds()
    (first_steps, first_s), (steps, seconds) = rounds[0], rounds[-1]
    step_s = (seconds - first_s) / (steps - first_steps)
    links = [link for link in summary.bytes.by_link if link.phase == PHASE]
    fuller = max(sum(link.payload_bytes for link in links if (link.sender == ACTIVE) is down) for down in (True, False))
    network = line.network
    times = {party.name: next(each for each in party.times if each.phase == PHASE) for party in summary.parties[1:]}
    busy = {party: (of.encode_s + of.decode_s + of.compute_s) / of.steps for party, of in times.items()}
    others = max(each for party, each in busy.items() if party != ACTIVE)
    own = times[ACTIVE]
    return Timed(
        name,
        line.name,
        setting.name,
        epochs,
        steps,
        seconds,
        step_s,
        sum(link.message_bytes for link in links) / steps,
        fuller / steps * 8 / network.bandwidth / step_s,
        tasks.forecast_s(name, setting, line, epochs, Work(busy[ACTIVE] + others, max(busy.values()))),
        own.wait_s / (own.encode_s + own.decode_s + own.compute_s + own.wait_s),
    )


# -- what comes of it -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table: a setting on a task and a link; means over the seeds that reach the value."""

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
    found = Table(title="To the plain run's final value - 0.2 points; bytes are message bytes", title_justify="left")
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
        plain = next(row for row in rows if (row.task, row.line, row.setting) == (each.task, each.line, PLAIN.name))
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


def choose(tasks: Tasks, names: Sequence[str], console: Console) -> list[dict[str, Any]]:
    """Tries all candidates on the held-out rows of seed 11, with the seconds of a forecast on the slower link."""
    line, found = LINES["10"], list[dict[str, Any]]()
    work = Work(0.004, 0.002)
    plain = {name: tasks.curve(name, PLAIN, CHOOSING_SEED) for name in names}
    console.print({name: [round(value, 4) for value in each.values] for name, each in plain.items()})
    for setting in [PLAIN, *CANDIDATES]:
        for name in names:
            try:
                own = tasks.curve(name, setting, CHOOSING_SEED) if setting != PLAIN else plain[name]
            except InputError as error:
                console.print(f"{name}, {setting.name}: {error}")
                continue
            epochs = own.epochs_to(plain[name].final - LOSS)
            seconds = tasks.forecast_s(name, setting, line, epochs, work) if epochs else math.nan
            loss = 100 * (plain[name].final - own.final)
            found.append({"task": name, "setting": setting.name, "epochs": epochs, "forecast_s": seconds, "loss": loss})
            console.print(f"{name:7} {setting.name:18} epochs {epochs}, {seconds:.1f} s, loss {loss:+.2f}")
    return found


def measure(
    tasks: Tasks,
    names: Sequence[str],
    lines: Sequence[Line],
    settings: Sequence[Setting],
    seeds: Sequence[int],
    most_s: float,
    console: Console,
) -> tuple[list[Row], list[Timed], list[Curve]]:
    """Runs the benchmark."""
    curves: dict[tuple[str, Setting], dict[int, Curve]] = {}
    for name in names:
        for setting in settings:
            curves[name, setting] = {seed: tasks.curve(name, setting, seed) for seed in seeds}
            console.print(
                f"{name}, {setting.name}: {[round(each.final, 4) for each in curves[name, setting].values()]}"
            )
    timed: list[Timed] = []
    rows: list[Row] = []
    with launching(1) as launcher:
        for line in lines:
            for name in names:
                plain = curves[name, PLAIN]
                for setting in settings:
                    own = curves[name, setting]
                    epochs = own[seeds[0]].epochs_to(plain[seeds[0]].final - LOSS) or tasks.epochs(name)
                    epoch_s = tasks.forecast_s(name, setting, line, 1, Work(0.004, 0.002))
                    epochs = min(epochs, max(2, int(most_s / epoch_s)))
                    timed.append(time_run(tasks, name, setting, line, epochs, launcher))
                    console.print(timed[-1])
                    rows.append(row_of(timed[-1], plain, own))
    return rows, timed, [each for of in curves.values() for each in of.values()]


def read_setting(text: str) -> Setting:
    """Reads ``4x8`` (bits x steps in flight), with more settings of the phase behind it: ``4x8,local_updates=3``.

    ``4/2x8``: 4 bits up, 2 bits down.
    """
    first, *more = text.split(",")
    bits, _, in_flight = first.partition("x")
    pairs = tuple((key, json.loads(value)) for key, _, value in (each.partition("=") for each in more))
    up, _, down = bits.partition("/")
    return Setting(int(up), int(in_flight), pairs, int(down or 0))


@click.command(help=__doc__)
@click.option("--data", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tasks", "names", default=",".join(TASKS), show_default=True, help="With commas between.")
@click.option("--links", "lines", default=",".join(LINES), show_default=True, help="Of 100 and 10 (Mbit/s).")
@click.option("--seeds", default="1,2,3,4,5", show_default=True, help="Of the curves; the first is run for real.")
@click.option(
    "--setting", "texts", multiple=True, help="BITSxD, like 4x8 or 4/2x8; may be repeated.  [default: the chosen one]"
)
@click.option("--most", "most_s", default=60.0, show_default=True, help="Seconds of a real run, as forecast.")
@click.option("--choose", "choosing", is_flag=True, help="Only the curves of all candidates on seed 11.")
@click.option("--quick", is_flag=True, help="One task, link and seed, two epochs: does it still run?")
@click.option(
    "--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Also write everything here."
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
    links = [LINES[each] for each in (["100"] if quick else lines.split(","))]
    settings = [PLAIN, *(map(read_setting, texts) if texts else [CHOSEN])]
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory(prefix="vfl-wan-data-") as own:
        tasks = Tasks(data, Path(own), 2 if quick else None)
        if choosing:
            found: Any = choose(tasks, wanted, console)
        else:
            numbers = [int(seed) for seed in seeds.split(",")][: 1 if quick else None]
            rows, timed, curves = measure(tasks, wanted, links, settings, numbers, most_s, console)
            Console(width=None if Console().is_terminal else 170).print(table(rows))
            click.echo(
                "Steps: curves of runs in one process, all seeds. Seconds: of a real run over the emulated link, seed "
                f"{numbers[0]}; for other seeds their steps times its seconds a step. No validation in either."
            )
            found = {
                key: [asdict(each) for each in of] for key, of in (("rows", rows), ("runs", timed), ("curves", curves))
            }
    if json_path is not None:
        json_path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
