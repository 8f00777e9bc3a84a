"""A party's connection to the server: one stream at a time, opened again when it breaks."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import Code, InternalError, InterruptedRun, PeerError, VflError
from vfl_common.identity.keyring import Keyring
from vfl_common.ledger import CONTROL, Ledger
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.answers import why_broken
from vfl_common.rpc.channel import connect
from vfl_common.rpc.counters.tcp import TcpMeter
from vfl_common.rpc.server_away import Loss, SearchStep, ServerAway

SERVICE = control_pb2.DESCRIPTOR.services_by_name["Control"].full_name
# The pause before a session that ended is opened again.
PAUSE_S = 0.5
# How long the server may be silent before that is reported to a person.
_PATIENCE_S = 3.0
# The time between two such reports.
_REPORT_S = 60.0


@dataclass
class Uplink:
    """The connection to the server, which the main thread opens and another thread reads.

    When it is lost in a generation that goes on without the server, the thread that read looks for
    the server, and joins again with the generation.

    Args:
        away: decides whether the generation goes on without the server. ``lock`` guards it.
        handle: called with each message, in the thread that reads. Returns the error with which the
            server ends the session, or None.
        ended: called with the error that has ended the session, and the channel that was lost with
            it, or None.
        emit: reports events to the person or program that started this party.
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
        self._looker: threading.Thread | None = None
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        threading.Thread(target=self._beat, name="heartbeat", daemon=True).start()

    # -- the main thread
    # ----------------------------------------------------------------------

    def connect(
        self, give_up_s: float, on_waiting: Callable[[list[str], float, str], None]
    ) -> VflError | None:
        """Opens a channel and a stream; retries until ``give_up_s`` (monotonic), unless a retry
        cannot help.

        Returns why the server does not answer, or None. Raises its refusal.
        """
        suspect: Code | None = None
        # A server that is still starting is not reported.
        tell_s = time.monotonic() + _PATIENCE_S
        while True:
            left_s = give_up_s - time.monotonic()
            result = connect(
                self.address, self.keyring.current(), self.server, max(0.5, min(3.0, left_s))
            )
            if isinstance(result, grpc.Channel):
                self.open(result)
                return None
            if result.code is not Code.UNREACHABLE and result.code is suspect:
                # Raised only the second time, because a server that is just stopping can look like
                # one that refuses this party.
                raise result
            suspect, now_s = result.code, time.monotonic()
            if now_s >= give_up_s:
                return result
            if now_s >= tell_s:
                tell_s = now_s + _REPORT_S
                on_waiting([self.server], give_up_s - now_s, str(result))

    def open(self, channel: grpc.Channel) -> None:
        """Opens a stream over ``channel``."""
        self.meter.name_address(self.address, self.server)
        # Ends the thread that sends for an earlier stream.
        self._outbox.put(None)
        outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        call = channel.stream_stream(f"/{SERVICE}/Session")(self._sending(outbox))
        self.channel, self._outbox = channel, outbox
        self.reader = threading.Thread(
            target=self.read, args=[call, channel], name="session", daemon=True
        )
        self.reader.start()

    def send(self, data: bytes) -> None:
        """Sends a message over the open stream."""
        self._outbox.put(data)

    def stop_looking(self) -> None:
        """Stops the search for the server: from now on its loss ends the generation."""
        with self.lock:
            self.away.stop_looking()
            self.lock.notify_all()

    def await_looker(self) -> None:
        """Waits for the thread that looks for the server, which may be about to connect."""
        if self._looker is not None:
            self._looker.join()

    def half_close(self) -> None:
        """Ends this party's half of the stream. The end of the session is expected then."""
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
        """Notes that ``channel`` is lost; the caller holds the lock. Returns False if this party
        has closed it.
        """
        if self.channel is not channel:
            return False
        self.channel = None
        return True

    # -- the other threads
    # ----------------------------------------------------------------------

    def _sending(self, outbox: queue.SimpleQueue[bytes | None]) -> Iterator[bytes]:
        while (data := outbox.get()) is not None:
            self.ledger.add(self.server, CONTROL, CONTROL, "sent", 0, len(data))
            yield data

    def _beat(self) -> None:
        heartbeat = control_pb2.PartyMessage(heartbeat=control_pb2.Heartbeat())
        data = heartbeat.SerializeToString()
        while not self.closed.wait(self.heartbeat_s):
            self.meter.sample()
            self.keyring.warn_of_expiry_daily()
            if self.channel is not None:
                self.send(data)

    def read(self, call: grpc.Call, channel: grpc.Channel) -> None:
        """Reads every message of the server until the end of the stream."""
        ending: VflError = InterruptedRun("the connection to the server was lost")
        try:
            for data in call:
                self.ledger.add(self.server, CONTROL, CONTROL, "received", 0, len(data))
                last_word = self.handle(data)
                if last_word is not None:
                    ending = last_word
                    break
        except (PeerError, DecodeError, grpc.RpcError) as error:
            ending = why_broken(error, self.server) or ending
        if self.closed.is_set():
            return
        search = self._handle_loss(ending, channel)
        channel.close()
        if search is not None:
            try:
                self._look(search)
            except Exception as error:  # noqa: BLE001 - without this thread the party would wait for ever
                self.ended(
                    error
                    if isinstance(error, VflError)
                    else InternalError(f"{type(error).__name__}: {error}"),
                    None,
                )

    def _handle_loss(self, error: VflError, channel: grpc.Channel) -> int | None:
        """Handles the end of the connection. Returns the number of the search for the server that
        this thread must begin, or None.
        """
        with self.lock:
            if isinstance(error, InterruptedRun) and self.channel is channel:
                loss = self.away.note_loss(time.monotonic())
                if loss is not Loss.ENDS:
                    self.channel = None
                if loss is Loss.KNOWN:
                    return None
                if loss is Loss.LOOKS:
                    self._looker = threading.current_thread()
                    return self.away.search
        self.ended(error, channel)
        return None

    def _look(self, search: int) -> None:
        """Looks for the server, and joins again, while the party goes on; ends the generation when
        the server has been away for too long.
        """
        self._tell("server_away", left_s=self.away.absent_s)
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
                    self.lock.wait_for(lambda: not self._looks(search), timeout=PAUSE_S)

    def _looks(self, search: int) -> bool:
        """Returns whether a search for the server goes on."""
        return self.away.looks(search) and not self.closed.is_set()

    def _join_again(self, channel: grpc.Channel, search: int) -> bool:
        """Joins over ``channel`` with the current generation. Returns False if the search has
        ended.
        """
        with self.lock:
            if not self._looks(search) or self.channel is not None:
                return False
            self.open(channel)
            self.away.note_question(time.monotonic())
            self.send(control_pb2.PartyMessage(join=self.away.claim).SerializeToString())
            return True

    def go_on(self, start: control_pb2.Start) -> None:
        """Repeats the messages that a server that is back must know. Raises PeerError if it names
        another generation.
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
        self._tell("server_back")

    def _tell(self, event: str, **facts: float) -> None:
        """Reports an event; the run goes on if that fails."""
        # Standard output may be full, or closed.
        with contextlib.suppress(OSError, ValueError):
            self.emit(event, server=self.server, **facts)
