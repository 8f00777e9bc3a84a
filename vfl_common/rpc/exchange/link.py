"""The asking side of an exchange over one gRPC stream. When the stream breaks, bundles without a
reply resume over a new stream.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

import grpc

from vfl_common.bundle import (
    CONTROL,
    PROTOCOL,
    Bundle,
    BundleSpec,
    Ledger,
    Link,
    StepKey,
    StepPassed,
)
from vfl_common.errors import Code, InputError, LostError, PeerError, VflError
from vfl_common.frames import (
    Allocate,
    Assembly,
    Encoded,
    Received,
    encode,
    get_kind_label,
    get_step,
    make_message_error,
    parse_frame,
)
from vfl_common.pb.vfl.v1 import exchange_pb2
from vfl_common.rpc.exchange.service import SERVICE
from vfl_common.rpc.messages import from_failure

_RETRY_S = 0.2
# The maximum time to try a peer that has not answered yet in this generation.
_FIRST_CONTACT_S = 60.0
# The time without a connection after which the person is told.
_REPORT_AFTER_S = 5.0
_CLOSE_S = 5.0
# The time limit of a call that exchanges heads of records.
_CONFER_S = 30.0


@dataclass(frozen=True)
class LinkEnds:
    """The two ends of a link (this party ``me`` and its ``peer``), the generation of the run, and
    the generation's ``protocol``.
    """

    me: str
    peer: str
    run_id: str
    generation: int
    protocol: int = PROTOCOL


class ExchangeLink(Link):
    """A ``Link`` for one generation of a run; see ``vfl_common.bundle.Link``.

    Args:
        channel: Creates a channel to the peer. It is called again after a stream broke; an
            InputError that it raises counts as another break.
        ends: The two parties and the generation.
        reconnect_s: The maximum time to try to reach the peer again.
        timeout_s: The maximum time that a connected peer may take for one step.
        explain: Returns one sentence that explains why the connection fails.
        on_waiting: Called once, with the seconds left and the sentence of ``explain``, if the peer
            stays unreachable.
    """

    def __init__(
        self,
        channel: Callable[[], grpc.Channel],
        ends: LinkEnds,
        ledger: Ledger,
        *,
        reconnect_s: float,
        timeout_s: float,
        allocate: Allocate | None = None,
        explain: Callable[[], str] = lambda: "",
        on_waiting: Callable[[float, str], None] = lambda _left_s, _why: None,
    ) -> None:
        self._make_channel, self._explain, self._on_waiting = channel, explain, on_waiting
        self._ends, self._peer = ends, ends.peer
        self._ledger = ledger
        self._reconnect_s, self._timeout_s, self._allocate = reconnect_s, timeout_s, allocate
        self._lock = threading.Lock()
        self._ended: VflError | None = None
        self._channel: grpc.Channel | None = None
        self._call: grpc.Call | None = None
        self._requests: queue.SimpleQueue[Encoded | None] = queue.SimpleQueue()
        # The bundles without a reply, in order. After a break, the frames that the peer lacks are
        # sent over another stream.
        self._unanswered: deque[tuple[StepKey, list[Encoded]]] = deque()
        # Whether a stream has broken since the oldest bundle without a reply was sent.
        self._has_broken = False
        self._give_up_s: float | None = None
        # Whether the peer has answered in this generation.
        self._has_answered = False
        self._reported = False
        self._has_timeout = True
        # The time at which the current wait for a reply began, and the step of the reply.
        self._wait_start: tuple[float, StepKey] | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._watch_timeout, name="link-watchdog", daemon=True).start()

    @property
    def peer(self) -> str:
        """The name of the party at the other end."""
        return self._peer

    def unhurried(self) -> None:
        self._has_timeout = False

    def send(self, step: StepKey, bundle: Bundle) -> None:
        frames = encode(step, bundle)
        if not self._unanswered:
            self._has_broken, self._give_up_s = False, None
        self._unanswered.append((step, frames))
        try:
            if self._call is None:
                self._connect()
            else:
                for frame in frames:
                    self._requests.put(frame)
        except grpc.RpcError as error:
            # The call of ``receive`` sends the bundle again.
            self._handle_break(step, error)

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        while True:
            try:
                self._wait_start = (time.monotonic(), step)
                reply = self._receive(self._call or self._connect(), step, expect)
                self._note_reply()
                return reply
            except grpc.RpcError as error:
                self._handle_break(step, error)

    def confer(self, message: bytes, *, once: bool = False) -> bytes | None:
        """Exchanges heads of records with the peer over this link's connection. Returns the peer's
        answer; None if the peer has no record.

        Raises InterruptedRun if this generation has ended, LostError if the peer cannot be reached
        or does not answer. ``once``: whether to try only once, and to return None if that fails.
        """
        # The step that errors name. The call comes before the first exchange.
        step = StepKey("open", 0, 0)
        if not self._unanswered:
            self._has_broken, self._give_up_s = False, None
        while True:
            try:
                if self._call is None:
                    self._connect()
                channel = self._channel
                if channel is None:
                    raise _StreamEnded
                method = channel.unary_unary(f"/{SERVICE}/Confer")
                self._ledger.add(self._peer, CONTROL, CONTROL, "sent", 0, len(message))
                data = bytes(method(message, timeout=min(self._timeout_s, _CONFER_S)))
            except grpc.RpcError as error:
                if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return None
                if once:
                    return None
                self._handle_break(step, error)
            else:
                self._ledger.add(self._peer, CONTROL, CONTROL, "received", 0, len(data))
                self._has_answered = True
                return data

    def _note_reply(self) -> None:
        """Removes the oldest bundle without a reply, because its reply has arrived."""
        self._wait_start, self._has_timeout = None, True
        self._unanswered.popleft()

    def _connect(self) -> grpc.Call:
        """Opens a stream and sends the bundles without a reply. After a break, sends only the
        frames that the peer lacks.
        """
        resumed_step = self._unanswered[0][0] if self._has_broken and self._unanswered else None
        call = self._open_stream(resumed_step)
        received = self._count_received(call) if resumed_step is not None else 0
        for frame in islice(
            (frame for _, frames in self._unanswered for frame in frames), received, None
        ):
            self._requests.put(frame)
        return call

    def _count_received(self, call: grpc.Call) -> int:
        """Returns the number of frames of the bundles without a reply that the peer has received
        over broken streams.

        These are the first frames, because frames arrive in the order in which they were sent.
        """
        num_first, total = (
            len(self._unanswered[0][1]),
            sum(len(frames) for _, frames in self._unanswered),
        )
        for data in call:
            frame = self._parse(data).envelope
            self._ledger.add(self._peer, CONTROL, CONTROL, "received", 0, len(data))
            if not frame.HasField("resume"):
                raise make_message_error(
                    f"{self._peer} did not report how many frames it has received", self._peer
                )
            if frame.resume.frames > total:
                raise make_message_error(
                    f"{self._peer} reports more frames than were sent (got {frame.resume.frames}, "
                    f"sent {total})",
                    self._peer,
                )
            # The connection is back, so the time to reconnect starts again at the next break.
            self._give_up_s = None
            return (
                max(num_first, frame.resume.frames) if frame.resume.whole else frame.resume.frames
            )
        raise _StreamEnded

    def _handle_break(self, step: StepKey, error: grpc.RpcError) -> None:
        """Drops a broken stream, and returns after a pause if a new stream may be opened.

        Raises the error that ended the generation, or LostError after ``reconnect_s``.
        """
        self._wait_start, self._has_broken = None, True
        self._drop_stream()
        if self._ended is not None:
            raise self._ended from None
        # A peer that has never answered probably listens at another address or behind a firewall,
        # so waiting longer does not help.
        limit_s = (
            self._reconnect_s if self._has_answered else min(self._reconnect_s, _FIRST_CONTACT_S)
        )
        now_s = time.monotonic()
        self._give_up_s = self._give_up_s or now_s + limit_s
        if now_s >= self._give_up_s:
            reason = (_is_unreachable(error) and self._explain()) or _describe_break(error)
            raise LostError(
                Code.PARTY_LOST,
                f"{self._ends.me} could not reach {self._peer} for {limit_s:g} s",
                party=self._peer,
            ).privately(
                f"{self._peer} could not be reached for {limit_s:g} s at {step}: {reason}"
            ) from None
        left_s = self._give_up_s - now_s
        if not self._reported and left_s <= limit_s - _REPORT_AFTER_S and _is_unreachable(error):
            self._reported = True
            self._on_waiting(left_s, self._explain())
        self._closed.wait(_RETRY_S)

    def end(self, error: VflError) -> None:
        """Ends this generation: the current or the next call of ``receive`` raises ``error``. Any
        thread may call this.
        """
        with self._lock:
            if self._ended is None:
                self._ended = error
            call = self._call
        if call is not None:
            call.cancel()

    def close(self) -> None:
        """Half-closes the stream, so that the peer sees a regular end, and closes the channel."""
        self._closed.set()
        call = self._call
        self._requests.put(None)
        if call is not None and self._ended is None:
            cancel_timer = threading.Timer(_CLOSE_S, call.cancel)
            cancel_timer.daemon = True
            cancel_timer.start()
            with contextlib.suppress(grpc.RpcError):
                # No more replies are due. The loop waits until the peer ends the stream.
                for _ in call:
                    pass
            cancel_timer.cancel()
        self._drop_stream()

    def _open_stream(self, resume: StepKey | None) -> grpc.Call:
        """Opens a new stream. ``resume``: the step of the first bundle to resume over it, or
        None.
        """
        try:
            self._channel = self._make_channel()
        except InputError as error:
            raise _NotReached(str(error)) from None
        requests: queue.SimpleQueue[Encoded | None] = queue.SimpleQueue()
        method = self._channel.stream_stream(f"/{SERVICE}/Swap")
        frame = exchange_pb2.Frame()
        attach = frame.attach
        attach.run_id, attach.generation, attach.protocol = (
            self._ends.run_id,
            self._ends.generation,
            self._ends.protocol,
        )
        if resume is not None:
            frame.attach.resume.phase, frame.attach.resume.round, frame.attach.resume.batch = resume
        requests.put(Encoded(frame.SerializeToString(), 0, CONTROL, CONTROL))
        call = method(self._yield_frames(requests))
        with self._lock:
            self._call, self._requests = call, requests
            ended = self._ended
        if ended is not None:
            self._drop_stream()
            raise ended
        return call

    def _yield_frames(self, requests: queue.SimpleQueue[Encoded | None]) -> Iterator[bytes]:
        """Yields the frames to gRPC's sending thread. It never raises."""
        while (frame := requests.get()) is not None:
            self._ledger.add(
                self._peer, frame.phase, frame.kind, "sent", frame.payload_bytes, len(frame.data)
            )
            yield frame.data

    def _receive(self, call: grpc.Call, step: StepKey, expect: BundleSpec) -> Bundle:
        assembly: Assembly | None = None
        kind = ""
        for data in call:
            frame = self._parse(data)
            if frame.envelope.HasField("passed"):
                self._ledger.add(self._peer, CONTROL, CONTROL, "received", 0, len(data))
                self._note_reply()
                passed = frame.envelope.passed
                raise StepPassed(StepKey(passed.phase, passed.round, passed.batch))
            if frame.envelope.HasField("header"):
                kind = get_kind_label(frame.envelope)
                if get_step(frame.envelope) != step:
                    raise PeerError(
                        Code.STEP_OUT_OF_ORDER,
                        f"{self._peer} answered {get_step(frame.envelope)} instead of {step}",
                        party=self._peer,
                    )
                assembly = Assembly(frame, expect, party=self._peer, allocate=self._allocate)
            self._ledger.add(self._peer, step.phase, kind, "received", frame.data.nbytes, len(data))
            if assembly is None:
                raise make_message_error(
                    f"{self._peer} sent a frame that belongs to no bundle", self._peer
                )
            bundle = assembly.feed(frame)
            if bundle is not None:
                return bundle
        raise _StreamEnded

    def _parse(self, data: bytes) -> Received:
        """Parses a frame. If it contains a failure instead of an answer, raises the failure's
        error.
        """
        frame = parse_frame(data, party=self._peer)
        if frame.envelope.HasField("failure"):
            failure = frame.envelope.failure
            # The peer has not started this generation yet, or is already in a later one.
            if failure.code == int(Code.STALE_GENERATION):
                raise _StreamEnded
            raise from_failure(failure, sender=self._peer, me=self._ends.me)
        self._has_answered = True
        return frame

    def _watch_timeout(self) -> None:
        """Ends the link if a connected peer does not answer in time. gRPC's deadlines cannot be
        used, because they apply to whole streams.
        """
        while not self._closed.wait(min(1.0, self._timeout_s / 4)):
            wait_start = self._wait_start
            if (
                self._has_timeout
                and wait_start is not None
                and time.monotonic() - wait_start[0] > self._timeout_s
            ):
                self.end(
                    LostError(
                        Code.STEP_TIMEOUT,
                        f"{self._peer} took longer than {self._timeout_s:g} s for {wait_start[1]} "
                        "(run.step_timeout_s)",
                        party=self._peer,
                    )
                )
                return

    def _drop_stream(self) -> None:
        with self._lock:
            call, self._call = self._call, None
            channel, self._channel = self._channel, None
        self._requests.put(None)
        if call is not None:
            call.cancel()
        if channel is not None:
            channel.close()


class _StreamEnded(grpc.RpcError):  # type: ignore[misc]
    """The peer closed the stream before it replied."""


class _NotReached(grpc.RpcError):  # type: ignore[misc]
    """The peer has not been reached yet."""


def _is_unreachable(error: grpc.RpcError) -> bool:
    return isinstance(error, _NotReached) or (
        isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNAVAILABLE
    )


def _describe_break(error: grpc.RpcError) -> str:
    return error.code().name if isinstance(error, grpc.Call) else "the stream ended"
