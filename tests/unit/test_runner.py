"""From which labels a party need not go back."""

from __future__ import annotations

import pytest

from vfl_common.runner import MOST_OFFERED, Planned, reachable

PLAN = [Planned("train", 2, False), Planned("one", 3, True), Planned("two", 4, True), Planned("end", 1, False)]


@pytest.mark.parametrize(
    ("label", "want"),
    [
        ("000001.train.1", []),
        ("000002.train.2", []),
        ("000003.one.1", ["000002.train.2"]),
        ("000005.one.3", ["000004.one.2", "000003.one.1", "000002.train.2"]),
        ("000006.two.1", ["000005.one.3", "000004.one.2", "000003.one.1", "000002.train.2"]),
        ("000010.end.1", []),
        ("000003.other.1", []),
    ],
)
def test_a_party_that_was_alone_offers_the_rounds_that_it_has_done(label: str, want: list[str]) -> None:
    assert reachable(label, PLAN) == want


def test_alone_from_the_beginning() -> None:
    assert reachable("000002.one.2", PLAN[1:]) == ["000001.one.1", ""]
    assert len(reachable("100000.one.100000", [Planned("one", 100_000, True)])) == MOST_OFFERED
