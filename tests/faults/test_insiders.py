"""A party that turns hostile loses its own part, and nothing of the others."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from tests.contract.exchanges import keyring
from tests.harness.cases import digits, recipe
from tests.harness.federation import Federation
from tests.harness.hostile import HostilePassive
from tests.integration.test_resume import (
    DATA,
    EPOCH_BYTES,
    SECOND_EPOCH,
    Parameters,
    assert_equal,
    held,
    parameters,
)
from tests.integration.test_resume import recipe as resumed
from vfl_common.bundle import Buffer, Bundle, DType, Kind, StepKey
from vfl_common.errors import Code, InputError, InterruptedRun, PeerError
from vfl_common.ledger import Ledger
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.channel import MAX_MESSAGE_BYTES, Context, Handler, dial, listening, stream_handler
from vfl_common.rpc.hub import ExchangeHub, Stream
from vfl_common.rpc.session import SERVICE, Done, Joining, Session, Start
from vfl_common.rpc.tcp import TcpMeter
from vfl_common.wire.frames import encode, parse_frame
from vfl_server.control.service import MAX_SESSIONS

WAIT_S = 20.0
SESSIONS = 30  # more than a server of two parties has threads


def test_sessions_of_one_party_keep_nobody_out_and_all_end(tmp_path: Path) -> None:
    with Federation(tmp_path / "f", recipe(2), digits(2)) as federation:
        server = federation.start_server()
        with HostilePassive(federation, "p1") as hostile:
            ended = threading.Event()
            with dial(federation.address, hostile._keyring.current(), "server") as channel:
                method = channel.stream_stream(f"/{SERVICE}/Session")
                calls = [method(_silence(ended)) for _ in range(SESSIONS)]
                answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
                for call in calls:
                    threading.Thread(target=_first_answer, args=[call, answers], daemon=True).start()
                for _ in range(SESSIONS - MAX_SESSIONS):
                    stop = control_pb2.ServerMessage.FromString(answers.get(timeout=WAIT_S)).stop
                    assert (stop.code, stop.party) == (int(Code.NAME_TAKEN), "p1")
                federation.start_party("p0")
                server.wait_for("joined", WAIT_S, party="p0")  # while the other sessions are held
                for call in calls:
                    call.cancel()
            ended.set()
        federation.start_party("p1")
        federation.finish()  # the server ends by itself


def _silence(ended: threading.Event) -> Iterator[bytes]:
    """Requests that never come."""
    ended.wait(60.0)
    yield from ()


def _first_answer(call: Iterator[bytes], answers: queue.SimpleQueue[bytes]) -> None:
    with contextlib.suppress(grpc.RpcError, StopIteration):
        answers.put(next(call))


def test_unread_frames_of_one_party_are_bounded_over_all_its_streams() -> None:
    """Nobody collects; the party opens one stream after the other and fills each."""
    hub = ExchangeHub("run", 1, ["north"], Ledger(), timeout_s=WAIT_S)
    bundle = Bundle(Kind.WEIGHTS, {"w": Buffer(DType.UINT8, (40,), memoryview(bytes(40)))})
    frames = [parse_frame(each.data, party="north") for each in encode(StepKey("train", 0, 0), bundle, frame_bytes=1)]

    def fill(stream: Stream) -> None:
        for frame in frames:
            hub.deliver(stream, frame)

    threads = []
    for _ in range(3):
        threads.append(threading.Thread(target=fill, args=[hub.open("north")]))
        threads[-1].start()
        give_up_s = time.monotonic() + 0.5
        while hub._events.qsize() <= 16 and time.monotonic() < give_up_s:
            time.sleep(0.005)
    assert hub._events.qsize() == 16
    hub.end(InterruptedRun("the test is over"))
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Parameters:
    with Federation(tmp_path_factory.mktemp("undisturbed"), resumed(), DATA) as federation:
        federation.start_all()
        federation.finish()
        return parameters(federation)


def test_a_party_that_joins_without_checkpoints_takes_nobody_back(tmp_path: Path, undisturbed: Parameters) -> None:
    """In the fourth epoch p2 is started with another folder of runs; then with its own again."""
    with held(tmp_path, resumed(), sent=SECOND_EPOCH + 2 * EPOCH_BYTES) as (federation, proxy):
        federation.wait_for_checkpoint("000003.splitnn.3")
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        extra = federation.extra["p2"]
        federation.extra["p2"] = extra | {"out": "elsewhere"}
        stranger = federation.start_party("p2")
        assert stranger.wait(60.0) == 2
        assert "p2 cannot resume run" in stranger.stderr
        federation.extra["p2"] = extra
        federation.start_party("p2")
        assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), undisturbed)


class OddServer:
    """Answers every session with the same messages, and ends it."""

    def __init__(self, *answers: bytes) -> None:
        self._answers, self.sessions = answers, 0

    def handler(self) -> Handler:
        return stream_handler(SERVICE, "Session", self._session)

    def _session(self, requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        self.sessions += 1
        yield from self._answers

    def join(self) -> Start | Done:
        with listening("127.0.0.1:0", keyring("server"), [self], 4) as (_, address):
            session = Session(address, keyring("p1"), "server", Ledger(), TcpMeter(), heartbeat_s=0.5, wait_s=2.0)
            try:
                return session.join(Joining("passive", "{}", "train", 1, "cpu"))
            finally:
                session.close()


def test_a_server_that_ends_every_session_is_given_up() -> None:
    server = OddServer()
    with pytest.raises(InputError, match="server ends every session at once, and has done so for 2 s"):
        server.join()
    assert 2 <= server.sessions <= 8  # with a pause between them


def test_a_server_that_says_too_much_is_asked_once() -> None:
    server = OddServer(bytes(MAX_MESSAGE_BYTES + 1))
    with pytest.raises(PeerError, match="server sent a message of more than 4 MiB"):
        server.join()
    assert server.sessions == 1


class Restarted(OddServer):
    """Has a party wait, dies after longer than a party looks for a server, and is there again."""

    def _session(self, requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        self.sessions += 1
        if self.sessions == 1:
            waiting = control_pb2.Waiting(missing=["p2"], deadline_s=900.0)
            yield control_pb2.ServerMessage(waiting=waiting).SerializeToString()
            threading.Event().wait(2.5)  # the party's wait_s is 2
        else:
            start = control_pb2.Start(run_id="run", generation=2)
            yield control_pb2.ServerMessage(start=start).SerializeToString()


def test_a_server_that_dies_while_a_party_waits_for_others_is_looked_for() -> None:
    server = Restarted()
    assert isinstance(server.join(), Start)
    assert server.sessions == 2
