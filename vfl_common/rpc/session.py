"""A party's session with the aggregation server: join, heartbeat, progress, report, abort."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from vfl_common.errors import Code, InputError, InterruptedRun, LostError, VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.ledger import Ledger
from vfl_common.link import OLDEST, PROTOCOL
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.answers import check_start, interruption, missing_of, refusals_of, stop_error
from vfl_common.rpc.counters.tcp import TcpMeter
from vfl_common.rpc.failures import to_failure
from vfl_common.rpc.inbox import Inbox
from vfl_common.rpc.messages import (
    Done,
    Joining,
    PartyReport,
    ProgressUpdate,
    Start,
    alone_message,
    join_message,
    lenient_message,
    plan_message,
    progress_message,
)
from vfl_common.rpc.server_away import ServerAway
from vfl_common.rpc.uplink import PAUSE_S, Uplink
from vfl_common.stages import AggregationPlan

_CLOSE_S = 5.0
# How long a party that was stopped waits for the server's answer.
_STOP_S = 2.0
_LONGEST_S = 1e6


@dataclass
class Session:
    """A party's exchange of control messages with the server, over an ``Uplink``.

    Call ``join`` and ``report`` in the main thread. A second thread reads the server's messages.
    When a message ends the current generation, that thread calls the watcher, which wakes the main
    thread.

    A generation in which the server averages nothing goes on for ``absent_s`` without the server:
    see ``ServerAway``.

    Args:
        wait_s: how long to wait for a server that does not answer.
        back_s: how long to wait for it once a run has started, if that is longer, as for a party
            that was lost.
        on_waiting: called with the missing names, the seconds left and, if known, the reason: for
            missing parties when the server reports them, for the server when it does not answer.
        absent_s: how long a generation goes on without the server; 0: not at all.
        emit: reports events to the person or program that started this party.
        deadline_s: how long to wait in all until the server and the others have joined.
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
        # The protocol that this party offers; an older one if the server does not speak the newest.
        self._protocol = PROTOCOL
        # The server's refusal of the newest protocol.
        self._unspoken: VflError | None = None
        # Whether this party has waited for the server's answer to a stop.
        self._has_waited = False
        # The end of ``deadline_s``, which begins when the party first joins (monotonic).
        self._by_s = math.inf
        self._joined = control_pb2.Join()
        self._uplink = Uplink(
            self.address,
            self.keyring,
            self.server,
            self.ledger,
            self.meter,
            self.heartbeat_s,
            self._server_away,
            handle=self._handle,
            ended=self._end,
            emit=self.emit,
        )

    # -- the main thread
    # ----------------------------------------------------------------------

    def join(self, joining: Joining) -> Start | Done:
        """Joins, or joins again after an interruption, and waits until all parties have joined.

        Raises:
            InputError, PeerError: the server cannot be reached, or refuses this party.
            LostError: the others did not come in time.
        """
        self._by_s = min(self._by_s, time.monotonic() + self.deadline_s)
        missing: list[str] = []
        self._uplink.stop_looking()
        self._uplink.await_looker()
        self._forget()
        give_up_s, spoke = time.monotonic() + self._patience_s, False
        while True:
            if self._uplink.channel is None:
                self._connect(give_up_s)
            message = join_message(joining, self._protocol)
            self._joined = message.join
            self._send(message)
            patience_s = self.wait_s
            while True:
                left_s = self._by_s - time.monotonic()
                try:
                    answer = self._inbox.get(timeout=max(0.0, min(patience_s, left_s)))
                except queue.Empty:
                    if left_s < patience_s:
                        raise self._too_late(missing) from None
                    raise LostError(
                        Code.PARTY_LOST,
                        f"{self.server} has accepted the connection, but has sent nothing for "
                        f"{patience_s:g} s",
                        party=self.server,
                    ) from None
                if isinstance(answer, VflError):
                    if self._offers_less(answer, joining):
                        break
                    if not isinstance(answer, InterruptedRun):
                        raise answer
                    # If the server has gone, connect and join again.
                    if self._has_lost():
                        # A server that has answered gets the whole time again to come back.
                        if spoke:
                            give_up_s, spoke = time.monotonic() + self._patience_s, False
                        elif time.monotonic() >= give_up_s:
                            raise InputError(
                                Code.UNREACHABLE,
                                f"{self.server} has ended every session at once for "
                                f"{self._patience_s:g} s. Check its log.",
                            )
                        self._uplink.closed.wait(PAUSE_S)
                        break
                elif answer.HasField("waiting"):
                    spoke = True
                    left_s = max(0.0, min(answer.waiting.deadline_s, _LONGEST_S))
                    patience_s = left_s + self.wait_s
                    missing = missing_of(answer.waiting)
                    own_s = max(0.0, self._by_s - time.monotonic())
                    self.on_waiting(missing, min(left_s, own_s), refusals_of(answer.waiting))
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

    def _offers_less(self, error: VflError, joining: Joining) -> bool:
        """Returns whether to join again with the protocol of the previous release, which may be the
        only one that the server speaks.
        """
        if error.code is not Code.PROTOCOL_DIFFERS or joining.oldest > OLDEST:
            return False
        if self._protocol == OLDEST:
            raise self._unspoken or error
        with self._uplink.lock:
            self._protocol, self._unspoken, self._ended = OLDEST, error, None
        return True

    def _too_late(self, missing: Sequence[str]) -> LostError:
        """Returns the error that ``missing``, or the server, did not join before the deadline."""
        away = list(missing) or [self.server]
        return LostError(
            Code.PARTY_LOST,
            f"{', '.join(away)} did not come within {self.deadline_s:g} s (predict.deadline_s)",
            party=away[0],
        )

    def _forget(self) -> None:
        """Drops the server's messages about an earlier generation. Raises its refusal of this
        party, if it sent one.
        """
        while not self._inbox.empty():
            answer = self._inbox.get()
            if isinstance(answer, VflError) and not isinstance(answer, InterruptedRun):
                raise answer

    def _has_lost(self) -> bool:
        """Returns whether the connection is lost and all earlier messages are handled."""
        with self._uplink.lock:
            return self._uplink.channel is None and self._inbox.empty()

    @property
    def me(self) -> str:
        """This party's name."""
        return self.keyring.name

    @property
    def state(self) -> str:
        """The state, one of STATES; any thread may read it."""
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
        """Sends the server this party's plan for this generation, once its rows are aligned."""
        self._send(plan_message(aggregations))
        with self._uplink.lock:
            if self._ended is None:
                self._server_away.note_plan(self._joined, averages=bool(aggregations))

    def progress(self, progress: ProgressUpdate) -> None:
        """Sends the server this party's progress and metrics."""
        self._say(progress_message(progress))

    def report(self, report: PartyReport) -> str:
        """Sends this party's results, its ledger and the kernel's counts. See ``Membership``."""
        self._say(report.message(self.ledger, self.meter))
        while True:
            answer = self._inbox.get()
            if isinstance(answer, VflError):
                raise answer
            if answer.HasField("complete"):
                self._completed = True
                return answer.complete.summary_json

    def lenient(self, on: bool) -> None:
        """Tells the server whether this party, the active one, goes on without a passive party that
        is lost.
        """
        self._say(lenient_message(on))

    def alone(self) -> None:
        """Tells the server that this party, the active one, needs no other party any more, so that
        they may leave.
        """
        self._say(alone_message())

    def stopping(self) -> None:
        """Tells the server that this party was stopped: the others wait for it, as for one that was
        lost.

        Returns when the server has ended the session, so that the others learn of the stop before
        they miss this party, or after ``_STOP_S``. ``close`` does not wait again then.
        """
        uplink, reader = self._uplink, self._uplink.reader
        if uplink.channel is not None and reader is not None and not self._has_waited:
            self._send(control_pb2.PartyMessage(stopping=control_pb2.Stopping()))
            # The end of the session is expected now.
            uplink.closed.set()
            reader.join(timeout=_STOP_S)
            # Not reached if another signal interrupts the wait.
            self._has_waited = True

    def abort(self, error: BaseException) -> None:
        """Tells the server that this party stops, and why (only the public text)."""
        if self._uplink.channel is not None:
            self._send(control_pb2.PartyMessage(abort=to_failure(error)))

    def close(self) -> None:
        """Half-closes the stream and waits until the server ends it, unless ``stopping`` has waited
        for that.
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
        why = self._uplink.connect(min(give_up_s, self._by_s), self.on_waiting)
        if why is not None and time.monotonic() >= self._by_s:
            raise self._too_late(())
        if why is not None:
            raise self._give_up(why) from None

    @property
    def _under_way(self) -> bool:
        """Whether this party has begun a run and has not reported; after the report the server may
        end.
        """
        return self._started and not self._server_away.reported

    @property
    def _patience_s(self) -> float:
        """How long to look for the server."""
        return max(self.wait_s, self.back_s) if self._under_way else self.wait_s

    def _give_up(self, why: VflError) -> VflError:
        """Returns the error for a server that does not answer because of ``why``."""
        if self._under_way:
            return LostError(
                Code.PARTY_LOST,
                f"{self.server} did not come back within {self._patience_s:g} s: {why}",
                party=self.server,
            )
        return InputError(
            Code.UNREACHABLE, f"the server does not answer: {why} Waited {self.wait_s:g} s."
        )

    def _send(self, message: control_pb2.PartyMessage) -> None:
        self._uplink.send(message.SerializeToString())

    def _say(self, message: control_pb2.PartyMessage) -> None:
        """Sends a message that the server must get in this generation; if it is away, when it is
        back.
        """
        body, data = str(message.WhichOneof("body")), message.SerializeToString()
        with self._uplink.lock:
            if self._server_away.says(body, data):
                self._uplink.send(data)

    def _handle(self, data: bytes) -> VflError | None:
        """Handles a message of the server. Returns the error with which the server ends the
        session, or None.
        """
        self._inbox.require_room(self.server)
        message = control_pb2.ServerMessage.FromString(data)
        body = message.WhichOneof("body")
        if body == "stop":
            return stop_error(message.stop, server=self.server, me=self.me)
        if body == "interrupt":
            with self._uplink.lock:
                self._server_away.note_interruption()
            error = interruption(message.interrupt)
            self._end(error)
            # A server that was stopped waits until this party ends the session.
            return error if message.interrupt.leaving else None
        if body == "start" and message.start.goes_on:
            self._uplink.go_on(message.start)
            return None
        if body == "start":
            self._begin(message.start)
        elif body == "complete":
            # The end of the session is expected now.
            self._uplink.stop_looking()
        self._inbox.put(message)
        return None

    def _begin(self, start: control_pb2.Start) -> None:
        """Begins a generation; ``plan`` decides whether it may go on without the server."""
        with self._uplink.lock:
            self._started, self._ended = True, None
            self._server_away.begin()
            self._joined.run_id, self._joined.generation = start.run_id, start.generation
            self._joined.protocol = start.protocol or self._joined.protocol
            del self._joined.checkpoints[:]
            del self._joined.held[:]
            self._joined.unfit = ""

    def _end(self, error: VflError, channel: grpc.Channel | None = None) -> None:
        """Ends the generation with ``error``; ``channel``: the one that was lost with it, if any.

        It holds the lock throughout, because the main thread may join again as soon as it has no
        channel, and this error must not end the generation that it then starts.
        """
        with self._uplink.lock:
            # The channel was closed by this party.
            if channel is not None and not self._uplink.drop(channel):
                return
            self._uplink.stop_looking()
            # The first error is the cause.
            if self._ended is None or not isinstance(error, InterruptedRun):
                self._ended = error
            watcher = self._watcher
            self._inbox.put(error)
        if watcher is not None:
            watcher(error)
