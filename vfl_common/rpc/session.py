"""A party's session with the aggregation server: it joins, sends heartbeats and progress, and
reports or aborts.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from vfl_common.bundle import OLDEST, PROTOCOL, Ledger
from vfl_common.errors import Code, InputError, InterruptedRun, LostError, PeerError, VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.messages import (
    Done,
    Joining,
    PartyReport,
    ProgressUpdate,
    Start,
    alone_message,
    join_message,
    lenient_message,
    make_plan_message,
    progress_message,
    to_failure,
)
from vfl_common.rpc.uplink import (
    PAUSE_S,
    ServerAway,
    Uplink,
    check_start,
    format_refusals,
    make_interruption,
    make_stop_error,
    read_missing,
)
from vfl_common.stages import AggregationPlan

_CLOSE_S = 5.0
# The maximum time for which a stopped party waits for the server's answer.
_STOP_S = 2.0
_MAX_S = 1e6


@dataclass
class Session:
    """A party's exchange of control messages with the server, over an ``Uplink``.

    Call ``join`` and ``report`` in the main thread. A second thread reads the server's messages.
    When a message ends the current generation, that thread calls the watcher, which wakes the main
    thread.

    A generation in which the server averages nothing goes on without the server for ``absent_s``:
    see ``ServerAway``.

    Args:
        wait_s: The time to wait for a server that does not answer.
        back_s: The time to wait for the server once a run has started, as for a lost party, if it
            is longer than ``wait_s``.
        on_waiting: Called with the missing names, the seconds left and the reason, if known. It is
            called when the server reports missing parties, and when the server itself does not
            answer.
        absent_s: The time for which a generation goes on without the server; 0 if it does not.
        emit: Reports events to the person or program that started this party.
        deadline_s: The maximum time to wait, in all, until the server and the other parties have
            joined.
    """

    address: str
    keyring: Keyring
    server: str
    ledger: Ledger
    meter: TcpMeter
    heartbeat_s: float
    wait_s: float
    on_waiting: Callable[[list[str], float, str], None] = field(
        default=lambda _missing, _left, _why: None
    )
    absent_s: float = 0.0
    back_s: float = 0.0
    emit: Callable[..., None] = field(default=lambda _event, **_facts: None)
    deadline_s: float = math.inf

    def __post_init__(self) -> None:
        self._server_away = ServerAway(self.absent_s)
        self._inbox = Inbox()
        self._ended: VflError | None = None
        self._started = self._completed = False
        self._watcher: Callable[[VflError], None] | None = None
        # The protocol that this party offers: the newest one, or an older one if the server does
        # not support the newest.
        self._protocol = PROTOCOL
        # The server's refusal of the newest protocol.
        self._protocol_refusal: VflError | None = None
        # Whether this party has waited for the server's answer to a stop.
        self._has_waited = False
        # The end of ``deadline_s`` (monotonic), which begins when the party first joins.
        self._deadline_end_s = math.inf
        self._joined = control_pb2.Join()
        self._uplink = Uplink(
            self.address,
            self.keyring,
            self.server,
            self.ledger,
            self.meter,
            self.heartbeat_s,
            self._server_away,
            handle=self._handle_message,
            ended=self._end_generation,
            emit=self.emit,
        )

    # -- the main thread
    # ----------------------------------------------------------------------

    def join(self, joining: Joining) -> Start | Done:
        """Joins the run, or joins it again after an interruption, and waits until all parties have
        joined.

        Raises:
            InputError, PeerError: The server cannot be reached, or refuses this party.
            LostError: The other parties did not join in time.
        """
        self._deadline_end_s = min(self._deadline_end_s, time.monotonic() + self.deadline_s)
        missing: list[str] = []
        self._uplink.stop_looking()
        self._uplink.await_looker()
        self._drop_old_messages()
        give_up_s, has_answered = time.monotonic() + self._patience_s, False
        while True:
            if self._uplink.channel is None:
                self._connect(give_up_s)
            message = join_message(joining, self._protocol)
            self._joined = message.join
            self._send(message)
            patience_s = self.wait_s
            while True:
                left_s = self._deadline_end_s - time.monotonic()
                try:
                    answer = self._inbox.get(timeout=max(0.0, min(patience_s, left_s)))
                except queue.Empty:
                    if left_s < patience_s:
                        raise self._make_late_error(missing) from None
                    raise LostError(
                        Code.PARTY_LOST,
                        f"{self.server} has accepted the connection, but has sent nothing for "
                        f"{patience_s:g} s",
                        party=self.server,
                    ) from None
                if isinstance(answer, VflError):
                    if self._retry_with_older_protocol(answer, joining):
                        break
                    if not isinstance(answer, InterruptedRun):
                        raise answer
                    # If the connection is lost, connect and join again.
                    if self._is_disconnected():
                        # If the server has answered meanwhile, it gets the full time again.
                        if has_answered:
                            give_up_s, has_answered = time.monotonic() + self._patience_s, False
                        elif time.monotonic() >= give_up_s:
                            raise InputError(
                                Code.UNREACHABLE,
                                f"{self.server} has ended every session at once for "
                                f"{self._patience_s:g} s. Check its log.",
                            )
                        self._uplink.closed.wait(PAUSE_S)
                        break
                elif answer.HasField("waiting"):
                    has_answered = True
                    left_s = max(0.0, min(answer.waiting.deadline_s, _MAX_S))
                    patience_s = left_s + self.wait_s
                    missing = read_missing(answer.waiting)
                    remaining_s = max(0.0, self._deadline_end_s - time.monotonic())
                    self.on_waiting(
                        missing, min(left_s, remaining_s), format_refusals(answer.waiting)
                    )
                elif answer.HasField("start"):
                    return check_start(
                        answer.start,
                        server=self.server,
                        me=self.me,
                        oldest=joining.oldest,
                        newest=self._protocol,
                    )
                elif answer.HasField("complete"):
                    self._completed = True
                    return Done(answer.complete.run_id, answer.complete.summary_json)

    def _retry_with_older_protocol(self, error: VflError, joining: Joining) -> bool:
        """Returns whether to join again with the protocol of the previous release, because the
        server may support only that one.
        """
        if error.code is not Code.PROTOCOL_DIFFERS or joining.oldest > OLDEST:
            return False
        if self._protocol == OLDEST:
            raise self._protocol_refusal or error
        with self._uplink.lock:
            self._protocol, self._protocol_refusal, self._ended = OLDEST, error, None
        return True

    def _make_late_error(self, missing: Sequence[str]) -> LostError:
        """Returns the error for the parties ``missing``, or the server, which did not join before
        the deadline.
        """
        late = list(missing) or [self.server]
        return LostError(
            Code.PARTY_LOST,
            f"{', '.join(late)} did not come within {self.deadline_s:g} s (predict.deadline_s)",
            party=late[0],
        )

    def _drop_old_messages(self) -> None:
        """Drops the server's messages about an earlier generation. Raises the server's refusal of
        this party if there is one among them.
        """
        while not self._inbox.empty():
            answer = self._inbox.get()
            if isinstance(answer, VflError) and not isinstance(answer, InterruptedRun):
                raise answer

    def _is_disconnected(self) -> bool:
        """Returns whether the connection is lost and all earlier messages are handled."""
        with self._uplink.lock:
            return self._uplink.channel is None and self._inbox.empty()

    @property
    def me(self) -> str:
        """This party's name."""
        return self.keyring.name

    @property
    def state(self) -> str:
        """The state of the run, one of STATES. Any thread may read it."""
        ended = self._ended
        if self._completed:
            return "completed"
        if ended is not None and not isinstance(ended, InterruptedRun):
            return "failed"
        return "running" if self._started and ended is None else "waiting"

    def watch(self, watcher: Callable[[VflError], None] | None) -> None:
        """Registers ``watcher`` to be called from another thread when the current generation ends,
        or at once if it has ended.
        """
        with self._uplink.lock:
            self._watcher, ended = watcher, self._ended
        if watcher is not None and ended is not None:
            watcher(ended)

    def check(self) -> None:
        """Raises the error that ended the current generation, if any."""
        if self._ended is not None:
            raise self._ended

    def plan(self, aggregations: Sequence[AggregationPlan]) -> None:
        """Sends this party's plan for this generation to the server. It is called once the party's
        rows are aligned.
        """
        self._send(make_plan_message(aggregations))
        with self._uplink.lock:
            if self._ended is None:
                self._server_away.note_plan(self._joined, averages=bool(aggregations))

    def progress(self, progress: ProgressUpdate) -> None:
        """Sends this party's progress and metrics to the server."""
        self._say(progress_message(progress))

    def report(self, report: PartyReport) -> str:
        """Sends this party's results, ledger and byte counts to the server: see
        ``Membership.report``.
        """
        self._say(report.message(self.ledger, self.meter))
        while True:
            answer = self._inbox.get()
            if isinstance(answer, VflError):
                raise answer
            if answer.HasField("complete"):
                self._completed = True
                return answer.complete.summary_json

    def lenient(self, on: bool) -> None:
        """Reports to the server whether this party, the active party, goes on without a lost
        passive party.
        """
        self._say(lenient_message(on))

    def alone(self) -> None:
        """Reports to the server that this party, the active party, no longer needs the other
        parties, so that they may leave.
        """
        self._say(alone_message())

    def stopping(self) -> None:
        """Reports to the server that this party was stopped. The other parties wait for it as for a
        lost party.

        Returns when the server has ended the session, so that the other parties are told of the
        stop before they miss this party; or after ``_STOP_S``. ``close`` then does not wait again.
        """
        uplink, reader = self._uplink, self._uplink.reader
        if uplink.channel is not None and reader is not None and not self._has_waited:
            self._send(control_pb2.PartyMessage(stopping=control_pb2.Stopping()))
            # From now on, the end of the session is not an error.
            uplink.closed.set()
            reader.join(timeout=_STOP_S)
            # This line is not reached if another signal interrupts the wait.
            self._has_waited = True

    def abort(self, error: BaseException) -> None:
        """Reports to the server that this party ends the run, with the public text of ``error``."""
        if self._uplink.channel is not None:
            self._send(control_pb2.PartyMessage(abort=to_failure(error)))

    def close(self) -> None:
        """Half-closes the stream and waits until the server ends it, unless ``stopping`` has
        already waited.
        """
        uplink = self._uplink
        uplink.half_close()
        if uplink.reader is not None and uplink.channel is not None:
            uplink.reader.join(timeout=0.0 if self._has_waited else _CLOSE_S)
        uplink.disconnect()

    # -- the connection to the server
    # ----------------------------------------------------------------------

    def _connect(self, give_up_s: float) -> None:
        """Tries to connect to the server until ``give_up_s`` (monotonic). Raises the last error."""
        why = self._uplink.connect(min(give_up_s, self._deadline_end_s), self.on_waiting)
        if why is not None and time.monotonic() >= self._deadline_end_s:
            raise self._make_late_error(())
        if why is not None:
            raise self._make_unreachable_error(why) from None

    @property
    def _under_way(self) -> bool:
        """Whether this party has begun a run and has not reported its results yet. After the report
        the server may end.
        """
        return self._started and not self._server_away.reported

    @property
    def _patience_s(self) -> float:
        """The maximum time to look for the server."""
        return max(self.wait_s, self.back_s) if self._under_way else self.wait_s

    def _make_unreachable_error(self, why: VflError) -> VflError:
        """Returns the error for a server that does not answer because of ``why``."""
        if self._under_way:
            return LostError(
                Code.PARTY_LOST,
                f"{self.server} did not come back within {self._patience_s:g} s: {why}",
                party=self.server,
            )
        return InputError(
            Code.UNREACHABLE, f"the server did not answer within {self.wait_s:g} s: {why}"
        )

    def _send(self, message: control_pb2.PartyMessage) -> None:
        self._uplink.send(message.SerializeToString())

    def _say(self, message: control_pb2.PartyMessage) -> None:
        """Sends a message that the server must get in this generation. If the server is away, the
        message is sent when it is back.
        """
        body, data = str(message.WhichOneof("body")), message.SerializeToString()
        with self._uplink.lock:
            if self._server_away.says(body, data):
                self._uplink.send(data)

    def _handle_message(self, data: bytes) -> VflError | None:
        """Handles a message of the server. Returns the error with which the server ends the
        session, or None.
        """
        self._inbox.require_room(self.server)
        message = control_pb2.ServerMessage.FromString(data)
        body = message.WhichOneof("body")
        if body == "stop":
            return make_stop_error(message.stop, server=self.server, me=self.me)
        if body == "interrupt":
            with self._uplink.lock:
                self._server_away.note_interruption()
            error = make_interruption(message.interrupt)
            self._end_generation(error)
            # If the server was stopped, it waits until this party ends the session.
            return error if message.interrupt.leaving else None
        if body == "start" and message.start.goes_on:
            self._uplink.go_on(message.start)
            return None
        if body == "start":
            self._begin_generation(message.start)
        elif body == "complete":
            # From now on, the end of the session is not an error.
            self._uplink.stop_looking()
        self._inbox.put(message)
        return None

    def _begin_generation(self, start: control_pb2.Start) -> None:
        """Begins a generation. ``plan`` decides later whether it may go on without the server."""
        with self._uplink.lock:
            self._started, self._ended = True, None
            self._server_away.begin()
            self._joined.run_id, self._joined.generation = start.run_id, start.generation
            self._joined.protocol = start.protocol or self._joined.protocol
            del self._joined.checkpoints[:]
            del self._joined.held[:]
            self._joined.unfit = ""

    def _end_generation(self, error: VflError, channel: grpc.Channel | None = None) -> None:
        """Ends the generation with ``error``. ``channel``: the channel that was lost, if any.

        It holds the lock throughout. The main thread may join again as soon as the channel is gone,
        and this error must not end the new generation.
        """
        with self._uplink.lock:
            # If this party itself has closed the channel, nothing was lost.
            if channel is not None and not self._uplink.drop(channel):
                return
            self._uplink.stop_looking()
            # The first error is kept, because it is the cause.
            if self._ended is None or not isinstance(error, InterruptedRun):
                self._ended = error
            watcher = self._watcher
            self._inbox.put(error)
        if watcher is not None:
            watcher(error)


# The maximum number of unread bytes. A server that follows the protocol causes a few hundred.
MAX_UNREAD = 8 << 20
# The size with which an error is counted, because its text is short.
_ERROR_BYTES = 1 << 10
Answer = control_pb2.ServerMessage | VflError


class Inbox:
    """A queue of answers with a limited size, so that a server cannot fill this party's memory."""

    def __init__(self) -> None:
        self._answers: queue.SimpleQueue[tuple[Answer, int]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        # The bytes of the answers in the queue.
        self._unread_bytes = 0

    def put(self, answer: Answer) -> None:
        """Adds an answer to the queue."""
        size = _ERROR_BYTES if isinstance(answer, VflError) else answer.ByteSize()
        with self._lock:
            self._unread_bytes += size
        self._answers.put((answer, size))

    def get(self, timeout: float | None = None) -> Answer:
        """Waits for the oldest answer and removes it. Raises queue.Empty after ``timeout``
        seconds.
        """
        answer, size = self._answers.get(timeout=timeout)
        with self._lock:
            self._unread_bytes -= size
        return answer

    def empty(self) -> bool:
        """Returns whether the queue has no answers."""
        return self._answers.empty()

    def require_room(self, server: str) -> None:
        """Raises PeerError about ``server`` if more than ``MAX_UNREAD`` bytes are unread."""
        if self._unread_bytes > MAX_UNREAD:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{server} sends faster than this party reads: {MAX_UNREAD >> 20} MiB are unread",
                party=server,
            )
