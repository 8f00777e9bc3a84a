"""Sentences stand in ``tests/sentences.txt``, and in no test."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.harness import sentences
from vfl_common.errors import Code, InputError

TESTS = Path(__file__).parents[2]


def functions() -> set[str]:
    """Returns each test's name as pytest has it, without its case."""
    return {
        f"{file.relative_to(TESTS.parent).as_posix()}::{node.name}"
        for file in TESTS.rglob("test_*.py")
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
    }


def matched() -> list[object]:
    """Returns what ``match=`` of ``pytest.raises`` and ``pytest.warns`` compares in all tests."""
    return [
        keyword.value.value if isinstance(keyword.value, ast.Constant) else "what a name holds"
        for file in TESTS.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("pytest.raises", "pytest.warns")
        for keyword in node.keywords
        if keyword.arg == "match"
    ]


def test_no_test_holds_the_sentence_of_an_error() -> None:
    # One word is a name.
    assert [text for text in matched() if " " in str(text)] == []


def test_every_sentence_is_of_a_test_that_is_there() -> None:
    names = {name.partition("[")[0] for name in sentences.known()}
    assert len(names) > 300
    assert names - functions() == set()


def test_another_sentence_or_code_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(sentences.RENEW, raising=False)
    name = "tests/unit/test_x.py::test_x"
    monkeypatch.setenv("PYTEST_CURRENT_TEST", f"{name} (call)")
    monkeypatch.setattr(sentences, "known", lambda: {name: ["DATA_INVALID: row … of a.csv"]})

    def wrong(code: Code, text: str) -> None:
        sentences.begin(name)
        with sentences.raises(InputError, Code.DATA_INVALID):
            raise InputError(code, text)

    wrong(Code.DATA_INVALID, "row 3 of a.csv")
    for code, text in (
        (Code.DATA_INVALID, "row 3 of b.csv"),
        (Code.FILE_INVALID, "row 3 of a.csv"),
    ):
        with pytest.raises(AssertionError):
            wrong(code, text)
    sentences.begin(name)
    # The second sentence of a test that has one.
    sentences.worded_as_before("DATA_INVALID: row 3 of a.csv")
    with pytest.raises(AssertionError):
        sentences.worded_as_before("DATA_INVALID: row 3 of a.csv")
    sentences.begin(name)


def test_what_differs_from_run_to_run_is_no_wording(tmp_path: Path) -> None:
    said = f"{tmp_path / 'a b.csv'}: ends at 2031-05-06 07:08 UTC, at 127.0.0.1:5{1234}\n"
    assert sentences.plain(said) == "<tmp>/a b.csv: ends at <time>, at 127.0.0.1:<port>\\n"
