"""Files of scores are read as ``--like-input`` and ``--spreadsheet`` write them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tests.harness.errors import raises
from vfl_common import scorings
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_lab.production.compare import compare
from vfl_party.data.table import InputRows
from vfl_party.predict.forget import outputs, person
from vfl_party.predict.input_drift import read_scores, score_drift
from vfl_party.predict.results import KEPT, Output, write_table
from vfl_party.predict.run import TrainedRun

IDS = ["NA", "null", "007", "+49 1", "=1+1", "-5", "@x", "a;b,c", "nan", "zz"]
# Classes that other readers take for missing.
CLASSES = ["NA", "null"] * 5
SCORES = [0.1, 0.9, 0.25, 0.75, 0.3, 0.6, 0.5, 0.7, 0.2, 1.0]
NAMES = ["customer", "matched_customer", "state", "score_null", "class"]


def scored(ids: list[str] = IDS) -> pa.Table:
    columns = [ids, ids, ["scored"] * len(ids), SCORES, CLASSES]
    return pa.table(dict(zip(NAMES, columns, strict=True)))


HOW = {
    "comma": (None, False),
    "semicolon": ((";", ","), False),
    "tab": (("\t", "."), False),
    "bar": (("|", ","), False),
    "spreadsheet": (None, True),
    "semicolon-spreadsheet": ((";", ","), True),
}


def write(path: Path, table: pa.Table, how: str) -> Path:
    like, spreadsheet = HOW[how]
    own = None
    if like is not None:
        own = InputRows((), np.zeros(0, np.uint8), separator=like[0], decimal=like[1])
    Output(path, like_input=like is not None, spreadsheet=spreadsheet).write(table, own)
    return path


@pytest.mark.parametrize("how", HOW)
def test_scores_are_read_as_they_were(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "s.csv", scored(), how)
    assert ("'=1+1" in path.read_text()) == ("spreadsheet" in how)
    found = read_scores(path).to_pydict()
    assert found == scored().to_pydict()


def test_a_name_may_have_other_separators(tmp_path: Path) -> None:
    names = ["value_no", "matched_value_no", "state", "score_a;b|c;d;e;f", "class"]
    table = scored(["007", *IDS[1:]]).rename_columns(names)
    found = read_scores(write(tmp_path / "s.csv", table, "comma"))
    assert found.to_pydict() == table.to_pydict()


def test_a_score_that_is_no_number_is_named(tmp_path: Path) -> None:
    path = tmp_path / "s.csv"
    path.write_text("id,matched_id,state,score_1,class\na,a,scored,high,1\n")
    with raises(InputError, Code.FILE_INVALID, names=("score_1", "s.csv")):
        read_scores(path)


@pytest.mark.parametrize("how", HOW)
def test_scores_drift_by_what_they_are(tmp_path: Path, how: str) -> None:
    tested = scored().append_column("split", [["test"] * 10]).append_column("phase", [["e"] * 10])
    write_table(tmp_path / KEPT, tested)
    run = TrainedRun.__new__(TrainedRun)
    object.__setattr__(run, "path", tmp_path)
    (found,) = score_drift(run, write(tmp_path / "s.csv", scored(), how))
    assert (found.name, found.index) == ("score_null", 0)
    assert sum(found.now) == 10


@pytest.mark.parametrize("how", HOW)
def test_scores_are_compared_by_ids_and_classes(tmp_path: Path, how: str) -> None:
    # In a text file such a label is a missing one.
    truth = tmp_path / "truth.parquet"
    write_table(truth, pa.table({"customer": IDS, "left": CLASSES}))
    path = write(tmp_path / "s.csv", scored(), how)
    found = compare(path, path, truth=str(truth), label="left")
    assert found.rows == 10
    measures = {each.metric: each.old for each in found.measures}
    assert measures["accuracy"] == 1.0
    assert measures["brier"] == pytest.approx(
        np.mean((np.array(SCORES) - [word == "null" for word in CLASSES]) ** 2)
    )


@pytest.mark.parametrize("how", HOW)
def test_a_person_is_found_in_them(tmp_path: Path, how: str) -> None:
    path = write(tmp_path / "s.csv", scored(), how)
    facts: dict[str, Any] = {"party": "bank", "recipe": "churn", "model": "m", "run": "r"}
    scorings.note(tmp_path, **facts, rows=10, scored=10, output=str(path))
    settings = DataSettings(source=str(tmp_path / "bank.csv"), id=("customer",))
    for cell in IDS:
        (held,) = outputs(tmp_path, "bank", person([cell], settings))
        assert (held.path, held.what[:16]) == (path, "contains the row")
    assert outputs(tmp_path, "bank", person(["nobody"], settings)) == []


def test_an_id_of_several_columns_is_compared_as_one(tmp_path: Path) -> None:
    path = tmp_path / "s.parquet"
    columns: dict[str, list[Any]] = {"shop": ["A ", "A ", "B"], "no": ["01", "02", "01"]}
    matched = {"matched_shop": ["a", "a", "b"], "matched_no": ["1", None, "1"]}
    write_table(path, pa.table(columns | matched | {"state": ["scored"] * 3}))
    scorings.note(
        tmp_path, party="bank", recipe="c", model="m", run="r", rows=3, scored=3, output=str(path)
    )
    rules = ("trim", "casefold", "zeros")
    for own, count in ((["a", "1"], 1), (["A", "2"], 1), (["b", "02"], 0), (["1", "a"], 0)):
        for used in (rules, ()):
            settings = DataSettings(source="bank.csv", id=("shop", "no"), id_rules=used)
            found = outputs(tmp_path, "bank", person(own, settings))
            # Without rules it is the spelling of the parties that counts.
            assert len(found) == (count if used or own == ["a", "1"] else 0)
