"""Text and JSON for people and programs, whatever peers put into them."""

from __future__ import annotations

import json
import math

import pytest

from tests.harness.present import present
from vfl.simulation.live import Track
from vfl.summary.rounds import parse_round
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.summary import ByteCount, Bytes, PartySummary, Summary
from vfl_common.text import clean, number, to_json
from vfl_server.control.reports import metrics_of

EVIL = "cpu\x1b[2J\r\nerror: \x9bforged\u202e"


def summary(loss: float) -> Summary:
    return Summary(
        run_id="r1",
        name="case",
        job="train",
        method="splitnn",
        preset="",
        seed=7,
        recipe_digest="0",
        metrics={"test": {"loss\x1b[31m": loss}},
        bytes=Bytes(total=ByteCount(), by_phase={}, by_link=[], tcp=[], agrees=True),
        parties=[PartySummary(name="p1", role="passive", pid=1, device=EVIL, device_name=EVIL)],
        steps=1,
        wall_s=0.5,
    )


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is no JSON")


def test_a_peer_s_words_are_one_line_of_printable_characters() -> None:
    assert clean(EVIL) == "cpu [2J  error:  forged"
    assert clean("x" * 600, 10) == "x" * 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_json_is_null(value: float) -> None:
    text = to_json({"a": [value, 1.5, {"b": (value, "NaN")}]}, compact=True)
    assert text == '{"a":[null,1.5,{"b":[null,"NaN"]}]}'


def test_a_summary_is_json_and_printable() -> None:
    """What a summary holds is the same wherever it comes from: made here, or read from a file that
    a peer wrote.
    """
    text = summary(math.nan).model_dump_json()
    assert json.loads(text, parse_constant=refuse)["metrics"] == {"test": {"loss [31m": None}}
    assert "\\u001b" not in text
    old = text.replace('[31m":null', '[31m":NaN').replace("cpu [2J", "cpu\\u001b[2J")
    for written in (text, old):
        read = Summary.model_validate_json(written)
        assert math.isnan(read.metrics["test"]["loss [31m"])
        assert "\x1b" not in read.parties[0].device + read.parties[0].device_name


def test_null_is_read_as_nan() -> None:
    assert math.isnan(number(None))
    line = {
        "generation": 1,
        "phase": "a",
        "round": 1,
        "steps": 2,
        "seconds": 0.5,
        "sent_bytes": 1,
        "received_bytes": 2,
    }
    found = present(
        parse_round(to_json(line | {"metrics": {"train": {"loss": math.nan}}}).encode(), 0.0)
    )
    assert math.isnan(found.metrics["train"]["loss"])
    told = present(
        metrics_of(control_pb2.Report(metrics_json=to_json({"test": {"loss": math.nan}})))
    )
    assert math.isnan(told["test"]["loss"])
    track = Track()
    track.update(
        {"event": "progress", "phase": "a", "round": 1, "metrics": {"train loss": None}}, 0.0
    )
    assert "train loss nan" in track.text(1.0)
