"""A party's half of the server being away: what is known, what happens and when, and what is
decided.
"""

from __future__ import annotations

import pytest

from tests.harness.errors import raises
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.uplink import ANSWER_S, Loss, SearchStep, ServerAway

CLAIM = control_pb2.Join(run_id="run", generation=3)


def trains(absent_s: float = 60.0, *, averages: bool = False) -> ServerAway:
    """A party that has planned."""
    party = ServerAway(absent_s)
    party.begin()
    party.note_plan(CLAIM, averages=averages)
    return party


def looks(absent_s: float = 60.0) -> ServerAway:
    """A party that has lost the server at 0 s."""
    party = trains(absent_s)
    assert party.note_loss(0.0) is Loss.LOOKS
    return party


@pytest.mark.parametrize(
    ("party", "want"),
    [
        (ServerAway(60.0), Loss.ENDS),
        (trains(0.0), Loss.ENDS),
        (trains(averages=True), Loss.ENDS),
        (trains(), Loss.LOOKS),
        (looks(), Loss.KNOWN),
    ],
    ids=["before the plan", "not asked for", "weights are averaged", "goes on", "looks already"],
)
def test_what_the_loss_of_the_server_means(party: ServerAway, want: Loss) -> None:
    assert party.note_loss(1.0) is want
    assert party.away is (want is not Loss.ENDS)


@pytest.mark.parametrize(
    ("now_s", "connected", "asked_s", "want"),
    [
        (1.0, False, 0.0, SearchStep.CONNECT),
        (59.9, False, 0.0, SearchStep.CONNECT),
        (60.0, False, 0.0, SearchStep.GIVE_UP),
        (60.0, True, 59.0, SearchStep.GIVE_UP),
        (1.0 + ANSWER_S - 0.1, True, 1.0, SearchStep.WAIT),
        (1.0 + ANSWER_S, True, 1.0, SearchStep.DROP),
    ],
)
def test_the_next_step_of_a_search(
    now_s: float, connected: bool, asked_s: float, want: SearchStep
) -> None:
    party = looks()
    party.note_question(asked_s)
    assert party.step(party.search, now_s, connected=connected) is want
    assert party.seconds_left(now_s) == pytest.approx(60.0 - now_s)


def test_a_server_that_does_not_answer_gets_more_time_each_time() -> None:
    party, waits = looks(1e9), []
    for _ in range(3):
        party.note_question(0.0)
        waits.append(
            next(
                now_s
                for now_s in range(1000)
                if party.step(party.search, float(now_s), connected=True) is SearchStep.DROP
            )
        )
    assert waits == [ANSWER_S, 2 * ANSWER_S, 4 * ANSWER_S]
    # Once it has answered, it begins again.
    party.back("run", 3)
    party.note_loss(0.0)
    party.note_question(0.0)
    assert party.step(party.search, ANSWER_S, connected=True) is SearchStep.DROP


@pytest.mark.parametrize("why", ["back", "over", "lost again"])
def test_a_search_ends(why: str) -> None:
    party = looks()
    search = party.search
    if why == "over":
        party.stop_looking()
    else:
        party.back("run", 3)
    if why == "lost again":
        assert party.note_loss(1.0) is Loss.LOOKS
    assert party.step(search, 1.0, connected=False) is SearchStep.STOP
    assert party.looks(party.search) is (why == "lost again")


def test_the_server_that_is_back_hears_the_last_of_each_message() -> None:
    party = trains()
    assert party.says("progress", b"1")
    party.note_loss(0.0)
    assert not party.says("lenient", b"on")
    assert not party.says("progress", b"2")
    assert list(party.back("run", 3) or ()) == [b"2", b"on"]
    assert party.says("progress", b"3")


def test_a_server_that_speaks_of_another_generation_is_not_taken_back() -> None:
    party = looks()
    for run_id, generation in (("run", 4), ("another", 3)):
        with raises(ValueError):
            party.back(run_id, generation)
    assert party.away
    party.stop_looking()
    assert party.back("run", 3) is None


def test_a_report_counts_for_its_generation_alone() -> None:
    party = trains()
    party.says("report", b"done")
    assert party.reported
    party.note_interruption()
    assert not party.reported
    party.says("report", b"done")
    party.begin()
    assert not party.reported
