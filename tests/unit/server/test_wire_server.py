"""What the server averages goes through codecs: it reads, averages, writes, and compares what the
parties declare.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.errors import raises
from tests.harness.hostile import aggregation
from tests.harness.present import present
from vfl_common.bundle import Bundle, Kind, StepKey
from vfl_common.errors import Code, PeerError
from vfl_common.packing import bundles
from vfl_common.packing.coders import PLAIN, Coding
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.messages import make_plan_message
from vfl_common.stages import Draw
from vfl_party.outbound.exchange import to_bundle, to_tensors
from vfl_server.aggregation import average
from vfl_server.control.admission import agree_on_plans, parse_declarations

CPU = torch.device("cpu")
STEP = StepKey("splitnn", 2, 5)
PLAN = replace(
    aggregation("first", 3, w=(9, 7), b=(1,)),
    up=Coding("bits", 4, True, 7),
    down=Coding("bits", 8, True, 8),
)
PHASES = ("first",)


def sent_by(party: str, w: torch.Tensor) -> Bundle:
    given = to_bundle(Kind.WEIGHTS, {"w": w, "b": torch.ones(1)})
    return bundles.encode(present(PLAN.up.coder), given, PLAN.up.seed, party, STEP)


def test_the_server_reads_averages_and_writes() -> None:
    w = {party: torch.randn(9, 7) for party in ("p0", "p1")}
    found = average({party: sent_by(party, each) for party, each in w.items()}, STEP, PLAN)
    assert list(found.tensors) == ["w.packed", "w.low", "w.scale", "b"]
    up, down = PLAN.up.coder, PLAN.down.coder
    assert up is not None
    read = [
        up.decode(up.encode(each.numpy(), bundles.derive_seed(7, party, STEP, "w")), (9, 7))
        for party, each in w.items()
    ]
    want = present(down).encode(
        (read[0] + read[1]) / np.float32(2), bundles.derive_seed(8, "server", STEP, "w")
    )
    got = to_tensors(found, CPU)
    assert all(np.array_equal(got[f"w.{name}"].numpy(), each) for name, each in want.items())
    assert got["b"].tolist() == [1.0]
    assert found.payload_bytes == 9 * (7 + 8) + 4


def test_the_server_checks_what_a_stranger_sends() -> None:
    good = sent_by("p0", torch.randn(9, 7))
    tensors = to_tensors(sent_by("p1", torch.randn(9, 7)), CPU)
    tensors["w.scale"] = -tensors["w.scale"]
    bad = to_bundle(Kind.WEIGHTS, tensors)
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1", party="p1"):
        average({"p0": good, "p1": bad}, STEP, PLAN)


DRAW = Draw(2, 3, 2**63 - 1)


def test_a_plan_carries_who_takes_part() -> None:
    drawn = replace(PLAN, draw=DRAW)
    (found,) = parse_declarations(make_plan_message([drawn]).plan, PHASES, "p1")
    assert found.draw == DRAW
    assert agree_on_plans({"bank": [drawn], "shop": [drawn]}, PHASES) == (drawn,)
    with raises(PeerError, Code.MODELS_DIFFER, names=("bank", "shop")):
        agree_on_plans(
            {"bank": [drawn], "shop": [replace(PLAN, draw=replace(DRAW, seed=1))]}, PHASES
        )
    with raises(PeerError, Code.MODELS_DIFFER, names=("bank", "shop")):
        agree_on_plans({"bank": [drawn], "shop": [PLAN]}, PHASES)


@pytest.mark.parametrize("wrong", [Draw(0, 1, 1), Draw(1, 0, 1)], ids=["nobody", "no round"])
def test_a_draw_of_nobody_is_refused(wrong: Draw) -> None:
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        parse_declarations(make_plan_message([replace(PLAN, draw=wrong)]).plan, PHASES, "p1")


def test_a_draw_is_anew_every_so_many_rounds_and_takes_each_party_as_often() -> None:
    parties = [f"p{number}" for number in range(10)]
    turns = [DRAW.of(round_, parties) for round_ in range(0, 3000, 3)]
    assert all(len(turn) == 2 and [*turn] == sorted(turn) for turn in turns)
    assert DRAW.of(3, parties) == DRAW.of(4, parties) == DRAW.of(5, parties)
    times = [sum(party in turn for turn in turns) for party in parties]
    assert 150 < min(times) <= max(times) < 250
    plan = replace(PLAN, draw=DRAW)
    assert plan.givers(2, parties) == turns[0]
    assert plan.takers(0, parties) == turns[0]
    assert plan.takers(plan.rounds - 1, parties) == tuple(parties)
    assert PLAN.givers(0, parties) == PLAN.takers(0, parties) == tuple(parties)


def test_a_plan_carries_its_codecs() -> None:
    for each in (
        PLAN,
        replace(PLAN, up=Coding("float16"), down=PLAIN),
        aggregation("first", 3, w=(2,)),
    ):
        (found,) = parse_declarations(make_plan_message([each]).plan, PHASES, "p1")
        assert (found.up, found.down) == (each.up, each.down)
        assert found.sent.payload_bytes == each.sent.payload_bytes
    with raises(PeerError, Code.MODELS_DIFFER, names=("bank", "shop")):
        agree_on_plans({"bank": [PLAN], "shop": [replace(PLAN, down=PLAIN)]}, PHASES)


@pytest.mark.parametrize(
    "said",
    [
        {"name": "topk"},
        {"name": "bits"},
        {"name": "bits", "bits": 3},
        {"bits": 4},
        {"name": "float16", "bits": 8},
    ],
)
def test_a_plan_with_an_unknown_codec_is_refused(said: dict[str, Any]) -> None:
    message = make_plan_message([aggregation("first", 3, w=(2,))]).plan
    message.aggregations[0].up.CopyFrom(control_pb2.Coding(**said))
    with raises(PeerError, Code.MALFORMED_MESSAGE, names="p1"):
        parse_declarations(message, PHASES, "p1")
