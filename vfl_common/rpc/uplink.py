"""A party's connection to the server: one stream at a time, which is reopened when it breaks; what
the party does while the server is away; and the checks of the server's answers, because the server
is not trusted.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from enum import Enum, auto

import grpc
from google.protobuf.message import DecodeError

from vfl_common.bundle import CONTROL, Ledger
from vfl_common.errors import (
    AbortedError,
    Code,
    InternalError,
    InterruptedRun,
    LostError,
    PeerError,
    VflError,
)
from vfl_common.files import PLAIN_NAME
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.rpc.channel import MAX_MESSAGE_BYTES, connect, split_address
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.messages import Start, format_refusal, from_failure
from vfl_common.text import clean

# The time limit for the first answer of a server to which this party has reconnected. It doubles
# with each attempt.
ANSWER_S = 5.0


# ``ServerAway`` does not read a clock, send or wait; the time is an argument. The session calls it
# under its lock and carries out its decisions.
class Loss(Enum):
    """The consequence of a lost connection to the server."""

    # The generation ends.
    ENDS = auto()
    # The generation goes on, and the calling thread must look for the server.
    LOOKS = auto()
    # The generation goes on, and another thread looks for the server already.
    KNOWN = auto()


class SearchStep(Enum):
    """The next step of a search for the server."""

    # The search ends: the server is back, or the generation has ended.
    STOP = auto()
    # The generation ends: the server was away for too long.
    GIVE_UP = auto()
    # Try to connect to the server.
    CONNECT = auto()
    # Wait: this party has joined again, and the server has not answered yet.
    WAIT = auto()
    # The server has not answered for too long: drop the connection, and connect again.
    DROP = auto()


@dataclass
class ServerAway:
    """The state of a generation that may go on without the server. It does not read a clock, send
    or wait; the time is an argument.

    Args:
        absent_s: The time for which the generation goes on without the server; 0 if it does not.
        claim: The message with which this party joins again while the generation goes on; None if
            the generation does not go on without the server.
        messages: {kind: last message of this kind}, in order, of the messages that the server must
            get in this generation.
        away: Whether the server is away and the generation goes on.
    """

    absent_s: float
    claim: control_pb2.Join | None = None
    messages: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    # The number of the last search for the server; earlier searches end.
    search: int = 0
    _give_up_s: float = 0.0
    _joined_again_s: float = 0.0
    _answer_timeout_s: float = 0.0

    def begin(self) -> None:
        """Begins a generation. ``note_plan`` decides later whether it may go on without the
        server.
        """
        self.messages.clear()

    def note_plan(self, claim: control_pb2.Join, *, averages: bool) -> None:
        """Decides, with this party's plan, whether the generation may go on without the server.
        ``averages``: whether the server averages weights.
        """
        if self.absent_s and not averages:
            self.claim = claim

    def says(self, body: str, data: bytes) -> bool:
        """Stores a message that the server must get. Returns whether to send it now; otherwise
        ``back`` returns it later.
        """
        self.messages[body] = data
        return not self.away

    def note_interruption(self) -> None:
        """Removes this party's report, because the run resumes from a checkpoint and needs a new
        report.
        """
        self.messages.pop("report", None)

    @property
    def reported(self) -> bool:
        """Whether this party has reported in this generation."""
        return "report" in self.messages

    def note_loss(self, now_s: float) -> Loss:
        """Decides the consequence of a lost connection."""
        if self.claim is None:
            return Loss.ENDS
        if self.away:
            return Loss.KNOWN
        self.away, self._answer_timeout_s = True, ANSWER_S
        self.search += 1
        self._give_up_s = now_s + self.absent_s
        return Loss.LOOKS

    def looks(self, search: int) -> bool:
        """Returns whether the search with the number ``search`` goes on."""
        return self.away and self.claim is not None and search == self.search

    def step(self, search: int, now_s: float, *, connected: bool) -> SearchStep:
        """Decides the next step of a search.

        A connection can hang, and a suspended server does not answer. So a silent connection is
        dropped; otherwise the party would wait for ever.
        """
        if not self.looks(search):
            return SearchStep.STOP
        if now_s >= self._give_up_s:
            return SearchStep.GIVE_UP
        if not connected:
            return SearchStep.CONNECT
        if now_s - self._joined_again_s < self._answer_timeout_s:
            return SearchStep.WAIT
        self._answer_timeout_s *= 2
        return SearchStep.DROP

    def seconds_left(self, now_s: float) -> float:
        """Returns the number of seconds for which the generation still goes on without the
        server.
        """
        return max(0.0, self._give_up_s - now_s)

    def note_question(self, now_s: float) -> None:
        """Records the time at which this party has joined again, from which it waits for the
        server's answer.
        """
        self._joined_again_s = now_s

    def back(self, run_id: str, generation: int) -> Collection[bytes] | None:
        """Ends the server's absence. Returns the messages to repeat; None if this party has given
        up the generation meanwhile.

        Raises:
            ValueError: The server names another generation.
        """
        if self.claim is None or not self.away:
            return None
        if (run_id, generation) != (self.claim.run_id, self.claim.generation):
            raise ValueError(f"the server names generation {generation} of run {run_id}")
        self.away = False
        return self.messages.values()

    def stop_looking(self) -> None:
        """Stops the search for the server: from now on its loss ends the generation."""
        self.claim, self.away = None, False


SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
# The pause before an ended session is opened again.
PAUSE_S = 0.5
# The time after which a silent server is reported to the person.
_PATIENCE_S = 3.0
# The time between two such reports.
_REPORT_S = 60.0


@dataclass
class Uplink:
    """The connection to the server, which the main thread opens and another thread reads.

    If the connection is lost in a generation that goes on without the server, the reading thread
    looks for the server and joins the generation again.

    Args:
        away: Decides whether the generation goes on without the server. ``lock`` guards it.
        handle: Called with each message, in the reading thread. Returns the error with which the
            server ends the session, or None.
        ended: Called with the error that has ended the session, and the lost channel or None.
        emit: Reports events to the person or program that started this party.
    """

    address: str
    keyring: Keyring
    server: str
    ledger: Ledger
    meter: TcpMeter
    heartbeat_s: float
    away: ServerAway
    handle: Callable[[bytes], VflError | None]
    ended: Callable[[VflError, grpc.Channel | None], None]
    emit: Callable[..., None]

    def __post_init__(self) -> None:
        self.lock = threading.Condition()
        self.closed = threading.Event()
        self.channel: grpc.Channel | None = None
        # The thread that reads the newest stream.
        self.reader: threading.Thread | None = None
        # The thread that looks for the server.
        self._search_thread: threading.Thread | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._send_heartbeats, name="heartbeat", daemon=True).start()

    # -- the main thread
    # ----------------------------------------------------------------------

    def connect(
        self, give_up_s: float, on_waiting: Callable[[list[str], float, str], None]
    ) -> VflError | None:
        """Opens a channel and a stream. Retries until ``give_up_s`` (monotonic), unless a retry
        cannot help.

        Returns the error if the server does not answer, otherwise None. Raises the server's
        refusal.
        """
        previous_code: Code | None = None
        # A server that is still starting is not reported.
        report_s = time.monotonic() + _PATIENCE_S
        while True:
            left_s = give_up_s - time.monotonic()
            result = connect(
                self.address, self.keyring.current(), self.server, max(0.5, min(3.0, left_s))
            )
            if isinstance(result, grpc.Channel):
                self.open(result)
                return None
            if result.code is not Code.UNREACHABLE and result.code is previous_code:
                # The error is raised only the second time, because a stopping server can look like
                # a server that refuses this party.
                raise result
            previous_code, now_s = result.code, time.monotonic()
            if now_s >= give_up_s:
                return result
            if now_s >= report_s:
                report_s = now_s + _REPORT_S
                on_waiting([self.server], give_up_s - now_s, str(result))

    def open(self, channel: grpc.Channel) -> None:
        """Opens a stream over ``channel`` and starts the thread that reads it."""
        self.meter.name_address(self.address, self.server)
        # This ends gRPC's sending thread of an earlier stream.
        self._outbox.put(None)
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = channel.stream_stream(f"/{SERVICE}/Session")(self._yield_messages(outbox))
        self.channel, self._outbox = channel, outbox
        self.reader = threading.Thread(
            target=self.read, args=[call, channel], name="session", daemon=True
        )
        self.reader.start()

    def send(self, data: bytes) -> None:
        """Sends a message over the open stream."""
        self._outbox.put(data)

    def stop_looking(self) -> None:
        """Stops the search for the server. From now on, a lost connection ends the generation."""
        with self.lock:
            self.away.stop_looking()
            self.lock.notify_all()

    def await_looker(self) -> None:
        """Waits for the end of the thread that looks for the server, because it may be about to
        connect.
        """
        if self._search_thread is not None:
            self._search_thread.join()

    def half_close(self) -> None:
        """Closes this party's half of the stream. After that, the end of the session is not an
        error.
        """
        self.closed.set()
        with self.lock:
            self.lock.notify_all()
        self._outbox.put(None)

    def disconnect(self) -> None:
        """Closes the connection."""
        with self.lock:
            channel, self.channel = self.channel, None
        self._outbox.put(None)
        if channel is not None:
            channel.close()

    def drop(self, channel: grpc.Channel) -> bool:
        """Forgets ``channel``, which is lost. Returns False if this party had closed it already.
        The caller must hold the lock.
        """
        if self.channel is not channel:
            return False
        self.channel = None
        return True

    # -- the other threads
    # ----------------------------------------------------------------------

    def _yield_messages(self, outbox: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
        while (data := outbox.get()) is not None:
            self.ledger.add(self.server, CONTROL, CONTROL, "sent", 0, len(data))
            yield data

    def _send_heartbeats(self) -> None:
        heartbeat = control_pb2.PartyMessage(heartbeat=control_pb2.Heartbeat())
        data = heartbeat.SerializeToString()
        while not self.closed.wait(self.heartbeat_s):
            self.meter.sample()
            self.keyring.warn_of_expiry_daily()
            if self.channel is not None:
                self.send(data)

    def read(self, call: grpc.Call, channel: grpc.Channel) -> None:
        """Reads every message of the server until the end of the stream."""
        end_error: VflError = InterruptedRun("the connection to the server was lost")
        try:
            for data in call:
                self.ledger.add(self.server, CONTROL, CONTROL, "received", 0, len(data))
                server_error = self.handle(data)
                if server_error is not None:
                    end_error = server_error
                    break
        except (PeerError, DecodeError, grpc.RpcError) as error:
            end_error = explain_end(error, self.server) or end_error
        if self.closed.is_set():
            return
        search = self._handle_loss(end_error, channel)
        channel.close()
        if search is not None:
            try:
                self._search_server(search)
            except Exception as error:  # noqa: BLE001 - the main thread waits for this thread's result
                self.ended(
                    error
                    if isinstance(error, VflError)
                    else InternalError(f"{type(error).__name__}: {error}"),
                    None,
                )

    def _handle_loss(self, error: VflError, channel: grpc.Channel) -> int | None:
        """Handles a lost connection. Returns the number of the search for the server that this
        thread must begin, or None.
        """
        with self.lock:
            if isinstance(error, InterruptedRun) and self.channel is channel:
                loss = self.away.note_loss(time.monotonic())
                if loss is not Loss.ENDS:
                    self.channel = None
                if loss is Loss.KNOWN:
                    return None
                if loss is Loss.LOOKS:
                    self._search_thread = threading.current_thread()
                    return self.away.search
        self.ended(error, channel)
        return None

    def _search_server(self, search: int) -> None:
        """Looks for the server and joins again, while the generation goes on. Ends the generation
        if the server is away for too long.
        """
        self._emit_event("server_away", left_s=self.away.absent_s)
        while not self.closed.is_set():
            with self.lock:
                now_s, channel = time.monotonic(), self.channel
                step = self.away.step(search, now_s, connected=channel is not None)
                left_s = self.away.seconds_left(now_s)
                if step is SearchStep.DROP:
                    self.channel = None
            if step is SearchStep.STOP:
                return
            if step is SearchStep.GIVE_UP:
                self.ended(
                    InterruptedRun(f"{self.server} was away for {self.away.absent_s:g} s"), channel
                )
            if step in (SearchStep.GIVE_UP, SearchStep.DROP) and channel is not None:
                channel.close()
            if step is SearchStep.CONNECT:
                timeout_s = max(0.5, min(3.0, left_s))
                result = connect(self.address, self.keyring.current(), self.server, timeout_s)
                if isinstance(result, grpc.Channel) and not self._join_again(result, search):
                    result.close()
            if step in (SearchStep.CONNECT, SearchStep.WAIT):
                with self.lock:
                    self.lock.wait_for(lambda: not self._is_searching(search), timeout=PAUSE_S)

    def _is_searching(self, search: int) -> bool:
        """Returns whether the search for the server goes on."""
        return self.away.looks(search) and not self.closed.is_set()

    def _join_again(self, channel: grpc.Channel, search: int) -> bool:
        """Joins the current generation again over ``channel``. Returns False if the search has
        ended.
        """
        with self.lock:
            if not self._is_searching(search) or self.channel is not None:
                return False
            self.open(channel)
            self.away.note_question(time.monotonic())
            self.send(control_pb2.PartyMessage(join=self.away.claim).SerializeToString())
            return True

    def go_on(self, start: control_pb2.Start) -> None:
        """Sends the returned server the messages that it must get. Raises PeerError if the server
        names another generation.
        """
        with self.lock:
            try:
                messages = self.away.back(start.run_id, start.generation)
            except ValueError:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{self.server} goes on with another generation than {self.keyring.name}",
                    party=self.server,
                ) from None
            if messages is None:
                return
            self.lock.notify_all()
            for data in messages:
                self.send(data)
        self._emit_event("server_back")

    def _emit_event(self, event: str, **facts: float) -> None:
        """Reports an event. An error is ignored, so that the run goes on."""
        # Standard output may be full, or closed.
        with contextlib.suppress(OSError, ValueError):
            self.emit(event, server=self.server, **facts)


# The maximum number of names of missing parties that are read.
_MAX_NAMES = 1_000
# The maximum length of a reason that the server gives.
MAX_REASON_CHARS = 300


def check_start(
    start: control_pb2.Start, *, server: str, me: str, oldest: int, newest: int
) -> Start:
    """Checks the server's message Start. For example, the run id must be safe as the name of a
    folder.

    Args:
        oldest: The oldest protocol with which this party can run the recipe.
        newest: The protocol that this party has offered.

    Raises:
        PeerError: MALFORMED_MESSAGE, if the message is not valid.
        InputError: ADDRESS_INVALID, if the exchange address is not host:port.
    """
    names = start.run_id, start.checkpoint or "none", *start.left, *start.shown
    if not all(PLAIN_NAME.fullmatch(name) for name in names):
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{server} sent the name of a run, a checkpoint or a party with invalid characters",
            party=server,
        )
    if start.exchange_address:
        split_address(start.exchange_address)
    # A server of the previous release does not send a protocol.
    protocol = start.protocol or newest
    if not oldest <= protocol <= newest:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{server} starts the run with protocol {protocol}, and {me} joined with {newest}",
            party=server,
        )
    return Start(
        start.run_id,
        start.generation,
        start.checkpoint,
        start.exchange_address,
        tuple(start.left),
        returning=start.returning,
        protocol=protocol,
        anew=clean(start.anew, MAX_REASON_CHARS),
        shown=dict(start.shown),
    )


def read_missing(waiting: control_pb2.Waiting) -> list[str]:
    """Returns the names of the parties for which the run waits."""
    return [clean(name, 64) for name in waiting.missing[:_MAX_NAMES]]


def format_refusals(waiting: control_pb2.Waiting) -> str:
    """Returns the reasons why missing parties were refused, in this program's words; '' if the
    server reports no refusal.
    """
    reasons = []
    for failure in waiting.refused[:_MAX_NAMES]:
        # A code of a later release is ignored.
        with contextlib.suppress(ValueError):
            reasons.append(format_refusal(clean(failure.party, 64), Code(failure.code)))
    return "; ".join(reasons)


def make_interruption(interrupt: control_pb2.Interrupt) -> InterruptedRun:
    """Returns the error with which the server ends a generation."""
    return InterruptedRun(clean(interrupt.reason or f"{', '.join(interrupt.lost)} was lost"))


def make_stop_error(stop: failure_pb2.Failure, *, server: str, me: str) -> VflError:
    """Returns the error with which the server ends the run."""
    error = from_failure(stop, sender=server, me=me)
    # A stop ends the run, even if its code is that of an interruption.
    return AbortedError(str(error)) if isinstance(error, InterruptedRun) else error


def explain_end(error: Exception, server: str) -> VflError | None:
    """Returns the error for a session that ended and cannot be reopened; None if the session may be
    opened again.
    """
    if isinstance(error, PeerError):
        return error
    if isinstance(error, DecodeError):
        return PeerError(
            Code.MALFORMED_MESSAGE, f"{server} sent bytes that are not a control message"
        )
    if not isinstance(error, grpc.Call):
        return None
    if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED):
        return LostError(Code.PARTY_LOST, f"{server} refused the session: {error.details()}")
    # The channel refuses too large messages, so it would refuse this message again.
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return PeerError(
            Code.MALFORMED_MESSAGE,
            f"{server} sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB",
            party=server,
        )
    return None
