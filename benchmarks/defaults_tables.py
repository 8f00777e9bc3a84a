"""The tables of ``benchmarks.defaults``: four to choose defaults by, and ten to show them on.

The made ones have what people's tables have: categories, missing cells, dates, columns that tell
nothing, few positives. Validation rows of the four decided. Of the ten, ``latitude`` and ``place``
were added after the others had shown hardly any gap.
"""

from __future__ import annotations

import gzip
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from sklearn import datasets

# Rows of the largest tables: more take too long here.
MOST = 10_000
UJI_ROWS = 4_000
LABEL = "label"


@dataclass(frozen=True)
class Shared:
    """A table whose columns parties share.

    ``frames``: {party: its columns, with ``id``}; the first party is the active one, and has the
    label. ``task``: as ``vfl new --task`` takes it.
    """

    name: str
    task: str
    frames: dict[str, pd.DataFrame]

    def write(self, folder: Path) -> dict[str, Path]:
        """Writes a CSV file for each party, as people would bring it."""
        paths = {name: folder / f"{name}.csv" for name in self.frames}
        for name, frame in self.frames.items():
            frame.to_csv(paths[name], index=False)
        return paths

    def joined(self) -> pd.DataFrame:
        """Returns all columns of all parties, by id, with the label."""
        first, *others = [frame.set_index("id") for frame in self.frames.values()]
        return first.join(others)


def shared(name: str, task: str, table: pd.DataFrame, label: Sequence[Any], parties: int) -> Shared:
    """Divides columns into runs of neighbours, as equal as possible."""
    ids = [f"K{number:06d}" for number in range(len(table))]
    runs = np.array_split(np.arange(table.shape[1]), parties)
    frames = {}
    for part, columns in enumerate(runs):
        frame = table.iloc[:, columns].copy()
        frame.insert(0, "id", ids)
        if part == 0:
            frame[LABEL] = list(label)
        frames["bank" if part == 0 else f"shop{part}"] = frame
    return Shared(name, task, frames)


# --- ten to show
# ------------------------------------------------------------


def breast_cancer(_data: Path) -> Shared:
    x, y = datasets.load_breast_cancer(return_X_y=True, as_frame=True)
    return shared("breast cancer", "binary", x, y, 2)


def wine(_data: Path) -> Shared:
    x, y = datasets.load_wine(return_X_y=True, as_frame=True)
    return shared("wine", "multiclass", x, y, 2)


def digits(_data: Path) -> Shared:
    x, y = datasets.load_digits(return_X_y=True, as_frame=True)
    return shared("digits", "multiclass", x, y, 3)


def diabetes(_data: Path) -> Shared:
    x, y = datasets.load_diabetes(return_X_y=True, as_frame=True)
    return shared("diabetes", "regression", x, y, 2)


def credit(data: Path) -> Shared:
    """FATE's two organisations, the first rows of them."""
    guest, host = (
        pd.read_csv(data / f"default_credit_hetero_{side}.csv.gz").head(MOST)
        for side in ("guest", "host")
    )
    guest = guest.rename(columns={"y": LABEL})
    host = host.rename(columns={name: f"h{name}" for name in host.columns if name != "id"})
    return Shared("credit", "binary", {"bank": guest, "shop1": host})


def phishing(data: Path) -> Shared:
    packed = gzip.decompress((data / "phishing.csv.gz").read_bytes())
    table = pd.read_csv(io.BytesIO(packed)).head(MOST)
    return shared("phishing", "binary", table.drop(columns=["id", "y"]), table["y"], 3)


def prices(_data: Path) -> Shared:
    """A regression (Friedman's first) with a category, missing cells and columns of noise."""
    return _prices("prices", 5_000, 3, 7)


def claims(_data: Path) -> Shared:
    """Few positives (about 6 %), categories, dates, missing cells."""
    return _claims("claims", 6_000, 2, 11)


def latitude(data: Path) -> Shared:
    """UJIIndoorLoc: where a telephone is, by 520 access points of three parties; some rows."""
    return _uji(data, "latitude", "regression", "LATITUDE", 3)


def place(data: Path) -> Shared:
    """The same, building and floor: 13 classes, two parties."""
    return _uji(data, "place", "multiclass", "place", 2)


def _uji(data: Path, name: str, task: str, label: str, parties: int) -> Shared:
    table = pd.read_parquet(data / "ujiindoorloc.parquet")
    table = table.sample(UJI_ROWS, random_state=1).reset_index(drop=True)
    table["place"] = table["BUILDINGID"].astype(int) * 10 + table["FLOOR"].astype(int)
    # 100 means that the point is not heard: below the weakest that is.
    heard = table.filter(like="WAP").replace(100, -105)
    return shared(name, task, heard, table[label].tolist(), parties)


# --- four to choose by
# ------------------------------------------------------------


def chosen_classes(_data: Path) -> Shared:
    return _classes("two classes", 3_000, 2, 2, 101)


def chosen_many(_data: Path) -> Shared:
    return _classes("five classes", 1_500, 5, 3, 102)


def chosen_numbers(_data: Path) -> Shared:
    """A regression of few rows: Friedman's second, with noise."""
    x, y = datasets.make_friedman2(800, noise=50.0, random_state=103)
    table = pd.DataFrame(x, columns=[f"x{c}" for c in range(4)])
    return shared("numbers", "regression", table, y, 2)


def chosen_mixed(_data: Path) -> Shared:
    """Products of columns, a category, missing cells; a regression of many rows."""
    random = np.random.default_rng(104)
    x = random.normal(size=(4_000, 10))
    kind = random.integers(0, 6, len(x))
    y = x[:, 0] * x[:, 6] + np.abs(x[:, 1]) + 0.5 * kind * (x[:, 7] > 0)
    y += 0.3 * random.normal(size=len(x))
    table = pd.DataFrame(x, columns=[f"x{c}" for c in range(10)])
    table.insert(5, "kind", [f"k{each}" for each in kind])
    return shared("mixed", "regression", _holes(table, random), y, 2)


def _classes(name: str, rows: int, classes: int, parties: int, seed: int) -> Shared:
    x, y = datasets.make_classification(
        rows,
        18,
        n_informative=8,
        n_redundant=4,
        n_classes=classes,
        n_clusters_per_class=3,
        flip_y=0.03,
        random_state=seed,
    )
    table = pd.DataFrame(x, columns=[f"x{c}" for c in range(x.shape[1])])
    kind = "binary" if classes == 2 else "multiclass"
    return shared(name, kind, table, y, parties)


def _prices(name: str, rows: int, parties: int, seed: int) -> Shared:
    random = np.random.default_rng(seed)
    x, y = datasets.make_friedman1(rows, 12, noise=1.0, random_state=seed)
    town = random.integers(0, 8, rows)
    table = pd.DataFrame(x, columns=[f"x{c}" for c in range(12)])
    table.insert(6, "town", [f"town {each}" for each in town])
    return shared(name, "regression", _holes(table, random), y + town, parties)


def _claims(name: str, rows: int, parties: int, seed: int) -> Shared:
    random = np.random.default_rng(seed)
    day = random.integers(0, 2_000, rows)
    age, income = random.normal(45, 14, rows), random.lognormal(10, 0.5, rows)
    make, use = random.integers(0, 9, rows), random.integers(0, 3, rows)
    km, years = random.gamma(2.0, 8_000, rows), random.integers(0, 20, rows)
    score = -4.2 + 1.2 * (age < 28) + 0.9 * (use == 2) * (km > 20_000) + 0.25 * (make % 3)
    score += 0.0006 * day * (years > 8) + 0.6 * (income < 18_000)
    y = random.random(rows) < 1 / (1 + np.exp(-score))
    since = pd.Timestamp("2018-01-01") + pd.to_timedelta(day, unit="D")
    table = pd.DataFrame(
        {
            "age": age.round(),
            "income": income.round(2),
            "since": since.strftime("%d.%m.%Y"),
            "purpose": np.array(["private", "work", "delivery"])[use],
            "km": km.round(),
            "make": [f"make {each}" for each in make],
            "years": years,
            "noise": random.normal(size=rows).round(3),
        }
    )
    return shared(name, "binary", _holes(table, random), np.where(y, "claim", "none"), parties)


def _holes(table: pd.DataFrame, random: np.random.Generator) -> pd.DataFrame:
    """Empties one cell in twenty of every second column."""
    holes = random.random(table.shape) < 0.05
    holes[:, ::2] = False
    return table.mask(pd.DataFrame(holes, columns=table.columns, index=table.index))


TABLES: dict[str, dict[str, Callable[[Path], Shared]]] = {
    "choose": {
        "two classes": chosen_classes,
        "five classes": chosen_many,
        "numbers": chosen_numbers,
        "mixed": chosen_mixed,
    },
    "show": {
        "breast cancer": breast_cancer,
        "wine": wine,
        "digits": digits,
        "diabetes": diabetes,
        "credit": credit,
        "phishing": phishing,
        "prices": prices,
        "claims": claims,
        "latitude": latitude,
        "place": place,
    },
}
