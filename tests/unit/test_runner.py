"""From which labels a party need not go back."""

from __future__ import annotations

import pytest

from vfl_common.stages import MOST_OFFERED, Planned, ahead, alone_after, reachable

PLAN = [Planned("train", 2, None), Planned("one", 3, 0), Planned("two", 4, 0), Planned("end", 1, None)]
SENDS = [Planned("local", 3, 0), Planned("head", 2, 1, (0,)), Planned("more", 2, None, (0, 1))]
ONCE = [Planned("local", 3, 0), Planned("head", 4, 1), Planned("more", 2, 0)]


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
    assert len(reachable("100000.one.100000", [Planned("one", 100_000, 0)])) == MOST_OFFERED


def test_alone_from_the_second_round_on() -> None:
    assert reachable("000007.head.4", ONCE) == ["000006.head.3", "000005.head.2", "000004.head.1"]
    assert reachable("000004.head.1", ONCE) == []
    assert reachable("000008.more.1", ONCE)[-2:] == ["000005.head.2", "000004.head.1"]


@pytest.mark.parametrize(
    ("label", "plan", "want"),
    [
        ("000004.head.1", ONCE, True),
        ("000009.more.2", ONCE, True),
        ("000003.local.3", ONCE, False),
        ("", ONCE, False),
        ("", ONCE[:1], True),
        ("000009.two.4", PLAN, False),
        ("", [], False),
    ],
)
def test_whether_the_others_are_needed(label: str, plan: list[Planned], want: bool) -> None:
    assert alone_after(label, plan) is want


@pytest.mark.parametrize(
    ("label", "want"),
    [
        ("000002.local.2", []),
        ("000003.local.3", ["000004.head.1"]),
        ("000003.local.1", ["000004.head.1"]),  # it ended early
        ("000004.head.1", []),
        ("000005.head.2", ["000006.more.1", "000007.more.2"]),
        ("000007.more.2", []),
    ],
)
def test_a_party_that_is_behind_skips_what_would_leave_it_as_it_was(label: str, want: list[str]) -> None:
    assert ahead(label, SENDS) == want
    assert ahead(label, ONCE) == []
