"""Rows that are dealt to parties: every row once, alike for one seed, and as unlike as asked."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import How, deal

LABELS = np.repeat(np.arange(10), [60, 40, 50, 50, 70, 30, 50, 50, 45, 55])
HOWS: tuple[How, ...] = ("even", "classes", "dirichlet")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("parts", [5, 7, 20])
def test_every_row_goes_to_one_party(how: How, parts: int) -> None:
    found = deal(LABELS, parts, how, seed=3)
    assert len(found) == parts
    assert sorted(np.concatenate(found)) == list(range(len(LABELS)))
    assert all((np.diff(rows) > 0).all() for rows in found)
    again = deal(LABELS, parts, how, seed=3)
    assert all(map(np.array_equal, found, again))
    assert not all(map(np.array_equal, found, deal(LABELS, parts, how, seed=4)))


def test_even_parts_differ_by_one_row_at_most() -> None:
    sizes = [len(rows) for rows in deal(LABELS, 7)]
    assert max(sizes) - min(sizes) == 1


@pytest.mark.parametrize(("parts", "classes"), [(5, 2), (10, 2), (100, 2), (7, 3), (3, 10)])
def test_each_party_has_so_many_classes(parts: int, classes: int) -> None:
    labels = np.array([f"class {each}" for each in LABELS])
    found = deal(labels, parts, "classes", classes=classes, seed=1)
    assert {len(np.unique(labels[rows])) for rows in found} == {classes}
    holders = [sum(name in labels[rows] for rows in found) for name in np.unique(labels)]
    assert max(holders) - min(holders) <= 1


def test_a_small_alpha_makes_the_parties_more_unlike() -> None:
    def unlike(alpha: float) -> float:
        found = deal(LABELS, 10, "dirichlet", alpha=alpha, seed=2)
        counts = np.array([np.bincount(LABELS[rows], minlength=10) for rows in found])
        return float((counts.max(1) / counts.sum(1)).mean())

    assert unlike(0.1) > unlike(1.0) > unlike(100.0)
    assert unlike(1000.0) < 0.25


def test_a_party_has_at_least_so_many_rows() -> None:
    found = deal(LABELS, 20, "dirichlet", alpha=0.5, min_rows=5, seed=1)
    assert min(map(len, found)) >= 5


@pytest.mark.parametrize(
    "given",
    [
        {"parts": 501},
        {"parts": 400, "how": "classes"},
        {"parts": 100, "how": "dirichlet", "alpha": 0.01},
    ],
    ids=["even", "classes", "dirichlet"],
)
def test_too_few_rows_are_refused(given: dict[str, Any]) -> None:
    with raises(InputError, Code.DATA_INVALID, names="500"):
        deal(LABELS, **given)


@pytest.mark.parametrize(
    "given",
    [
        {"parts": 0},
        {"parts": 3, "how": "alike"},
        {"parts": 3, "how": "classes", "classes": 11},
        {"parts": 3, "how": "classes", "classes": 0},
        {"parts": 3, "how": "classes"},
        {"parts": 3, "how": "dirichlet", "alpha": 0.0},
    ],
    ids=["parts", "how", "classes", "no classes", "nobody", "alpha"],
)
def test_what_cannot_be_dealt_is_refused(given: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        deal(LABELS, **given)


def test_labels_are_one_class_a_row() -> None:
    with raises(InputError, Code.CONFIG_INVALID, names=("10", "50")):
        deal(LABELS.reshape(10, -1), 2)
