"""A party that lets questions pass is not waited for until it answers one in time."""

from __future__ import annotations

from vfl_common.rpc.serving.stream import MAX_LATE, AnswerPatience


def passed_over() -> AnswerPatience:
    """Returns the patience with a party that has just let so many questions pass."""
    found = AnswerPatience()
    assert [found.note_late(number, 0) for number in range(MAX_LATE)] == [False, False, True]
    assert not found.waits
    return found


def test_a_probe_that_is_answered_in_time_ends_it() -> None:
    patience = passed_over()
    assert patience.probes(7, 10.0, 11.0)
    assert not patience.probes(8, 10.5, 11.5)
    assert patience.note_answer(7, 10.9, waited_for=False)
    assert patience.waits
    assert not patience.note_answer(8, 11.0, waited_for=True)
    # From here on it counts from the beginning.
    assert not patience.note_late(12.0, 0)
    assert patience.waits


def test_a_party_that_answers_only_probes_makes_ever_fewer_questions_wait() -> None:
    patience, waited = passed_over(), []
    for number in range(1, 201):
        now_s = float(number)
        if patience.waits:
            waited.append(number)
            assert patience.note_late(now_s, 0)
            continue
        assert patience.probes(number, now_s, now_s + 0.5)
        patience.note_answer(number, now_s + 0.1, waited_for=False)
    # After 1 probe, then 2, 4, 8, 16, 32, 64.
    assert waited == [2, 5, 10, 19, 36, 69, 134, 199]
    # One question in time, and it is trusted again.
    assert patience.probes(300, 300.0, 301.0)
    for number in range(300, 364):
        patience.probes(number, float(number), number + 0.5)
        patience.note_answer(number, number + 0.1, waited_for=False)
    patience.note_answer(400, 400.0, waited_for=True)
    assert [patience.note_late(number, 0) for number in (401.0, 402.0, 403.0)] == [
        False,
        False,
        True,
    ]


def test_a_late_answer_ends_nothing_and_lets_another_probe_go() -> None:
    patience = passed_over()
    assert patience.probes(7, 10.0, 11.0)
    assert not patience.note_answer(3, 10.1, waited_for=False)
    assert patience.probes(8, 10.2, 11.2)
    # In time for the one before.
    assert not patience.note_answer(7, 10.3, waited_for=False)
    assert patience.probes(9, 10.4, 11.4)
    assert not patience.note_answer(9, 11.5, waited_for=False)
    assert not patience.waits


def test_a_probe_without_an_answer_is_followed_by_another() -> None:
    patience = passed_over()
    assert patience.probes(7, 10.0, 11.0)
    assert not patience.probes(8, 10.9, 11.9)
    assert patience.probes(9, 11.0, 12.0)


def test_questions_that_wait_count_if_it_has_answered_none_since() -> None:
    patience = AnswerPatience()
    assert patience.note_late(1.0, MAX_LATE - 1)
    assert not patience.waits
    patience = AnswerPatience()
    # It answers others, and one takes it long.
    assert not patience.note_answer(2, 1.5, waited_for=True)
    assert not patience.note_late(1.0, 100)
    assert patience.waits


def test_answers_between_begin_the_count_again() -> None:
    patience = AnswerPatience()
    for number in range(10 * MAX_LATE):
        assert not patience.note_late(float(number), 0)
        assert not patience.note_answer(number, number + 0.5, waited_for=True)
    assert patience.waits
