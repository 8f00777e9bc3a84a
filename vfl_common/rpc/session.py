"""A party's session with the aggregation server: join, heartbeat, progress, report, abort."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import (
    AbortedError,
    Code,
    InputError,
    InternalError,
    InterruptedRun,
    LostError,
    PeerError,
    VflError,
)
from vfl_common.files import PLAIN_NAME
from vfl_common.identity.keyring import Keyring
from vfl_common.ledger import CONTROL, Ledger
from vfl_common.link import OLDEST, PROTOCOL
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.channel import MAX_MESSAGE_BYTES, connect, split_address
from vfl_common.rpc.counters.tcp import TcpMeter
from vfl_common.rpc.failures import from_failure, refusal, to_failure
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
from vfl_common.stages import AggregationPlan
from vfl_common.text import clean

SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
_CLOSE_S = 5.0
# For the server to answer a party that was stopped.
_STOP_S = 2.0
_LONGEST_S = 1e6
# Before a session that ended is opened again.
_PAUSE_S = 0.5
# Of missing parties.
_MOST_NAMES = 1_000
# Characters of a reason that the server gives.
MOST_WORDS = 300
# Without an answer of the server, before a person is told.
_PATIENCE_S = 3.0
# From then on, between two reports.
_TELL_S = 60.0


@dataclass
class Session:
    """One party's connection to the server, over one stream at a time, opened again when it breaks.

    Call ``join`` and ``report`` in the main thread. A second thread reads the server's messages.
    When one ends the current generation, it calls the watcher, which wakes the main thread from
    whatever it waits for.

    A generation in which the server averages nothing goes on for ``absent_s`` without the server.
    The thread that lost it looks for it, joins again with the generation, and repeats what the
    server must know.

    Args:
        wait_s: how long to wait for a server that does not answer.
        back_s: how long to wait for it once a run has started, if that is longer: as for a party
            that was lost.
        on_waiting: called with the missing names, the seconds left and, if known, the reason: for
            missing parties when the server reports them, for the server itself when it does not
            answer.
        absent_s: how long a generation goes on without the server; 0: not at all.
        emit: reports events to the person or program in front of this party.
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

    def __post_init__(self) -> None:
        self._lock = threading.Condition()
        self._inbox = Inbox()
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel: grpc.Channel | None = None
        self._reader: threading.Thread | None = None
        self._ended: VflError | None = None
        self._started = self._completed = False
        self._watcher: Callable[[VflError], None] | None = None
        self._closed = threading.Event()
        # That this party offers; less if the server knows no other.
        self._protocol = PROTOCOL
        # The server's refusal of the newest protocol.
        self._unspoken: VflError | None = None
        # For the server to hear that this party was stopped.
        self._has_waited = False
        self._joined = control_pb2.Join()
        # While the generation may go on without the server.
        self._again: control_pb2.Join | None = None
        # In this generation, for a server that comes back: {message: the last one}.
        self._said: dict[str, bytes] = {}
        # The server is, and the generation goes on.
        self._away = False
        # The thread that looks for it.
        self._looker: threading.Thread | None = None
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    # -- the main thread
    # ----------------------------------------------------------------------

    def join(self, joining: Joining) -> Start | Done:
        """Joins, or joins again after an interruption, and waits until all parties have joined.

        Raises:
            InputError, PeerError: the server cannot be reached, or refuses this party.
            LostError: the others did not come in time.
        """
        self._look_no_more()
        # It may be about to connect.
        if self._looker is not None:
            self._looker.join()
        self._forget()
        give_up_s, spoke = time.monotonic() + self._patience_s, False
        while True:
            if self._channel is None:
                self._connect(give_up_s)
            message = join_message(joining, self._protocol)
            self._joined = message.join
            self._send(message)
            patience_s = self.wait_s
            while True:
                try:
                    answer = self._inbox.get(timeout=patience_s)
                except queue.Empty:
                    text = (
                        f"{self.server} has accepted the connection but said nothing for "
                        f"{patience_s:g} s"
                    )
                    raise LostError(Code.PARTY_LOST, text, party=self.server) from None
                if isinstance(answer, VflError):
                    if self._offers_less(answer, joining):
                        break
                    if not isinstance(answer, InterruptedRun):
                        raise answer
                    # The server went away meanwhile: connect and join again.
                    if self._has_lost():
                        # It served for as long as it lived: it gets the whole time to come back.
                        if spoke:
                            give_up_s, spoke = time.monotonic() + self._patience_s, False
                        elif time.monotonic() >= give_up_s:
                            patience_s = self._patience_s
                            text = (
                                f"{self.server} ends every session at once, and has done so "
                                f"for {patience_s:g} s"
                            )
                            raise InputError(Code.UNREACHABLE, text)
                        self._closed.wait(_PAUSE_S)
                        break
                elif answer.HasField("waiting"):
                    spoke = True
                    left_s = max(0.0, min(answer.waiting.deadline_s, _LONGEST_S))
                    patience_s = left_s + self.wait_s
                    missing = [clean(name, 64) for name in answer.waiting.missing[:_MOST_NAMES]]
                    self.on_waiting(missing, left_s, _refusals(answer.waiting))
                elif answer.HasField("start"):
                    return self._checked(answer.start, joining.oldest)
                elif answer.HasField("complete"):
                    self._completed = True
                    return Done(answer.complete.run_id, answer.complete.summary_json)

    def _offers_less(self, error: VflError, joining: Joining) -> bool:
        """Whether to join again in the protocol of the release before, because the server knows
        only that, perhaps.
        """
        if error.code is not Code.PROTOCOL_DIFFERS or joining.oldest > OLDEST:
            return False
        if self._protocol == OLDEST:
            raise self._unspoken or error
        with self._lock:
            self._protocol, self._unspoken, self._ended = OLDEST, error, None
        return True

    def _forget(self) -> None:
        """Forgets what the server said of an earlier generation. Raises its refusal of this party,
        if it sent one.
        """
        while not self._inbox.empty():
            answer = self._inbox.get()
            if isinstance(answer, VflError) and not isinstance(answer, InterruptedRun):
                raise answer

    def _has_lost(self) -> bool:
        """Whether the connection is lost, and all that the server said before is known."""
        with self._lock:
            return self._channel is None and self._inbox.empty()

    def _checked(self, start: control_pb2.Start, oldest: int) -> Start:
        """Checks the answer, because a run id becomes a folder's name here, and the server is not
        trusted with that.
        """
        if not all(
            PLAIN_NAME.fullmatch(name) for name in (start.run_id, start.checkpoint or "none")
        ):
            text = (
                f"{self.server} named a run or a checkpoint with characters that names may not have"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.server)
        if start.exchange_address:
            split_address(start.exchange_address)
        # A server of the release before knows only one.
        protocol = start.protocol or self._protocol
        if not oldest <= protocol <= self._protocol:
            text = (
                f"{self.server} starts the run in protocol {protocol}, and {self.me} joined "
                f"with {self._protocol}"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.server)
        return Start(
            start.run_id,
            start.generation,
            start.checkpoint,
            start.exchange_address,
            tuple(start.left),
            returning=start.returning,
            protocol=protocol,
            anew=clean(start.anew, MOST_WORDS),
        )

    @property
    def me(self) -> str:
        """This party's name."""
        return self.keyring.name

    @property
    def state(self) -> str:
        """One of STATES; any thread may read it."""
        ended = self._ended
        if self._completed:
            return "completed"
        if ended is not None and not isinstance(ended, InterruptedRun):
            return "failed"
        return "running" if self._started and ended is None else "waiting"

    def watch(self, watcher: Callable[[VflError], None] | None) -> None:
        """Has ``watcher`` called, from another thread, when the current generation ends; at once if
        it has ended.
        """
        with self._lock:
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
        with self._lock:
            if self.absent_s and not aggregations and self._ended is None:
                self._again = self._joined

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
        """Reports to the server whether this party, the active one, goes on without a passive party
        that is lost.
        """
        self._say(lenient_message(on))

    def alone(self) -> None:
        """Reports to the server that this party, the active one, needs nobody any more: others may
        leave.
        """
        self._say(alone_message())

    def stopping(self) -> None:
        """Reports to the server that this party was stopped: the others wait for it, as for one
        that was lost.

        Returns when the server has ended the session, so that the others hear of the stop before
        they miss this party, or after ``_STOP_S``. What this party says then is not waited for.
        """
        reader = self._reader
        if self._channel is not None and reader is not None and not self._has_waited:
            self._send(control_pb2.PartyMessage(stopping=control_pb2.Stopping()))
            # The end of the session is no news.
            self._closed.set()
            reader.join(timeout=_STOP_S)
            # Not if another signal has cut that short.
            self._has_waited = True

    def abort(self, error: BaseException) -> None:
        """Reports to the server that this party stops, and why (the public text only)."""
        if self._channel is not None:
            self._send(control_pb2.PartyMessage(abort=to_failure(error)))

    def close(self) -> None:
        """Half-closes the stream and waits for the server's end of it, unless ``stopping`` has
        waited for it.
        """
        self._closed.set()
        with self._lock:
            self._lock.notify_all()
        self._outbox.put(None)
        if self._reader is not None and self._channel is not None:
            self._reader.join(timeout=0.0 if self._has_waited else _CLOSE_S)
        self._disconnect()

    # -- connection
    # ----------------------------------------------------------------------

    def _connect(self, give_up_s: float) -> None:
        """Opens a channel and a stream; retries until ``give_up_s`` (monotonic), unless a retry
        cannot help.
        """
        suspect: Code | None = None
        # A server that is just starting is not reported.
        tell_s = time.monotonic() + _PATIENCE_S
        while True:
            found = connect(
                self.address,
                self.keyring.current(),
                self.server,
                max(0.5, min(3.0, give_up_s - time.monotonic())),
            )
            if isinstance(found, grpc.Channel):
                channel = found
                break
            why = found
            if why.code is not Code.UNREACHABLE and why.code is suspect:
                # Twice the same: a server that is just stopping can look once like one that refuses
                # us.
                raise why
            suspect = why.code
            if time.monotonic() >= give_up_s:
                raise self._gone(why) from None
            if time.monotonic() >= tell_s:
                tell_s = time.monotonic() + _TELL_S
                self.on_waiting([self.server], max(0.0, give_up_s - time.monotonic()), str(why))
        self._open(channel)

    @property
    def _under_way(self) -> bool:
        """Whether this party has begun a run, and not reported: after that the server may be gone
        for good.
        """
        return self._started and "report" not in self._said

    @property
    def _patience_s(self) -> float:
        """How long to look for the server."""
        return max(self.wait_s, self.back_s) if self._under_way else self.wait_s

    def _gone(self, why: VflError) -> VflError:
        """Returns the error with which this party gives up a server that does not answer because of
        ``why``.
        """
        if self._under_way:
            text = f"{self.server} did not come back within {self._patience_s:g} s: {why}"
            return LostError(Code.PARTY_LOST, text, party=self.server)
        return InputError(
            Code.UNREACHABLE, f"the server does not answer (waited {self.wait_s:g} s): {why}"
        )

    def _open(self, channel: grpc.Channel) -> None:
        """Opens a stream."""
        self.meter.name_address(self.address, self.server)
        # The thread that sends for an earlier stream ends.
        self._outbox.put(None)
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = channel.stream_stream(f"/{SERVICE}/Session")(self._sending(outbox))
        self._channel, self._outbox = channel, outbox
        self._reader = threading.Thread(
            target=self._read, args=[call, channel], name="session", daemon=True
        )
        self._reader.start()

    def _disconnect(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        self._outbox.put(None)
        if channel is not None:
            channel.close()

    def _send(self, message: control_pb2.PartyMessage) -> None:
        self._outbox.put(message.SerializeToString())

    def _say(self, message: control_pb2.PartyMessage) -> None:
        """Sends what the server must know in this generation; if it is away, once it is back."""
        body, data = message.WhichOneof("body"), message.SerializeToString()
        with self._lock:
            self._said[str(body)] = data
            if not self._away:
                self._outbox.put(data)

    def _sending(self, outbox: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
        while (data := outbox.get()) is not None:
            self.ledger.add(self.server, CONTROL, CONTROL, "sent", 0, len(data))
            yield data

    def _beat(self) -> None:
        data = control_pb2.PartyMessage(heartbeat=control_pb2.Heartbeat())
        while not self._closed.wait(self.heartbeat_s):
            self.meter.sample()
            self.keyring.tell_again()
            if self._channel is not None:
                self._send(data)

    def _read(self, call: grpc.Call, channel: grpc.Channel) -> None:
        """Reads every message of the server until its end of the stream, in the second thread."""
        ending: VflError = InterruptedRun("the connection to the server was lost")
        try:
            for data in call:
                self.ledger.add(self.server, CONTROL, CONTROL, "received", 0, len(data))
                self._inbox.require_room(self.server)
                message = control_pb2.ServerMessage.FromString(data)
                if message.HasField("stop"):
                    ending = from_failure(message.stop, sender=self.server, me=self.keyring.name)
                    # A stop ends the run, whatever its code is.
                    if isinstance(ending, InterruptedRun):
                        ending = AbortedError(str(ending))
                    break
                if message.HasField("interrupt"):
                    with self._lock:
                        # The run resumes from a checkpoint, and needs another.
                        self._said.pop("report", None)
                    lost = ", ".join(message.interrupt.lost)
                    self._end(InterruptedRun(clean(message.interrupt.reason or f"{lost} was lost")))
                    if message.interrupt.leaving:
                        # The server waits for this end.
                        break
                    continue
                if message.HasField("start"):
                    if message.start.goes_on:
                        self._go_on(message.start)
                        continue
                    self._begin(message.start)
                elif message.HasField("complete"):
                    # The end of the session is no news.
                    self._look_no_more()
                self._inbox.put(message)
        except PeerError as error:
            ending = error
        except DecodeError:
            ending = PeerError(
                Code.MALFORMED_MESSAGE, f"{self.server} sent bytes that are not a control message"
            )
        except grpc.RpcError as error:
            if not self._closed.is_set() and isinstance(error, grpc.Call):
                if _refused(error):
                    ending = LostError(
                        Code.PARTY_LOST, f"{self.server} refused the session: {error.details()}"
                    )
                elif error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    # The channel refuses it; so it would again.
                    text = (
                        f"{self.server} sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"
                    )
                    ending = PeerError(Code.MALFORMED_MESSAGE, text, party=self.server)
        if self._closed.is_set():
            return
        looks = self._lost(ending, channel)
        channel.close()
        if looks:
            try:
                self._look()
            except Exception as error:  # noqa: BLE001 - without this thread the party would wait for ever
                self._end(
                    error
                    if isinstance(error, VflError)
                    else InternalError(f"{type(error).__name__}: {error}")
                )

    def _begin(self, start: control_pb2.Start) -> None:
        """Begins a generation; ``plan`` says whether it may go on without the server."""
        with self._lock:
            self._started, self._ended = True, None
            self._said.clear()
            self._joined.run_id, self._joined.generation = start.run_id, start.generation
            self._joined.protocol = start.protocol or self._joined.protocol
            del self._joined.checkpoints[:]
            del self._joined.held[:]
            self._joined.unfit = ""

    def _go_on(self, start: control_pb2.Start) -> None:
        """Repeats what the server, which is back, must know. Raises PeerError if it speaks of
        another generation.
        """
        with self._lock:
            if self._again is None or not self._away:
                # This party has given the generation up meanwhile.
                return
            if (start.run_id, start.generation) != (self._again.run_id, self._again.generation):
                text = f"{self.server} goes on with another generation than {self.keyring.name}"
                raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.server)
            self._away = False
            self._lock.notify_all()
            for data in self._said.values():
                self._outbox.put(data)
        self._tell("server_back")

    def _lost(self, error: VflError, channel: grpc.Channel) -> bool:
        """Handles the end of the connection. Returns whether this thread is to look for the
        server.
        """
        with self._lock:
            if (
                isinstance(error, InterruptedRun)
                and self._again is not None
                and self._channel is channel
            ):
                self._channel = None
                looks, self._away = not self._away, True
                if looks:
                    self._looker = threading.current_thread()
                return looks
        self._end(error, channel)
        return False

    def _look(self) -> None:
        """Looks for the server, and joins again, while the party goes on; ends the generation after
        ``absent_s``.
        """
        give_up_s = time.monotonic() + self.absent_s
        self._tell("server_away", left_s=self.absent_s)
        while self._looks():
            left_s = give_up_s - time.monotonic()
            if left_s <= 0:
                # It has connected, and said nothing.
                channel = self._channel
                self._end(
                    InterruptedRun(f"{self.server} was away for {self.absent_s:g} s"), channel
                )
                if channel is not None:
                    channel.close()
                return
            if self._channel is None:
                found = connect(
                    self.address, self.keyring.current(), self.server, max(0.5, min(3.0, left_s))
                )
                if isinstance(found, grpc.Channel) and not self._join_again(found):
                    found.close()
            with self._lock:
                self._lock.wait_for(lambda: not self._looks(), timeout=_PAUSE_S)

    def _looks(self) -> bool:
        """Whether this thread is still the one that looks for the server."""
        mine = self._looker is threading.current_thread()
        return mine and self._again is not None and self._away and not self._closed.is_set()

    def _join_again(self, channel: grpc.Channel) -> bool:
        """Joins over ``channel`` with the generation under way. Returns False if nobody looks for
        the server now.
        """
        with self._lock:
            if self._again is None or not self._looks() or self._channel is not None:
                return False
            self._open(channel)
            self._send(control_pb2.PartyMessage(join=self._again))
            return True

    def _tell(self, event: str, **facts: float) -> None:
        """Reports an event; whether anybody can read it does not matter to the run."""
        # Standard output is full, or closed.
        with contextlib.suppress(OSError, ValueError):
            self.emit(event, server=self.server, **facts)

    def _look_no_more(self) -> None:
        """Has a loss of the server end the generation, or be no news if it has ended."""
        with self._lock:
            self._again, self._away = None, False
            self._lock.notify_all()

    def _end(self, error: VflError, channel: grpc.Channel | None = None) -> None:
        """Ends the generation with ``error``; ``channel``: the one that was lost with it.

        All at once, because the main thread may begin to join again as soon as there is no channel:
        this error must not end the generation that it then starts.
        """
        with self._lock:
            if channel is not None:
                if self._channel is not channel:
                    # It was closed here.
                    return
                self._channel = None
            self._again, self._away = None, False
            self._lock.notify_all()
            # The first reason is the cause.
            if self._ended is None or not isinstance(error, InterruptedRun):
                self._ended = error
            watcher = self._watcher
            self._inbox.put(error)
        if watcher is not None:
            watcher(error)


def _refusals(waiting: control_pb2.Waiting) -> str:
    """Says why parties that the run waits for were refused; '' if none was. The words are this
    program's.
    """
    found = []
    for failure in waiting.refused[:_MOST_NAMES]:
        # A code of a later release.
        with contextlib.suppress(ValueError):
            found.append(refusal(clean(failure.party, 64), Code(failure.code)))
    return "; ".join(found)


def _refused(error: grpc.Call) -> bool:
    return error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED)
