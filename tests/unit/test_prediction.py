"""The table of a prediction: whole, and for its owner's eyes."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from vfl_common.errors import InputError
from vfl_party.prediction import write_table

TABLE = pa.table({"id": ["a", "b"], "score": [0.25, 0.75]})


@pytest.mark.parametrize(
    ("name", "read"), [("out.csv", pyarrow.csv.read_csv), ("out.parquet", pyarrow.parquet.read_table)]
)
def test_only_the_owner_may_read_the_scores(name: str, read: Callable[[Path], pa.Table], tmp_path: Path) -> None:
    path = tmp_path / name
    (tmp_path / f".{name}.{os.getpid()}").write_text("left by a killed process that had this number")
    write_table(path, TABLE)
    assert read(path).equals(TABLE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_has_gone_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"out\.csv: cannot be written \(No such file or directory\)"):
        write_table(tmp_path / "gone" / "out.csv", TABLE)
