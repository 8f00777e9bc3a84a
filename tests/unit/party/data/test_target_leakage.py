"""Columns that tell the class of every row are found, others are not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from vfl_common.config.data import DataSettings
from vfl_party.data import notes as target_leakage
from vfl_party.data import read_rows

ROWS = 400
RNG = np.random.default_rng(0)
CLASS_N = np.arange(ROWS) % 4 == 0
NOISE_N = RNG.normal(size=ROWS)
NOTHING = np.array(None, object)


def told(folder: Path, *, classes: npt.ArrayLike = CLASS_N, **columns: npt.ArrayLike) -> list[str]:
    """Returns the columns that are noted, of a table with these."""
    path = folder / "t.parquet"
    labels = (
        np.where(np.asarray(classes), "yes", "no") if classes is CLASS_N else np.asarray(classes)
    )
    values = {"who": np.arange(len(labels)).astype(str), "y": labels, **columns}
    parquet.write_table(
        pa.table({name: pa.array(each, from_pandas=True) for name, each in values.items()}), path
    )
    settings = DataSettings(source=str(path), id=("who",), label="y")
    found = list(target_leakage.find_target_leakage(read_rows(settings, with_label=True), "y"))
    assert all(finding.column in finding.text for finding in found)
    return [each.column for each in found]


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(np.where(CLASS_N, "closed", "open"), id="text"),
        pytest.param(np.where(CLASS_N, ["a", "b"] * 200, ["c", "d"] * 200), id="several texts"),
        pytest.param(np.where(CLASS_N, NOTHING, ["c", "d"] * 200), id="missing text"),
        pytest.param(
            np.where(CLASS_N, [f"{n}" for n in range(ROWS)], NOTHING), id="free text of one class"
        ),
        pytest.param(np.where(CLASS_N, 3, np.arange(ROWS) % 3), id="codes"),
        pytest.param(np.where(CLASS_N, 5.0, -5.0) + NOISE_N, id="greater"),
        pytest.param(np.where(CLASS_N, -5.0, 5.0) + NOISE_N, id="less"),
        pytest.param(np.where(CLASS_N, NOISE_N, np.nan), id="numbers of one class"),
    ],
)
def test_a_column_that_tells_the_class(values: npt.NDArray[np.generic], tmp_path: Path) -> None:
    assert told(tmp_path, age=NOISE_N, x=values) == ["x"]
    values = values.copy()
    # One row of the other class.
    values[1] = values[0]
    assert told(tmp_path, age=NOISE_N, x=values) == []


def test_of_several_classes_only_values_count(tmp_path: Path) -> None:
    classes = np.arange(ROWS) % 3
    assert told(
        tmp_path,
        classes=classes,
        x=classes * 10 + np.arange(ROWS) % 2,
        size=classes * 9.0 + NOISE_N,
    ) == ["x"]


def test_what_is_no_leak(tmp_path: Path) -> None:
    each = [f"K{n}" for n in range(ROWS)]
    assert (
        told(
            tmp_path,
            name=each,
            number=RNG.permutation(ROWS),
            same=["a"] * ROWS,
            nothing=[np.nan] * ROWS,
        )
        == []
    )
    rare = np.where(np.arange(ROWS) < target_leakage.MIN_OTHERS - 1, "yes", "no")
    assert told(tmp_path, classes=rare, x=rare) == []
    # A regression's label.
    assert told(tmp_path, classes=NOISE_N, x=NOISE_N) == []


def test_rows_after_the_sample_are_looked_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(target_leakage, "_SAMPLED", 20)
    x = np.where(CLASS_N, "closed", "open").astype(object)
    assert told(tmp_path, x=x) == ["x"]
    x[-1] = "closed"
    assert told(tmp_path, x=x) == []
