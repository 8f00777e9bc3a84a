"""What leaves at once is held to one account: no two programs or runs pass a limit together."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.harness.account_runs import Run
from vfl_common.config.policy import AccountLimits
from vfl_common.errors import Code, InputError
from vfl_governance.account.limits import guard_of
from vfl_party.record.book import RecordBook


@pytest.mark.parametrize("apart", [False, True], ids=["runs", "programs"])
def test_what_leaves_at_once_passes_no_limit(
    apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    book = RecordBook(tmp_path, "p1")
    limits = AccountLimits(numbers_of_a_person=3)
    guard = guard_of(book, limits)
    # Other programs have a guard of their own.
    guards = [guard, guard_of(book, limits) if apart else guard]
    one, other = (
        Run(tmp_path, f"run-{number}", ["a", "b"], allows=[each])
        for number, each in enumerate(guards)
    )
    refused: list[InputError] = []

    def send() -> None:
        try:
            other.send([0])
        except InputError as error:
            refused.append(error)

    meanwhile = threading.Thread(target=send)
    add_line = one.recorder.book.add_line

    def after_another(text: str) -> tuple[int, int]:
        if meanwhile.ident is None and text.startswith('{"sent"'):
            meanwhile.start()
            # It would have left by then, if it did not wait for this one.
            meanwhile.join(0.3)
        return add_line(text)

    monkeypatch.setattr(one.recorder.book, "add_line", after_another)
    # Two numbers each.
    one.send([0])
    meanwhile.join(20.0)
    assert [each.code for each in refused] == [Code.REFUSED]
    text = (tmp_path / "lines.jsonl").read_text()
    assert text.count('{"sent"') == 1
    for each in (one, other):
        each.close()
    book.close()
