"""How often a day a passive party answers for one id, and with which noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError
from vfl_serve.answering import DailyLimit, SentBefore
from vfl_serve.opening import MinimumRows
from vfl_serve.parties import combine_limits


def test_answers_about_one_id_are_counted_over_restarts(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    limit = DailyLimit(path, 2)
    assert limit.take(["a", "b"]).tolist() == [True, True]
    assert limit.take(["a"]).tolist() == [True]
    assert limit.take(["a", "b", "c"]).tolist() == [False, True, True]
    limit.close()
    again = DailyLimit(path, 2)
    assert again.take(["a", "b", "c", "d"]).tolist() == [False, False, True, True]
    assert again.take(["e", "e", "e"]).tolist() == [True, True, False]
    again.close()


def test_the_least_people_are_those_whom_the_other_limits_leave(tmp_path: Path) -> None:
    daily = DailyLimit(tmp_path / "answers.sqlite", 1)
    limit = combine_limits(MinimumRows(2), [daily], [])
    assert limit is not None
    assert limit.take(["a", "b"]).tolist() == [True, True]
    # Of the two who are asked about, one would be answered alone.
    assert limit.take(["a", "c"]).tolist() == [False, False]
    assert limit.take(["d", "e", "a"]).tolist() == [True, True, False]
    assert combine_limits(None, [None], [None]) is None
    daily.close()


def test_a_file_that_cannot_count_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    path.write_text("no database, but long enough to be looked at as one" * 100)
    with raises(InputError, Code.FILE_INVALID, names="answers.sqlite"):
        DailyLimit(path, 2)


def test_a_count_that_fails_ends_none_of_the_next(tmp_path: Path) -> None:
    limit = DailyLimit(tmp_path / "answers.sqlite", 1)
    with pytest.raises(UnicodeEncodeError):
        limit.take(["a", "\ud800"])
    assert limit.take(["a"]).tolist() == [True]
    limit.close()


def test_who_asks_again_gets_the_same_noise(tmp_path: Path) -> None:
    path = tmp_path / "answers.sqlite"
    random = np.random.default_rng(0)
    clean_ND = np.zeros((2, 3), np.float32)

    def noisy() -> np.ndarray[Any, np.dtype[np.float32]]:
        return random.normal(size=(2, 3)).astype(np.float32)

    sent = SentBefore(path, "run")
    first_ND = sent.reuse_sent(["a", "b"], clean_ND, noisy())
    sent.close()
    again = SentBefore(path, "run")
    assert (again.reuse_sent(["b", "a"], clean_ND, noisy()) == first_ND[::-1]).all()
    # Another embedding, and another model.
    changed_ND = clean_ND + 1
    assert (again.reuse_sent(["a", "b"], changed_ND, noisy()) != first_ND).all()
    other = SentBefore(path, "other")
    assert (other.reuse_sent(["a", "b"], clean_ND, noisy()) != first_ND).all()
    other.close()
    again.close()
