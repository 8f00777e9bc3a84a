"""What ``benchmarks.wan`` trains: three tasks, settings of wire and pipe, links, and curves of runs
in one process.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import studies
from benchmarks.studies import ACTIVE, Tables
from vfl.forecasting.network import BatchWork, Network
from vfl.simulation.inprocess import run_in_process
from vfl_common.config.base import parse
from vfl_common.config.recipe import Recipe, divide
from vfl_party.forecast.count import forecast, outlook_of

PHASE = "splitnn"
HELD_OUT = 0.2
# Of the final value: 0.2 points.
LOSS = 0.002
BATCH, WIDTH = 256, 64
CHOOSING_SEEDS = (11, 12, 13)


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
    """Settings of wire and pipe; ``more``: further settings of the phase. The default is the plain
    run.

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
            return [
                _codec(self.bits) | {"direction": "up"},
                _codec(self.down) | {"direction": "down"},
            ]
        return [] if self.bits == 32 else [_codec(self.bits)]


def _codec(bits: int) -> Tables:
    """Returns a table of the wire for the steps of training; validation crosses as it is."""
    few: Tables = {"codec": "bits", "bits": bits, "scales": "bfloat16"}
    codec: Tables = {32: {"codec": "identity"}, 16: {"codec": "float16"}}.get(bits, few)
    return codec | {"exchange": "embedding"}


PLAIN = Setting()
_PREDICT = (("predict_weights", True),)
CANDIDATES = [Setting(2, in_flight, _PREDICT) for in_flight in (4, 5, 6)]
CHOSEN = CANDIDATES[1]


@dataclass(frozen=True)
class Task:
    """A recipe without phases and seed, made from the folder of data and one for own files; and how
    long it trains.
    """

    recipe: Callable[[Path, Path], Tables]
    metric: str
    epochs: int
    lr: float

    @property
    def training(self) -> str:
        return f"Adam, {self.lr:g}, cosine, {self.epochs} epochs"


def _recipe(name: str, parties: int, task: Tables, simulate: Tables) -> Tables:
    model = {
        "embedding_size": WIDTH,
        "encoder": {"kind": "mlp", "hidden": [256]},
        "top": {"hidden": [64]},
    }
    return studies.recipe(f"wan-{name}", parties, task, model, simulate)


def credit(data: Path, _own: Path) -> Tables:
    sources = {
        ACTIVE: {
            "source": str(data / "default_credit_hetero_guest.csv.gz"),
            "id": "id",
            "label": "y",
        },
        "passive1": {"source": str(data / "default_credit_hetero_host.csv.gz"), "id": "id"},
    }
    return _recipe("credit", 2, {"kind": "binary"}, {"parties": sources})


def uji(data: Path, own: Path) -> Tables:
    source = {
        "id": "id",
        "label": "place",
        "scale": "minmax",
        "source": str(studies.write_uji(data, own, "place")),
    }
    return _recipe(
        "uji", 2, {"kind": "multiclass", "classes": 13}, {"scheme": "columns", "data": source}
    )


def mnist(data: Path, _own: Path) -> Tables:
    source = {"source": str(data / "mnist10k.npz"), "label": "labels"}
    return _recipe(
        "mnist", 4, {"kind": "multiclass", "classes": 10}, {"scheme": "quadrants", "data": source}
    )


# The best learning rates of the plain run on seeds 11 to 13; "gentle": half of it, with more epochs
# (see the README).
TASKS = {
    "credit": Task(credit, "auc", 12, 2e-3),
    "uji": Task(uji, "accuracy", 12, 4e-3),
    "mnist": Task(mnist, "accuracy", 20, 4e-3),
    "mnist-gentle": Task(mnist, "accuracy", 30, 2e-3),
}


@dataclass(frozen=True)
class Curve:
    """The value of the held-out rows after each epoch. ``epoch_steps``: exchanges of an epoch."""

    task: str
    training: str
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


def tables_of(
    task: Task, setting: Setting, base: Tables, seed: int, epochs: int, *, held_out: bool
) -> Tables:
    """Returns a whole recipe; held-out rows are validated after each epoch, or are test rows that
    nobody asks for.
    """
    rows = (
        {"validation": HELD_OUT, "test": 0.0} if held_out else {"validation": 0.0, "test": HELD_OUT}
    )
    optimizer = {"kind": "adam", "lr": task.lr, "schedule": "cosine"}
    phase = {
        "kind": PHASE,
        "epochs": epochs,
        "batch_size": BATCH,
        "optimizer": optimizer,
    } | setting.phase
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

    def tables(
        self, name: str, setting: Setting, seed: int, epochs: int, *, held_out: bool
    ) -> Tables:
        if name not in self._bases:
            self._bases[name] = TASKS[name].recipe(self._data, self._own)
        return tables_of(TASKS[name], setting, self._bases[name], seed, epochs, held_out=held_out)

    def recipe(
        self, name: str, setting: Setting, seed: int, epochs: int, *, held_out: bool
    ) -> Recipe:
        return parse(Recipe, self.tables(name, setting, seed, epochs, held_out=held_out), "recipe")

    def curve(self, name: str, setting: Setting, seed: int) -> Curve:
        """Trains in this process and returns what its epochs reach."""
        recipe = self.recipe(name, setting, seed, self.epochs(name), held_out=True)
        with tempfile.TemporaryDirectory(prefix="vfl-wan-") as place:
            folder = Path(place) / "run"
            run_in_process(recipe, divide(recipe, self._own), folder)
            found = studies.curve(folder, PHASE, TASKS[name].metric)
        return Curve(
            name,
            TASKS[name].training,
            setting.name,
            seed,
            found[0][0],
            tuple(value for _, value in found),
        )

    def forecast_s(
        self, name: str, setting: Setting, line: Line, epochs: int, work: BatchWork
    ) -> float:
        """Returns what a forecast says of the training of a real run."""
        recipe = self.recipe(name, setting, 1, epochs, held_out=False)
        network = Network(
            line.network.bandwidth, line.network.latency_s, any_work=work, cores=os.cpu_count()
        )
        found = forecast(outlook_of(recipe, self._own))
        return sum(network.seconds(phase.name, phase.runs) for phase in found.phases)


def read_setting(text: str) -> Setting:
    """Reads ``4x8`` (bits x steps in flight), with more settings of the phase behind it:
    ``4x8,local_updates=3``.

    ``4/2x8``: 4 bits up, 2 bits down.
    """
    first, *more = text.split(",")
    bits, _, in_flight = first.partition("x")
    pairs = tuple(
        (key, json.loads(value)) for key, _, value in (each.partition("=") for each in more)
    )
    up, _, down = bits.partition("/")
    return Setting(int(up), int(in_flight), pairs, int(down or 0))
