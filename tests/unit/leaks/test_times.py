"""What times of messages tell, by hand."""

from __future__ import annotations

import pytest

from vfl_leaks.recording import Passed
from vfl_leaks.wiretap import Times, read_times


def steps(
    answers_s: dict[str, float], *, rounds: int = 3, batches: int = 4, pause_s: float = 0.5
) -> list[Passed]:
    """Returns the messages of split training: each party answers so long after the gradient of the
    step before.
    """
    now, found = 0.0, list[Passed]()
    for round_ in range(rounds):
        for _ in range(batches):
            sent = [(now + taken, name) for name, taken in answers_s.items()]
            found += [
                Passed("splitnn", "embedding", name, "p0", round_, at) for at, name in sorted(sent)
            ]
            now = max(sent)[0] + 0.01
            found += [Passed("splitnn", "embedding", "p0", name, round_, now) for name in answers_s]
        now += pause_s
        found = [
            *found,
            *[Passed("splitnn", "validation", "p0", name, round_, now) for name in answers_s],
        ]
    return found


def of(found: list[Times], sender: str, exchange: str = "embedding") -> Times:
    (line,) = [each for each in found if (each.sender, each.exchange) == (sender, exchange)]
    return line


def test_gaps_pauses_and_the_slower_party() -> None:
    found = read_times(steps({"p1": 0.02, "p2": 0.1}), {"splitnn": 3})
    fast, slow = of(found, "p1"), of(found, "p2")
    assert fast.messages == slow.messages == 12
    assert slow.gap_s == pytest.approx(0.11)
    assert slow.gap_high_s == pytest.approx(0.61)
    assert slow.tells == (
        "a pause of 610 ms at the end of a round, 6 x a usual gap (AUC 1.00); "
        "slower than others: it answers after 100 ms, others after 20 ms"
    )
    assert fast.tells == "a pause of 610 ms at the end of a round, 6 x a usual gap (AUC 1.00)"


def test_no_pause_and_an_early_end() -> None:
    found = read_times(steps({"p1": 0.02}, pause_s=0.0), {"splitnn": 10})
    assert (
        of(found, "p1").tells
        == "no clear pause at the ends of rounds; 3 of 10 rounds: it ended early"
    )


def test_messages_that_are_alone_have_no_gap() -> None:
    assert read_times([Passed("splitnn", "stop", "p1", "p0", 0, 1.0)], {}) == []
