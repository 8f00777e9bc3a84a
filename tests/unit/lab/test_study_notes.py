"""The notes of a study's finished runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError
from vfl_lab.study import FILE, FinishedRuns

WRONG = {
    "empty": "",
    "object": "{}",
    "list": "[]",
    "null": "null",
    "number": '{"inputs": 5}',
    "inputs-null": '{"inputs": null}',
    "no-text": "\udcff",
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_a_damaged_note_says_so(tmp_path: Path, text: str) -> None:
    run = tmp_path / "a"
    run.mkdir()
    (run / FILE).write_text(text, errors="surrogateescape")
    # It is not over, so nothing is known of it.
    assert FinishedRuns(tmp_path).find("x") is None
    (run / "summary.json").write_text("{}")
    with raises(InputError, Code.FILE_INVALID, names="study.json"):
        FinishedRuns(tmp_path)
    FinishedRuns(tmp_path / "none").note(run, "x")
    assert FinishedRuns(tmp_path).find("x") == run
