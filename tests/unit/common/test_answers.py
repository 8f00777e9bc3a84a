"""What a server says when a generation begins becomes names of folders, and words for people."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.errors import raises
from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.uplink import check_start


@pytest.mark.parametrize(
    "said",
    [
        {"run_id": "../up"},
        {"checkpoint": "a/b"},
        {"left": ["p1\nerror: a line of its own"]},
        {"shown": {"p1\x1b[31m": ""}},
        {"shown": {"": ""}},
    ],
    ids=["run", "checkpoint", "left", "shown", "nobody"],
)
def test_a_server_may_not_give_any_name(said: dict[str, Any]) -> None:
    good = control_pb2.Start(run_id="run", generation=1, left=["p2"], shown={"p1": "{"})
    assert check_start(good, server="server", me="p1", oldest=1, newest=9).shown == {"p1": "{"}
    start = control_pb2.Start(**{"run_id": "run", "generation": 1, **said})
    with raises(PeerError, Code.MALFORMED_MESSAGE):
        check_start(start, server="server", me="p1", oldest=1, newest=9)
