"""A party that turns hostile loses its own part, and nothing of the others."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import grpc
import pytest

from tests.contract.exchanges import keyring
from tests.harness.cases import digits, recipe
from tests.harness.errors import assert_names, raises
from tests.harness.federation import Federation, refused
from tests.harness.hostile import HostilePassive, first_answer
from tests.harness.waiting import wait_until
from tests.integration.test_resume import (
    EPOCH_BYTES,
    SECOND_EPOCH,
    Parameters,
    assert_equal,
    held,
    parameters,
    undisturbed,
)
from tests.integration.test_resume import recipe as resumed
from vfl_common.bundle import Buffer, Bundle, DType, Kind, Ledger, StepKey
from vfl_common.errors import Code, InputError, InterruptedRun, LostError, PeerError, VflError
from vfl_common.frames import encode, parse_frame
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.rpc.ask import MAX_QUESTIONS, make_ask_method
from vfl_common.rpc.channel import (
    MAX_MESSAGE_BYTES,
    Context,
    Handler,
    dial,
    run_server,
    stream_handler,
)
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.exchange.service import FramePipe, FrameStream
from vfl_common.rpc.health import MAX_CHECKS
from vfl_common.rpc.messages import Done, Joining, PartyReport, ProgressUpdate, Start, to_failure
from vfl_common.rpc.session import Session
from vfl_common.rpc.uplink import SERVICE
from vfl_server.control.service import MAX_SESSIONS

# A fixture.
__all__ = ["undisturbed"]
WAIT_S = 20.0
# More than a server of two parties has threads.
SESSIONS = 30


def test_sessions_of_one_party_keep_nobody_out_and_all_end(tmp_path: Path) -> None:
    with Federation(tmp_path / "f", recipe(2), digits(2)) as federation:
        server = federation.start_server()
        with HostilePassive(federation, "p1") as hostile:
            ended = threading.Event()
            with hostile.dial(federation.address, "server") as channel:
                method = channel.stream_stream(f"/{SERVICE}/Session")
                calls = [method(_silence(ended)) for _ in range(SESSIONS)]
                answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
                for call in calls:
                    threading.Thread(target=first_answer, args=[call, answers], daemon=True).start()
                for _ in range(SESSIONS - MAX_SESSIONS):
                    stop = control_pb2.ServerMessage.FromString(answers.get(timeout=WAIT_S)).stop
                    assert (stop.code, stop.party) == (int(Code.NAME_TAKEN), "p1")
                federation.start_party("p0")
                # While the other sessions are held.
                server.wait_for("joined", WAIT_S, party="p0")
                for call in calls:
                    call.cancel()
            ended.set()
        federation.start_party("p1")
        # The server ends by itself.
        federation.finish()


@pytest.mark.parametrize("asks", [f"/{SERVICE}/Ask", "/grpc.health.v1.Health/Check"])
def test_questions_that_never_come_keep_nobody_out(asks: str, tmp_path: Path) -> None:
    """A thread of the server waits for each message; a party gets few of them."""
    with Federation(tmp_path / "f", recipe(2), digits(2)) as federation:
        server = federation.start_server()
        with HostilePassive(federation, "p1") as hostile:
            ended = threading.Event()
            with hostile.dial(federation.address, "server") as channel:
                calls = [channel.stream_stream(asks)(_silence(ended)) for _ in range(2 * SESSIONS)]
                answered: queue.SimpleQueue[object] = queue.SimpleQueue()
                for call in calls:
                    threading.Thread(target=_ended, args=[call, answered], daemon=True).start()
                for _ in range(2 * SESSIONS - MAX_CHECKS):
                    # The others are refused at once.
                    answered.get(timeout=WAIT_S)
                federation.start_party("p0")
                server.wait_for("joined", WAIT_S, party="p0")
                for call in calls:
                    call.cancel()
            ended.set()
        federation.start_party("p1")
        federation.finish()


def test_of_a_question_that_is_refused_nothing_is_read() -> None:
    ended, read = threading.Event(), queue.SimpleQueue[str]()

    def judge(name: str, _join: control_pb2.Join) -> None:
        read.put(name)
        ended.wait(WAIT_S)

    def place(name: str) -> None:
        if name != "north":
            raise PeerError(Code.NOT_IN_RECIPE, f"{name} is nobody", party=name)

    class Asked:
        def handler(self) -> Handler:
            return stream_handler(SERVICE, Ask=make_ask_method(keyring("active"), place, judge))

    with (
        run_server("127.0.0.1:0", keyring("active"), [Asked()], 8) as (_, address),
        dial(address, keyring("north").current(), "active") as north,
        dial(address, keyring("stranger").current(), "active") as stranger,
    ):
        asks = f"/{SERVICE}/Ask"
        held = [north.unary_unary(asks).future(b"") for _ in range(MAX_QUESTIONS)]
        for _ in held:
            assert read.get(timeout=WAIT_S) == "north"
        for channel, code in ((north, Code.NAME_TAKEN), (stranger, Code.NOT_IN_RECIPE)):
            # Before any message has come.
            answer = next(channel.stream_stream(asks)(_silence(ended), timeout=WAIT_S))
            assert failure_pb2.Failure.FromString(answer).code == int(code)
        ended.set()
        assert [each.result(WAIT_S) for each in held] == [b""] * MAX_QUESTIONS
        assert north.unary_unary(asks)(b"", timeout=WAIT_S) == b""


def _ended(call: Iterator[bytes], answered: queue.SimpleQueue[object]) -> None:
    with contextlib.suppress(grpc.RpcError):
        list(call)
    answered.put(None)


def _silence(ended: threading.Event) -> Iterator[bytes]:
    """Requests that never come."""
    ended.wait(60.0)
    yield from ()


def test_unread_frames_of_one_party_are_bounded_over_all_its_streams() -> None:
    """Nobody collects; the party opens one stream after the other and fills each."""
    pipe = FramePipe("run", 1, ["north"])
    bundle = Bundle(Kind.WEIGHTS, {"w": Buffer(DType.UINT8, (40,), memoryview(bytes(40)))})
    frames = [
        parse_frame(each.data, party="north")
        for each in encode(StepKey("train", 0, 0), bundle, frame_bytes=1)
    ]

    def fill(stream: FrameStream) -> None:
        for frame in frames:
            pipe.deliver(stream, frame)

    threads = []
    for _ in range(3):
        threads.append(threading.Thread(target=fill, args=[pipe.open("north")]))
        threads[-1].start()
        give_up_s = time.monotonic() + 0.5
        while pipe.waiting <= 16 and time.monotonic() < give_up_s:
            time.sleep(0.005)
    assert pipe.waiting == 16
    pipe.end(InterruptedRun("the test is over"))
    for thread in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()


def test_a_party_that_joins_without_checkpoints_takes_nobody_back(
    tmp_path: Path, undisturbed: Parameters
) -> None:
    """In the fourth epoch p2 is started with another folder of runs; then with its own again."""
    with held(tmp_path, resumed(), sent=SECOND_EPOCH + 2 * EPOCH_BYTES) as (federation, proxy):
        federation.wait_for_checkpoint("000003.splitnn.3")
        federation.programs["p2"].kill()
        federation.programs["server"].wait_for("interrupted")
        proxy.release()
        extra = federation.extra["p2"]
        federation.extra["p2"] = extra | {"out": "elsewhere"}
        stranger = federation.start_party("p2")
        refused(stranger, "p2")
        federation.extra["p2"] = extra
        federation.start_party("p2")
        assert federation.finish()["interruptions"] == 1
        assert_equal(parameters(federation), undisturbed)


class OddServer:
    """Answers every session with the same messages, and ends it."""

    def __init__(self, *answers: bytes) -> None:
        self._answers, self.sessions = answers, 0

    def handler(self) -> Handler:
        return stream_handler(SERVICE, Session=self._session)

    def _session(self, requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        self.sessions += 1
        yield from self._answers

    def join(self, on_waiting: Callable[[Session], None] = lambda _session: None) -> Start | Done:
        with run_server("127.0.0.1:0", keyring("server"), [self], 4) as (_, address):
            session = Session(
                address, keyring("p1"), "server", Ledger(), TcpMeter(), heartbeat_s=0.5, wait_s=2.0
            )
            session.on_waiting = lambda *_: on_waiting(session)
            try:
                return session.join(Joining("passive", "{}", "train", 1, "cpu"))
            finally:
                session.close()


def test_a_server_that_ends_every_session_is_given_up() -> None:
    server = OddServer()
    with raises(InputError, Code.UNREACHABLE):
        server.join()
    # With a pause between them.
    assert 2 <= server.sessions <= 8


def test_a_server_that_says_too_much_is_asked_once() -> None:
    server = OddServer(bytes(MAX_MESSAGE_BYTES + 1))
    with raises(PeerError, Code.MALFORMED_MESSAGE):
        server.join()
    assert server.sessions == 1


def test_a_server_that_sends_faster_than_a_party_reads_is_given_up() -> None:
    # 1 MB.
    waiting = control_pb2.Waiting(missing=["p2" * 500] * 1_000, deadline_s=900.0)
    server = OddServer(*[control_pb2.ServerMessage(waiting=waiting).SerializeToString()] * 12)

    def until_all_is_said(session: Session) -> None:
        assert session._uplink.reader is not None
        session._uplink.reader.join(20.0)
        assert not session._uplink.reader.is_alive()

    with raises(PeerError, Code.MALFORMED_MESSAGE) as caught:
        server.join(until_all_is_said)
    assert (caught.value.code, server.sessions) == (Code.MALFORMED_MESSAGE, 1)


class Restarted(OddServer):
    """Has a party wait, dies after longer than a party looks for a server, and is there again."""

    def _session(self, requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        self.sessions += 1
        if self.sessions == 1:
            waiting = control_pb2.Waiting(missing=["p2"], deadline_s=900.0)
            yield control_pb2.ServerMessage(waiting=waiting).SerializeToString()
            # The party's wait_s is 2.
            threading.Event().wait(2.5)
        else:
            start = control_pb2.Start(run_id="run", generation=2)
            yield control_pb2.ServerMessage(start=start).SerializeToString()


def test_a_server_that_dies_while_a_party_waits_for_others_is_looked_for() -> None:
    server = Restarted()
    assert isinstance(server.join(), Start)
    assert server.sessions == 2


class Refusing(OddServer):
    """Starts a generation, ends it, and refuses the party: at once, or when it joins again."""

    def __init__(self, *, at_once: bool) -> None:
        refusal = PeerError(
            Code.CERTIFICATE_INVALID, "the certificate of p1 is revoked", party="p1"
        )
        interrupt = control_pb2.Interrupt(generation=1, reason="p0 was stopped")
        messages = (
            control_pb2.ServerMessage(interrupt=interrupt),
            control_pb2.ServerMessage(stop=to_failure(refusal)),
        )
        super().__init__(*(message.SerializeToString() for message in messages))
        self._at_once = at_once

    def _session(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        next(requests)
        self.sessions += 1
        yield control_pb2.ServerMessage(
            start=control_pb2.Start(run_id="run", generation=1)
        ).SerializeToString()
        if not self._at_once:
            next(requests)
        yield from self._answers


@pytest.mark.parametrize("at_once", [False, True])
def test_a_refusal_that_follows_an_interruption_is_heard_once(
    at_once: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A party that is slow to read must not take the end of its session for the server's death, and
    ask again.
    """
    server = Refusing(at_once=at_once)
    with run_server("127.0.0.1:0", keyring("server"), [server], 4) as (_, address):
        session = Session(
            address, keyring("p1"), "server", Ledger(), TcpMeter(), heartbeat_s=60.0, wait_s=2.0
        )
        joining = Joining("passive", "{}", "train", 1, "cpu")
        try:
            assert isinstance(session.join(joining), Start)
            send = session._send

            def slowly(message: control_pb2.PartyMessage) -> None:
                send(message)
                wait_until(lambda: session._uplink.channel is None)

            monkeypatch.setattr(session, "_send", slowly)
            if at_once:
                wait_until(lambda: session._uplink.channel is None)
            with raises(PeerError, Code.CERTIFICATE_INVALID, names="p1"):
                session.join(joining)
        finally:
            session.close()
    assert server.sessions == 1


@pytest.mark.parametrize("reported", [False, True])
def test_how_long_a_server_that_goes_in_a_run_is_waited_for(reported: bool) -> None:
    """As long as a party that was lost; a party that has reported may never hear of it again."""
    start = control_pb2.ServerMessage(start=control_pb2.Start(run_id="run", generation=1))
    joining = Joining("passive", "{}", "train", 1, "cpu")
    with run_server(
        "127.0.0.1:0", keyring("server"), [OddServer(start.SerializeToString())], 4
    ) as (_, address):
        session = Session(
            address,
            keyring("p1"),
            "server",
            Ledger(),
            TcpMeter(),
            heartbeat_s=60.0,
            wait_s=0.2,
            back_s=1.5,
        )
        assert isinstance(session.join(joining), Start)
        wait_until(lambda: session._uplink.channel is None)
    try:
        if reported:
            with pytest.raises(InterruptedRun):
                session.report(PartyReport({}, 0, 0.0))
        began_s = time.monotonic()
        with pytest.raises(VflError) as caught:
            session.join(joining)
        if reported:
            assert (type(caught.value), caught.value.code) == (InputError, Code.UNREACHABLE)
        else:
            assert time.monotonic() - began_s >= 1.5
            assert (type(caught.value), caught.value.code) == (LostError, Code.PARTY_LOST)
            assert caught.value.party == "server"
            assert_names(str(caught.value), "1.5")
    finally:
        session.close()


class Interrupting(OddServer):
    """Starts a generation, ends it once it has a report, and dies."""

    def _session(self, requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        yield control_pb2.ServerMessage(
            start=control_pb2.Start(run_id="run", generation=1)
        ).SerializeToString()
        while not control_pb2.PartyMessage.FromString(next(requests)).HasField("report"):
            pass
        interrupt = control_pb2.Interrupt(generation=1, reason="p0 was lost")
        yield control_pb2.ServerMessage(interrupt=interrupt).SerializeToString()


def test_a_report_of_a_generation_that_was_interrupted_counts_for_nothing() -> None:
    """The run goes on, so a server that is lost then is waited for as in any run."""
    with run_server("127.0.0.1:0", keyring("server"), [Interrupting()], 4) as (_, address):
        session = Session(
            address,
            keyring("p1"),
            "server",
            Ledger(),
            TcpMeter(),
            heartbeat_s=60.0,
            wait_s=0.2,
            back_s=1.0,
        )
        assert isinstance(session.join(Joining("passive", "{}", "train", 1, "cpu")), Start)
        with raises(InterruptedRun, Code.INTERRUPTED, names="p0"):
            session.report(PartyReport({}, 0, 0.0))
        wait_until(lambda: session._uplink.channel is None)
    with raises(LostError, Code.PARTY_LOST, names=("server", "127.0.0.1")):
        session.join(Joining("passive", "{}", "train", 1, "cpu"))
    session.close()


class Leaving(OddServer):
    """Starts a generation, says that it was stopped, and waits for the party to end the session."""

    def __init__(self) -> None:
        super().__init__()
        self.ended = threading.Event()

    def _session(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        context.add_callback(self.ended.set)
        next(requests)
        start = control_pb2.Start(run_id="run", generation=1)
        yield control_pb2.ServerMessage(start=start).SerializeToString()
        interrupt = control_pb2.Interrupt(generation=1, reason="server was stopped", leaving=True)
        yield control_pb2.ServerMessage(interrupt=interrupt).SerializeToString()
        self.ended.wait(WAIT_S)


def test_a_party_ends_the_session_when_the_server_leaves_and_knows_why() -> None:
    server = Leaving()
    with run_server("127.0.0.1:0", keyring("server"), [server], 4) as (_, address):
        session = Session(
            address, keyring("p1"), "server", Ledger(), TcpMeter(), heartbeat_s=60.0, wait_s=2.0
        )
        try:
            assert isinstance(session.join(Joining("passive", "{}", "train", 1, "cpu")), Start)
            assert server.ended.wait(WAIT_S)
            # The loss of the connection is known, too.
            wait_until(lambda: session._uplink.channel is None)
            with raises(InterruptedRun, Code.INTERRUPTED):
                session.check()
        finally:
            session.close()


class Silent(OddServer):
    """Starts a generation, and says nothing more."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []
        self.ends = threading.Event()

    def _session(self, requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        next(requests)
        yield control_pb2.ServerMessage(
            start=control_pb2.Start(run_id="run", generation=1)
        ).SerializeToString()
        # gRPC raises a bare Exception if the party cancels the call.
        with contextlib.suppress(Exception):
            self.told.extend(
                str(control_pb2.PartyMessage.FromString(data).WhichOneof("body"))
                for data in requests
            )
        self.ends.wait(WAIT_S)


def test_a_stopped_party_waits_once_for_a_server_that_stands_still(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("vfl_common.rpc.session._STOP_S", 1.0)
    monkeypatch.setattr("vfl_common.rpc.session._CLOSE_S", 60.0)
    server = Silent()
    with run_server("127.0.0.1:0", keyring("server"), [server], 4) as (_, address):
        session = Session(
            address, keyring("p1"), "server", Ledger(), TcpMeter(), heartbeat_s=60.0, wait_s=2.0
        )
        assert isinstance(session.join(Joining("passive", "{}", "train", 1, "cpu")), Start)

        def stop() -> None:
            # From inside of the generation, and from outside of it.
            session.stopping()
            session.stopping()
            session.close()

        thread = threading.Thread(target=stop, daemon=True)
        thread.start()
        thread.join(WAIT_S)
        assert not thread.is_alive()
        wait_until(lambda: server.told == ["stopping"])
        server.ends.set()


def test_a_second_signal_takes_back_nothing_that_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Silent()
    with run_server("127.0.0.1:0", keyring("server"), [server], 4) as (_, address):
        session = Session(
            address, keyring("p1"), "server", Ledger(), TcpMeter(), heartbeat_s=60.0, wait_s=2.0
        )
        assert isinstance(session.join(Joining("passive", "{}", "train", 1, "cpu")), Start)
        with monkeypatch.context() as patched:
            patched.setattr(session._uplink.reader, "join", Mock(side_effect=KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                session.stopping()
        session.stopping()
        session.close()
        wait_until(lambda: "stopping" in server.told)
        server.ends.set()


class GoneAndBack(OddServer):
    """Starts a generation, dies once it has the plan, and then answers a party that joins again as
    a test says.

    ``told``: what a party says in its second session, message by message. ``answers``: set once it
    may be answered.
    """

    def __init__(self, *answers: control_pb2.ServerMessage) -> None:
        super().__init__(*(answer.SerializeToString() for answer in answers))
        self.told: queue.SimpleQueue[control_pb2.PartyMessage] = queue.SimpleQueue()
        self.answers = threading.Event()

    def _session(self, requests: Iterator[bytes], _context: Context) -> Iterator[bytes]:
        self.sessions += 1
        if self.sessions == 1:
            next(requests)
            start = control_pb2.Start(run_id="run", generation=3)
            yield control_pb2.ServerMessage(start=start).SerializeToString()
            while not control_pb2.PartyMessage.FromString(next(requests)).HasField("plan"):
                pass
            return
        self.told.put(control_pb2.PartyMessage.FromString(next(requests)))
        self.answers.wait(WAIT_S)
        yield from self._answers
        for data in requests:
            self.told.put(control_pb2.PartyMessage.FromString(data))

    @contextlib.contextmanager
    def train(
        self, absent_s: float = 30.0
    ) -> Iterator[tuple[Session, queue.SimpleQueue[VflError | str]]]:
        """A party in a generation that goes on without the server; yields what happens to it,
        too.
        """
        happens: queue.SimpleQueue[VflError | str] = queue.SimpleQueue()
        with run_server("127.0.0.1:0", keyring("server"), [self], 4) as (_, address):
            session = Session(
                address,
                keyring("p1"),
                "server",
                Ledger(),
                TcpMeter(),
                heartbeat_s=60.0,
                wait_s=2.0,
                absent_s=absent_s,
                emit=lambda event, **_: happens.put(event),
            )
            try:
                session.join(
                    Joining("passive", "{}", "train", 1, "cpu", checkpoints=("000001.a.1",))
                )
                session.watch(happens.put)
                session.plan([])
                assert happens.get(timeout=WAIT_S) == "server_away"
                yield session, happens
            finally:
                session.close()


def goes_on(generation: int) -> control_pb2.ServerMessage:
    return control_pb2.ServerMessage(
        start=control_pb2.Start(run_id="run", generation=generation, goes_on=True)
    )


def test_a_server_that_comes_back_is_told_again_what_it_must_know() -> None:
    server = GoneAndBack(goes_on(3))
    with server.train() as (session, happens):
        session.progress(ProgressUpdate("a", 1))
        session.lenient(True)
        session.progress(ProgressUpdate("a", 2))
        server.answers.set()
        assert happens.get(timeout=WAIT_S) == "server_back"
        session.check()
        session.lenient(False)
        join, progress, on, off = (server.told.get(timeout=WAIT_S) for _ in range(4))
        assert (join.join.run_id, join.join.generation, list(join.join.checkpoints)) == (
            "run",
            3,
            [],
        )
        # The last one.
        assert progress.progress.round == 2
        assert on.lenient.on
        assert off.HasField("lenient")
        assert not off.lenient.on


@pytest.mark.parametrize("answers", [(), (goes_on(4),)], ids=["silent", "another generation"])
def test_a_generation_ends_if_the_server_that_is_back_does_not_take_it_up(
    answers: tuple[control_pb2.ServerMessage, ...],
) -> None:
    server = GoneAndBack(*answers)
    server.answers.set()
    with server.train(absent_s=2.0) as (session, happens):
        ended = happens.get(timeout=WAIT_S)
        if answers:
            assert isinstance(ended, PeerError)
        else:
            assert isinstance(ended, InterruptedRun)
        assert_names(str(ended), "server")
        assert server.sessions == 2
        with pytest.raises(type(ended)):
            session.check()


class Flapping(GoneAndBack):
    """Takes the generation up, and ends the session at once, again and again."""

    FLAPS = 20

    def __init__(self) -> None:
        super().__init__(goes_on(3))
        # Most threads of the party's sessions at once.
        self.lookers = 0

    def _session(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        if not 1 <= self.sessions <= self.FLAPS:
            yield from super()._session(requests, context)
            return
        self.sessions += 1
        self.lookers = max(
            self.lookers, sum(each.name == "session" for each in threading.enumerate())
        )
        next(requests)
        yield from self._answers


class Hanging(GoneAndBack):
    """Takes the generation up only when a party asks a third time. Before, it says nothing."""

    def _session(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        if self.sessions not in (1, 2):
            yield from super()._session(requests, context)
            return
        self.sessions += 1
        ended = threading.Event()
        context.add_callback(ended.set)
        assert control_pb2.PartyMessage.FromString(next(requests)).join.generation == 3
        ended.wait(WAIT_S)


def test_a_party_asks_again_if_the_server_that_is_back_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stream can hang. The party would wait for its answer until the generation ends."""
    monkeypatch.setattr("vfl_common.rpc.uplink.ANSWER_S", 0.2)
    server = Hanging(goes_on(3))
    server.answers.set()
    with server.train(absent_s=WAIT_S) as (session, happens):
        assert happens.get(timeout=WAIT_S) == "server_back"
        session.check()
        assert server.sessions == 4


def test_one_thread_looks_for_a_server_that_goes_as_soon_as_it_is_back() -> None:
    server = Flapping()
    with server.train() as (session, happens):
        server.answers.set()
        while server.sessions <= server.FLAPS:
            assert happens.get(timeout=WAIT_S) in ("server_back", "server_away")
        assert server.told.get(timeout=WAIT_S).HasField("join")
        session.check()
        session.progress(ProgressUpdate("a", 1))
        # And no second join.
        assert server.told.get(timeout=WAIT_S).HasField("progress")
    # The one that looks, the one that reads, and those that are just ending.
    assert server.lookers <= 4


def test_a_party_that_gives_the_generation_up_looks_for_the_server_as_ever() -> None:
    server = GoneAndBack()
    server.answers.set()
    with server.train() as (session, happens):
        with raises(LostError, Code.PARTY_LOST):
            session.join(Joining("passive", "{}", "train", 1, "cpu", checkpoints=("000001.a.1",)))
        # It has not looked for it to the end of its time.
        assert happens.empty()
        joins = [each.join for each in iter_now(server.told) if each.HasField("join")]
        assert joins[-1].generation == 0
        assert list(joins[-1].checkpoints) == ["000001.a.1"]


def iter_now(
    told: queue.SimpleQueue[control_pb2.PartyMessage],
) -> Iterator[control_pb2.PartyMessage]:
    with contextlib.suppress(queue.Empty):
        while True:
            yield told.get_nowait()
