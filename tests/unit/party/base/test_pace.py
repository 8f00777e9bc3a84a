"""What a step's time is for: the clock, what the server takes of it, and the picture."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from matplotlib.patches import Rectangle

from tests.harness.errors import raises
from tests.unit.lab.test_report import summary_of
from vfl.summary.reading import RunRecord
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.summary import PhaseTimes, Summary
from vfl_lab.report.charts import compute_step_times, draw, draw_step_times
from vfl_party.base import step_timing
from vfl_party.base.step_timing import COMPUTE, DECODE, ENCODE, WAIT, Clock, count_time_as
from vfl_server.control.reports import get_report_facts, is_sound
from vfl_server.control.reports import times_of as reported


class Ticking:
    """A clock's time, which moves by what is asked for."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def pass_(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def time_(monkeypatch: pytest.MonkeyPatch) -> Ticking:
    found = Ticking()
    monkeypatch.setattr(step_timing, "perf_counter", found)
    return found


def test_every_moment_of_a_round_belongs_to_one_part(time_: Ticking) -> None:
    # As if a quarter of the time were a processor's.
    clock = Clock(lambda: time_() / 4)
    # Before the first round: nobody's.
    time_.pass_(7)
    for _ in range(2):
        clock.begin("split")
        time_.pass_(1)
        for what, seconds in ((ENCODE, 2), (WAIT, 3), (DECODE, 4), (COMPUTE, 5)):
            clock.to(what)
            time_.pass_(seconds)
        clock.end("split", 10)
        # Between rounds: a checkpoint, say.
        time_.pass_(50)
    clock.begin("score")
    time_.pass_(1)
    clock.end("score", 0)
    assert clock.times() == [
        PhaseTimes(
            phase="split", steps=20, encode_s=4, wait_s=6, decode_s=8, compute_s=12, cpu_s=7.5
        ),
        PhaseTimes(phase="score", steps=0, compute_s=1, cpu_s=0.25),
    ]


def test_without_a_clock_of_the_processor_all_but_waiting_is_processor_time(time_: Ticking) -> None:
    clock = Clock(used=None)
    clock.begin("split")
    for what, seconds in ((ENCODE, 2), (WAIT, 3), (DECODE, 4), (COMPUTE, 5)):
        clock.to(what)
        time_.pass_(seconds)
    clock.end("split", 1)
    assert [each.cpu_s for each in clock.times()] == [11.0]


def test_a_marked_method_counts_and_its_caller_computes_afterwards(time_: Ticking) -> None:
    class Side:
        def __init__(self) -> None:
            self.clock = Clock(lambda: 0.0)

        @count_time_as(WAIT)
        def receive(self, seconds: float, *, fails: bool = False) -> str:
            time_.pass_(seconds)
            if fails:
                raise ValueError("gone")
            self.clock.to(DECODE)
            time_.pass_(1)
            return "reply"

    side = Side()
    side.clock.begin("split")
    assert side.receive(4) == "reply"
    time_.pass_(2)
    with raises(ValueError):
        side.receive(3, fails=True)
    time_.pass_(2)
    side.clock.end("split", 2)
    assert side.clock.times() == [
        PhaseTimes(phase="split", steps=2, wait_s=7, decode_s=1, compute_s=4)
    ]


def test_the_server_takes_what_can_be_read() -> None:
    times = [PhaseTimes(phase="split", steps=3, wait_s=1.5)]
    report = control_pb2.Report(
        steps=3, times_json=json.dumps([each.model_dump() for each in times])
    )
    assert is_sound(report)
    assert reported(report) == times
    assert get_report_facts(report)["times"] == times
    for text in (
        "{}",
        '[{"steps": 3}]',
        '[{"phase": "x", "wait_s": "long"}]',
        "[" * 1000,
        " " * (2 << 20),
    ):
        assert not is_sound(control_pb2.Report(times_json=text))
    # An older party.
    assert get_report_facts(control_pb2.Report())["times"] == []


def test_summaries_of_older_versions_have_no_times(tmp_path: Path) -> None:
    text = json.loads(summary_of(3).model_dump_json())
    for party in text["parties"]:
        del party["times"]
    summary = Summary.model_validate(text)
    assert [party.times for party in summary.parties] == [[]] * 4
    assert "times.png" not in {path.name for path in draw(RunRecord(tmp_path, summary, ()))}


def test_each_party_has_a_bar_with_its_four_parts(tmp_path: Path) -> None:
    summary = summary_of(3)
    one = PhaseTimes(
        phase="train", steps=10, encode_s=0.1, wait_s=0.5, decode_s=0.05, compute_s=0.35
    )
    parties = [
        each.model_copy(
            update={
                "times": [one, PhaseTimes(phase="score", wait_s=9.0)]
                if each.role != "server"
                else []
            }
        )
        for each in summary.parties
    ]
    summary = summary.model_copy(update={"parties": parties})
    assert compute_step_times(one) == pytest.approx(
        {"compute": 0.035, "encode": 0.01, "wait": 0.05, "decode": 0.005}
    )
    # A phase without steps has no panel.
    (axes,) = draw_step_times(summary, ("train", "score")).axes
    assert axes.get_title(loc="left") == "train"
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        party.name for party in parties if party.role != "server"
    ]
    assert sorted(
        {round(bar.get_width(), 6) for bar in axes.patches if isinstance(bar, Rectangle)}
    ) == [5.0, 10.0, 35.0, 50.0]
    assert "100 ms, 50 % wait, 10 steps" in {text.get_text() for text in axes.texts}
    drawn = {path.name: path for path in draw(RunRecord(tmp_path, summary, ("train",)))}
    assert drawn["times.png"].stat().st_size > 5_000
