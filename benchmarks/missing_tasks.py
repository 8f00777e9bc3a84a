"""The four tasks of ``benchmarks.missing``, as arrays: whose columns are whose, and how rows are
divided.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq

from vfl_common.config.task import TaskSettings
from vfl_party.base.seeds import Rows, derive_seed, draw_permutation, split_rows

Floats = npt.NDArray[np.float32]
# So that a run takes seconds.
MOST_ROWS = 10_000
# Of all rows: kept from every run, for what a model promises. Of the others: the run's own test.
FRESH, TEST = 0.2, 0.2
ACTIVE = "p0"


@dataclass(frozen=True)
class Setting:
    """A task. ``columns``: {party: its columns [N, F]}, the active party first; ``y``: [N]."""

    task: TaskSettings
    metric: str
    columns: dict[str, Floats]
    y: npt.NDArray[np.int64]
    hidden: int
    scale: str

    @property
    def passives(self) -> list[str]:
        return [name for name in self.columns if name != ACTIVE]

    def of(self, rows: Rows) -> Setting:
        """Returns the task with these rows alone."""
        columns = {name: each[rows] for name, each in self.columns.items()}
        return Setting(self.task, self.metric, columns, self.y[rows], self.hidden, self.scale)

    def scaled(self, train: Rows) -> dict[str, Floats]:
        """Returns the columns in the scale of the training rows, as the library makes it."""
        return {name: _scaled(each, train, self.scale) for name, each in self.columns.items()}


def _scaled(columns_NF: Floats, train: Rows, scale: str) -> Floats:
    known = columns_NF[train].astype(np.float64)
    if scale == "minmax":
        shift, width = known.min(axis=0), known.max(axis=0) - known.min(axis=0)
    else:
        shift, width = known.mean(axis=0), known.std(axis=0)
    found: Floats = ((columns_NF - shift) / np.where(width > 0, width, 1.0)).astype(np.float32)
    return found


def load(name: str, data: Path, seed: int) -> tuple[Setting, Setting]:
    """Returns a task's rows for a run, and its fresh rows, which no run sees."""
    whole = TASKS[name](data)
    order = draw_permutation(derive_seed(seed, "fresh"), len(whole.y))[:MOST_ROWS]
    fresh = round(FRESH * len(order))
    return whole.of(np.sort(order[fresh:])), whole.of(np.sort(order[:fresh]))


def divided(setting: Setting, seed: int) -> tuple[Rows, Rows]:
    """Returns training and test rows, those that the library draws."""
    found = split_rows(seed, len(setting.y), validation=0.0, test=TEST)
    return found["train"], found["test"]


def _table(path: Path) -> pa.Table:
    return pq.read_table(path) if path.suffix == ".parquet" else pyarrow.csv.read_csv(path)


def _numbers(table: pa.Table, names: list[str]) -> Floats:
    return np.stack([table[name].to_numpy() for name in names], axis=1).astype(np.float32)


def _dealt(columns_NF: Floats, parts: int = 4) -> dict[str, Floats]:
    """Deals columns in their order."""
    return {f"p{n}": each for n, each in enumerate(np.array_split(columns_NF, parts, axis=1))}


def _credit(data: Path) -> Setting:
    guest = _table(data / "default_credit_hetero_guest.csv.gz").sort_by("id")
    host = _table(data / "default_credit_hetero_host.csv.gz").sort_by("id")
    columns = {
        ACTIVE: _numbers(guest, [f"x{n}" for n in range(13)]),
        "p1": _numbers(host, [f"x{n}" for n in range(10)]),
    }
    return Setting(_task(kind="binary"), "auc", columns, guest["y"].to_numpy(), 32, "standard")


def _phishing(data: Path) -> Setting:
    table = _table(data / "phishing.csv.gz")
    columns = _dealt(_numbers(table, [f"f{n}" for n in range(68)]))
    y = table["y"].to_numpy()
    return Setting(_task(kind="binary"), "accuracy", columns, y, 32, "standard")


def _uji(data: Path) -> Setting:
    table = _table(data / "ujiindoorloc.parquet")
    heard = _numbers(table, [name for name in table.column_names if name.startswith("WAP")])
    # 100 means "not heard": it becomes a strength below the weakest that was heard.
    columns = _dealt(np.where(heard == 100, np.float32(-105), heard))
    places = 10 * _numbers(table, ["BUILDINGID"]) + _numbers(table, ["FLOOR"])
    _, y = np.unique(places[:, 0], return_inverse=True)
    task = _task(kind="multiclass", classes=int(y.max()) + 1)
    return Setting(task, "accuracy", columns, y.astype(np.int64), 64, "minmax")


def _mnist10k(data: Path) -> Setting:
    found = np.load(data / "mnist10k.npz")
    images = found["images"].astype(np.float32)
    halves = [half for row in np.split(images, 2, axis=1) for half in np.split(row, 2, axis=2)]
    columns = {f"p{n}": each.reshape(len(each), -1) for n, each in enumerate(halves)}
    task = _task(kind="multiclass", classes=10)
    return Setting(task, "accuracy", columns, found["labels"].astype(np.int64), 64, "minmax")


def _task(**settings: Any) -> TaskSettings:
    return TaskSettings.model_validate(settings)


TASKS: dict[str, Callable[[Path], Setting]] = {
    "credit": _credit,
    "phishing": _phishing,
    "UJI": _uji,
    "MNIST-10k": _mnist10k,
}
