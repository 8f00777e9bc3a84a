"""The profile of the training rows, and the population stability index."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError
from vfl_party.data import Table
from vfl_party.data.inputs.profile import (
    FILE,
    ColumnProfile,
    bins_of,
    by_chance,
    load,
    profile_of,
    save,
    stability_index,
)
from vfl_party.data.table import Categories
from vfl_party.predict.input_drift import Shift


def table(numbers: np.ndarray, codes: np.ndarray, words: tuple[str, ...]) -> Table:
    return Table(
        "a.csv",
        [str(row) for row in range(len(numbers))],
        numeric_NF=numbers.astype(np.float32)[:, None],
        numeric_names=("age",),
        categorical=Categories(codes[:, None].astype(np.int32), (words,)),
        categorical_names=("region",),
    )


def test_the_index_is_siddiqi_s_with_half_a_row_in_each_bin() -> None:
    before, now = (40, 30, 30, 0), (10, 30, 60, 0)
    p, q = ([(count + 0.5) / 101.5 for count in each[:3]] for each in (before, now))
    wanted = sum((b - a) * math.log(b / a) for a, b in zip(p, q, strict=True))
    assert stability_index(before, now) == pytest.approx(wanted, rel=1e-12)
    assert stability_index(now, before) == pytest.approx(wanted, rel=1e-12)
    assert stability_index(before, before) == 0
    assert math.isfinite(stability_index((100, 0), (0, 100)))


def test_chance_alone_exceeds_its_bound_as_often_as_it_says() -> None:
    """1,000 draws of the same distribution, at 5 %: three standard errors are 2 points."""
    draw = np.random.default_rng(0)
    before = bins_of(draw.normal(size=5_000).astype(np.float32))
    beyond = 0
    for _ in range(1_000):
        now = before.count_numbers(draw.normal(size=400).astype(np.float32)).tolist()
        bound = by_chance(before.counts, now, level=0.05)
        beyond += stability_index(before.counts, now) > bound
    assert 0.03 <= beyond / 1_000 <= 0.07


def test_numbers_are_counted_between_the_deciles_of_training() -> None:
    numbers = np.append(np.arange(100.0), np.nan)
    (age, region) = profile_of(
        table(numbers, np.arange(101) % 3 - 1, ("east", "west")), np.arange(101)
    )
    assert (age.name, age.is_number, len(age.edges)) == ("age", True, 9)
    assert age.counts == (*[10] * 10, 1)
    assert sum(age.count_numbers(np.full(7, 1e9, np.float32))) == 7
    assert age.count_numbers(np.array([np.nan, -5, 1e9], np.float32)).tolist() == [
        1, *[0] * 8, 1, 1,
    ]  # fmt: skip
    # -1 is a missing cell.
    assert (region.words, region.counts) == (("east", "west"), (34, 33, 0, 34))
    assert region.count_words(["west", "north"], [4, 2, 1]).tolist() == [0, 4, 2, 1]


def test_only_the_given_rows_count_and_rare_categories_are_together() -> None:
    words = tuple(f"w{at:02d}" for at in range(80))
    codes = np.concatenate([np.repeat(np.arange(60), 2), np.arange(60, 80)])
    _, region = profile_of(table(np.zeros(140), codes, words), np.arange(138))
    assert len(region.words) == 50
    assert region.counts[-2:] == (2 * 10 + 18, 0)
    assert sum(region.counts) == 138
    (few, _) = profile_of(table(np.zeros(9), np.zeros(9), ("a",)), np.arange(4))
    assert few.counts == (0, 4, 0)
    (none, _) = profile_of(table(np.full(9, np.nan), np.zeros(9), ("a",)), np.arange(9))
    assert (none.edges, none.counts) == ((), (0, 9))


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = profile_of(table(np.arange(50.0), np.arange(50) % 2, ("a", "b")), np.arange(50))
    save(tmp_path, found)
    assert load(tmp_path) == found
    assert (tmp_path / FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / FILE).write_text('[{"name": "age"}]')
    with raises(InputError, Code.FILE_INVALID, names="profile.json"):
        load(tmp_path)
    (tmp_path / FILE).unlink()
    with raises(InputError, Code.FILE_INVALID, names="profile.json"):
        load(tmp_path)


AGE = {"name": "age", "is_number": True, "counts": [1, 2, 3], "edges": [4.5], "words": []}
REGION = {"name": "r", "is_number": False, "counts": [1, 2, 3, 4], "edges": [], "words": ["a", "b"]}
WRONG = {
    "object": "{}",
    "text": '""',
    "null": "null",
    "deep": "[" * 100_000,
    "in-a-list": json.dumps([[AGE]]),
    "name": json.dumps([AGE | {"name": None}]),
    "kind": json.dumps([AGE | {"is_number": "no"}]),
    "few-counts": json.dumps([AGE | {"counts": [1, 2]}]),
    "counts-null": json.dumps([AGE | {"counts": None}]),
    "half-a-row": json.dumps([AGE | {"counts": [1, 2, 0.5]}]),
    "below-zero": json.dumps([AGE | {"counts": [1, 2, -1]}]),
    "true-rows": json.dumps([AGE | {"counts": [1, 2, True]}]),
    "many-rows": json.dumps([AGE | {"counts": [1, 2, 10**400]}]),
    "nan": json.dumps([AGE | {"edges": [math.nan]}]),
    "far": json.dumps([AGE | {"edges": [10**400]}]),
    "unsorted": json.dumps([AGE | {"edges": [2, 1], "counts": [1] * 4}]),
    "equal": json.dumps([AGE | {"edges": [1, 1], "counts": [1] * 4}]),
    "words-of-numbers": json.dumps([AGE | {"words": ["a"], "counts": [1] * 4}]),
    "few-words": json.dumps([REGION | {"words": ["a"]}]),
    "same-words": json.dumps([REGION | {"words": ["a", "a"]}]),
    "words-text": json.dumps([REGION | {"words": "ab"}]),
    "word-null": json.dumps([REGION | {"words": ["a", None]}]),
}


@pytest.mark.parametrize("text", WRONG.values(), ids=WRONG.keys())
def test_a_damaged_profile_says_so(tmp_path: Path, text: str) -> None:
    (tmp_path / FILE).write_text(json.dumps([AGE, REGION]))
    assert [each.name for each in load(tmp_path)] == ["age", "r"]
    (tmp_path / FILE).write_text(text)
    with raises(InputError, Code.FILE_INVALID, names="profile.json"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("index", "chance", "verdict"),
    [
        (0.09, 0.01, "stable"),
        (0.1, 0.01, "moved"),
        (0.24, 0.01, "moved"),
        (0.25, 0.01, "drifted"),
        (0.4, 0.5, "stable"),
    ],
)
def test_the_verdict_follows_the_convention_beyond_chance(
    index: float, chance: float, verdict: str
) -> None:
    assert Shift("age", index, chance, (), (), ()).verdict == verdict


def test_a_column_without_a_name_is_binned_too() -> None:
    scores = bins_of(np.linspace(0, 1, 100, dtype=np.float32))
    assert isinstance(scores, ColumnProfile)
    assert scores.counts == (*[10] * 10, 0)
