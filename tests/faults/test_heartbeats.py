"""Heartbeats leave a party while HEU encrypts or adds up, although no other thread runs during one
of its calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.contract.exchanges import keyring
from tests.harness.waiting import wait_until
from vfl_common.bundle import Ledger
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.channel import Context, Handler, run_server, stream_handler
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.messages import Joining, Start
from vfl_common.rpc.session import Session
from vfl_common.rpc.uplink import SERVICE
from vfl_party.homomorphic import bucket_sums, has_heu, heu, make_adder, make_keys

ROWS, COLUMNS, BITS = 8_000, 60, 1024


class Counting:
    """A server that starts a run with one party, and counts what it hears from then on."""

    heard = 0

    def handler(self) -> Handler:
        return stream_handler(SERVICE, Session=self._session)

    def _session(self, requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        yield control_pb2.ServerMessage(
            start=control_pb2.Start(run_id="run", generation=1)
        ).SerializeToString()
        for _ in requests:
            self.heard += 1


@pytest.mark.skipif(not has_heu(), reason="HEU is not installed")
def test_heartbeats_arrive_while_a_party_encrypts_and_adds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each work takes half a second or so. In one piece, it would let one heartbeat arrive at most:
    tried.
    """
    monkeypatch.setattr(heu, "SECONDS", 0.02)
    keys, public = make_keys("paillier", BITS, with_heu=True)
    adds = make_adder("paillier", BITS, public)
    g = np.arange(ROWS)
    codes = np.random.default_rng(0).integers(0, 8, size=(ROWS, COLUMNS)).astype(np.int8)
    held = adds.load(keys.encrypt(g, g))
    works: dict[str, Callable[[], object]] = {
        "encrypt": lambda: keys.encrypt(g, g),
        "add": lambda: bucket_sums(adds, held, g, codes, 8),
    }
    server, arrived = Counting(), dict[str, int]()
    with run_server("127.0.0.1:0", keyring("server"), [server], 4) as (_, address):
        session = Session(
            address, keyring("p1"), "server", Ledger(), TcpMeter(), heartbeat_s=0.01, wait_s=10.0
        )
        try:
            assert isinstance(session.join(Joining("passive", "{}", "train", 1, "cpu")), Start)
            wait_until(lambda: server.heard > 0)
            for name, work in works.items():
                before = server.heard
                work()
                arrived[name] = server.heard - before
        finally:
            session.close()
    assert min(arrived.values()) >= 3, arrived
