"""The gRPC side of an exchange: a pipe of serialised frames, and the service that moves frames
between the parties' streams and the pipe of the current hub.

gRPC's threads, one for each stream, only move frames. If a stream breaks within a bundle, the
frames that have arrived are kept. The party asks for their number over a new stream and sends the
remaining frames.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import grpc

from vfl_common.bundle import CONTROL, OLDEST, PROTOCOL, Bundle, BundleSpec, Ledger, StepKey
from vfl_common.config.recipe import RESERVED_PHASES
from vfl_common.errors import Code, InternalError, PeerError, VflError
from vfl_common.frames import (
    Allocate,
    Assembly,
    Encoded,
    Received,
    encode,
    encode_passed,
    get_kind_label,
    get_step,
    make_message_error,
    parse_frame,
)
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import control_pb2, exchange_pb2
from vfl_common.rpc.agreement import require_compatible
from vfl_common.rpc.ask import AnswerHeads, LogHeads, make_ask_method, make_confer_method
from vfl_common.rpc.channel import Context, Handler, get_caller_name, stream_handler
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.exchange.hub import BundlePipe, Delivery, ExchangeHub, PartyStream
from vfl_common.rpc.guard import Refusals
from vfl_common.rpc.messages import Joining, join_message, to_failure

SERVICE = exchange_pb2.DESCRIPTOR.services_by_name["Exchange"].full_name
# The phase in the ledger under which unknown phases are counted.
_UNKNOWN = "unknown"
# The maximum number of streams of one party: one in use, and others that are ending or beginning.
MAX_STREAMS = 3
# The maximum number of unread frames of one party. At that number its threads stop reading, and
# gRPC's flow control stops the sender.
_UNREAD_FRAMES = 16

log = logging.getLogger(__name__)

FrameStream: TypeAlias = PartyStream[Received, list[Encoded]]


class FramePipe(BundlePipe[Received, list[Encoded]]):
    """The bundles of one generation as frames; see ``BundlePipe``.

    Args:
        run_id, generation: The run and the generation that a stream must name to attach.
        roster: The parties that send, in the recipe's order.
        in_flight: The maximum number of bundles of one party in flight.
        protocol: The protocol of all parties in this generation; 0 for any protocol that this
            release supports.
        allocate: Allocates buffers for arriving tensors (pinned if the device is a GPU).
    """

    def __init__(
        self,
        run_id: str,
        generation: int,
        roster: Sequence[str],
        *,
        in_flight: int = 1,
        protocol: int = 0,
        allocate: Allocate | None = None,
    ) -> None:
        super().__init__(
            roster,
            in_flight=in_flight,
            max_unread=_UNREAD_FRAMES,
            lock=threading.Condition(threading.Lock()),
            mailbox=queue.SimpleQueue,
        )
        self.run_id, self.generation, self.protocol = run_id, generation, protocol
        self._allocate = allocate

    def begin(self, delivery: Delivery, expect: BundleSpec) -> Assembly:
        return Assembly(delivery.part, expect, party=delivery.party, allocate=self._allocate)

    def pack(
        self, step: StepKey, replies: Mapping[str, Bundle]
    ) -> Iterator[tuple[str, list[Encoded]]]:
        encoded: dict[int, list[Encoded]] = {}
        for party, bundle in replies.items():
            frames = encoded.get(id(bundle)) or encode(step, bundle)
            encoded[id(bundle)] = frames
            yield party, frames

    def answer_passed(self, now: StepKey) -> list[Encoded]:
        return [encode_passed(now)]

    def deliver(self, stream: FrameStream, frame: Received) -> None:
        """Passes one frame of a party to the hub. Waits as ``put`` does."""
        envelope = frame.envelope
        begins = envelope.HasField("header")
        if begins:
            self.note_begin(stream, get_step(envelope), get_kind_label(envelope))
        self.put(stream, frame, begins=begins, ends=envelope.last)

    def resume(self, stream: FrameStream, step: StepKey) -> exchange_pb2.Resume:
        """Returns how much of a bundle has arrived over the party's broken streams. The remaining
        frames come over ``stream``.
        """
        with self._lock:
            party = stream.party
            first, answer = self._bundle_of(party, step), self._answer_to(party, step)
            if first is None:
                if answer is None:
                    return exchange_pb2.Resume()
                self._resend(stream, answer)
                return exchange_pb2.Resume(whole=True)
            bundles = [*self._earlier.get(party, ()), self._incoming[party]]
            frames = 0
            # ``bundles`` has the order in which they were sent.
            for bundle in bundles[bundles.index(first) :]:
                reply = self._answer_to(party, bundle.step)
                if reply is not None:
                    self._resend(stream, reply)
                stream.incoming, bundle.stream = bundle, stream
                frames += bundle.parts
            return exchange_pb2.Resume(frames=frames, whole=first.whole or answer is not None)


class ExchangeService:
    """The gRPC service of an exchange: admits the parties of ``roster``, and moves frames between
    their streams and the current hub.

    ``phases``: the phases of the recipe. All other phases are counted as ``unknown``, so that a
    peer cannot make the ledger grow. ``joining``: the facts with which this party joins, with which
    callers can ask whether they are compatible; None if nobody may ask. ``confer``: answers the
    head of a caller's record; None if this party has no record.
    """

    def __init__(
        self,
        roster: Sequence[str],
        keyring: Keyring,
        ledger: Ledger,
        meter: TcpMeter,
        *,
        phases: Collection[str],
        attach_timeout_s: float,
        joining: Joining | None = None,
        confer: AnswerHeads | None = None,
    ) -> None:
        self._confer_callback = confer
        self._joining = joining
        self._roster, self._keyring = frozenset(roster), keyring
        self._phases = RESERVED_PHASES.union(phases)
        self._ledger, self._meter = ledger, meter
        self._attach_timeout_s = attach_timeout_s
        self._changed = threading.Condition()
        self._hub: ExchangeHub[FramePipe] | None = None
        # The number of streams that have attached.
        self._num_attached = 0
        # The number of streams of each party, attached or not.
        self._num_streams: Counter[str] = Counter()
        self._closed = False
        self.refusals = Refusals()

    def handler(self) -> Handler:
        """Returns the service's handler for the gRPC server."""
        methods: dict[str, Callable[[Iterator[bytes], Context], Iterator[bytes]]] = {}
        methods["Swap"] = self._swap
        if self._joining is not None:
            methods["Ask"] = make_ask_method(self._keyring, self._require_place, self._ask)
        if self._confer_callback is not None:
            methods["Confer"] = make_confer_method(
                self._keyring, self._require_place, self._ledger, self._confer
            )
        return stream_handler(SERVICE, **methods)

    def _confer(self, party: str, head: LogHeads) -> LogHeads:
        """Answers the head of a party's record. If the record was rewritten, ends the
        generation.
        """
        assert self._confer_callback is not None  # noqa: S101 - the method is registered only with it
        try:
            return self._confer_callback(party, head)
        except VflError as error:
            # A party may learn of a new generation a little earlier than this process. If the party
            # reported this error to the server first, this process would end with that report.
            with self._changed:
                self._changed.wait_for(self._is_open, timeout=self._attach_timeout_s)
                hub = self._hub
            if hub is not None:
                hub.end(error)
            raise

    def _is_open(self) -> bool:
        """Returns whether a generation goes on, or the service is closed."""
        return self._closed or (self._hub is not None and self._hub.pipe.ended is None)

    def _ask(self, party: str, join: control_pb2.Join) -> None:
        """Raises PeerError if a party's protocol, recipe or plug-ins are not compatible with this
        party's.
        """
        if self._joining is not None:
            require_compatible(party, join, self._keyring.name, join_message(self._joining).join)

    def use(self, hub: ExchangeHub[FramePipe] | None) -> None:
        """Sets the hub to which streams attach from now on."""
        with self._changed:
            self._hub = hub
            self._changed.notify_all()

    def close(self) -> None:
        """Refuses streams that wait for a hub from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    @property
    def awaited(self) -> list[str]:
        """The parties whose bundle for the current step the hub is waiting for."""
        hub = self._hub
        return [] if hub is None else hub.awaited

    def wait_until_idle(self, timeout_s: float) -> None:
        """Waits at most ``timeout_s`` until all streams are closed. Parties close their streams
        after the last reply.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_attached == 0, timeout=timeout_s)

    def _swap(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        gone = threading.Event()

        def leave() -> None:
            gone.set()
            with self._changed:
                self._changed.notify_all()

        if not context.add_callback(leave):
            # The stream has ended already.
            return
        # None until the stream has attached.
        pipe: FramePipe | None = None
        try:
            with self._admit(context) as party:
                self._meter.name_caller(context.peer(), party)
                pipe, resume = self._attach(requests, party, gone)
                stream = pipe.open(party)
                # If this returns False, the stream has ended already.
                if context.add_callback(stream.close):
                    yield from self._serve_stream(pipe, stream, requests, resume)
        except Exception as error:  # noqa: BLE001 - the peer gets only the public text of any error
            if isinstance(error, PeerError) and pipe is None and not error.retryable:
                self.refusals.note(error.party, error)
            # gRPC raises RpcError if the stream breaks.
            if not isinstance(error, VflError | grpc.RpcError):
                self._end_for_defect(pipe, error)
            yield exchange_pb2.Frame(failure=to_failure(error)).SerializeToString()

    def _end_for_defect(self, pipe: FramePipe | None, error: Exception) -> None:
        """Logs a defect of this program and ends the generation, which would otherwise wait for the
        party of this stream for ever.
        """
        log.exception("internal error", extra={"event": "failed"})
        hub = self._hub
        if pipe is None and hub is not None:
            pipe = hub.pipe
        if pipe is not None:
            pipe.end(InternalError(f"{type(error).__name__}: {error}"))

    @contextmanager
    def _admit(self, context: Context) -> Iterator[str]:
        """Counts the caller's stream while the block runs, and yields the caller's name.

        Raises PeerError if the caller's certificate is revoked, if the caller does not take part in
        this exchange, or if it has too many streams, each of which takes a thread.
        """
        party = get_caller_name(context, self._keyring)
        self._require_place(party)
        with self._changed:
            if self._num_streams[party] >= MAX_STREAMS:
                raise PeerError(
                    Code.NAME_TAKEN, f"{party} already has {MAX_STREAMS} open streams", party=party
                )
            self._num_streams[party] += 1
        try:
            yield party
        finally:
            with self._changed:
                self._num_streams[party] -= 1

    def _require_place(self, party: str) -> None:
        if party not in self._roster:
            raise PeerError(
                Code.ROLE_MISMATCH, f"{party} does not take part in this exchange", party=party
            )

    def _serve_stream(
        self,
        pipe: FramePipe,
        stream: FrameStream,
        requests: Iterator[bytes],
        resume: StepKey | None,
    ) -> Iterator[bytes]:
        with self._changed:
            self._num_attached += 1
        try:
            yield from self._exchange_frames(pipe, stream, requests, resume)
        except PeerError as error:
            # If a party of this run breaks the protocol, the generation ends.
            pipe.end(error)
            raise
        finally:
            # The bytes are counted now, because the party closes its connection once the stream has
            # ended.
            self._meter.sample()
            with self._changed:
                self._num_attached -= 1
                self._changed.notify_all()

    def _attach(
        self, requests: Iterator[bytes], party: str, gone: threading.Event
    ) -> tuple[FramePipe, StepKey | None]:
        """Returns the pipe of the generation that the party names, and the step that the party
        wants to resume, if any.

        ``gone``: an event that is set when the stream has ended, so that a caller that has left
        does not keep its thread.
        """
        data = next(requests, b"")
        frame = parse_frame(data, party=party).envelope
        if not frame.HasField("attach"):
            raise make_message_error(f"{party} opened a stream without attaching", party)
        attach = frame.attach
        self._ledger.add(party, CONTROL, CONTROL, "received", 0, len(data))
        if not OLDEST <= attach.protocol <= PROTOCOL:
            raise PeerError(
                Code.PROTOCOL_DIFFERS,
                f"{party} speaks protocol {attach.protocol}, and this party {OLDEST} and "
                f"{PROTOCOL}. Install the same version at both.",
                party=party,
            )

        def is_settled() -> bool:
            return (
                self._closed
                or gone.is_set()
                or (self._hub is not None and self._hub.pipe.generation >= attach.generation)
            )

        # A party may learn of a new generation a little earlier than this process.
        with self._changed:
            self._changed.wait_for(is_settled, timeout=self._attach_timeout_s)
            pipe = self._hub.pipe if self._hub is not None else None
        if pipe is None or (pipe.run_id, pipe.generation) != (attach.run_id, attach.generation):
            raise PeerError(
                Code.STALE_GENERATION, f"{party} attached to another generation", party=party
            )
        if pipe.protocol not in (0, attach.protocol):
            raise PeerError(
                Code.PROTOCOL_DIFFERS,
                f"{party} attached with protocol {attach.protocol}, but all have agreed on "
                f"{pipe.protocol}",
                party=party,
            )
        resume = attach.resume
        return pipe, StepKey(resume.phase, resume.round, resume.batch) if attach.HasField(
            "resume"
        ) else None

    def _exchange_frames(
        self,
        pipe: FramePipe,
        stream: FrameStream,
        requests: Iterator[bytes],
        resume: StepKey | None,
    ) -> Iterator[bytes]:
        add, party, whole = self._ledger.add, stream.party, False
        if resume is not None:
            state = pipe.resume(stream, resume)
            whole, data = state.whole, exchange_pb2.Frame(resume=state).SerializeToString()
            add(party, CONTROL, CONTROL, "sent", 0, len(data))
            yield data
        ahead = pipe.in_flight > 1
        # With several bundles in flight, another thread reads the next bundles while a reply is
        # computed.
        if ahead:
            reader = threading.Thread(
                target=self._read,
                args=(pipe, stream, requests),
                name=f"bundles-{party}",
                daemon=True,
            )
            reader.start()
        while ahead or whole or self._pass_bundle(pipe, stream, requests):
            whole = False
            reply = stream.outbox.get()
            if reply is None:
                return
            if isinstance(reply, Exception):
                raise reply
            for encoded in reply:
                add(
                    party,
                    encoded.phase,
                    encoded.kind,
                    "sent",
                    encoded.payload_bytes,
                    len(encoded.data),
                )
                yield encoded.data

    def _read(self, pipe: FramePipe, stream: FrameStream, requests: Iterator[bytes]) -> None:
        """Passes on all bundles of a stream. Errors are raised in the thread that sends replies."""
        try:
            while self._pass_bundle(pipe, stream, requests):
                pass
            stream.outbox.put(None)
        except Exception as error:  # noqa: BLE001 - the thread that sends replies raises it
            stream.outbox.put(error)

    def _pass_bundle(self, pipe: FramePipe, stream: FrameStream, requests: Iterator[bytes]) -> bool:
        """Passes on one bundle, or the rest of one. Returns False if the party has closed its side
        of the stream.
        """
        party = stream.party
        phase, kind = (
            (stream.incoming.step.phase, stream.incoming.kind)
            if stream.incoming is not None
            else ("", "")
        )
        for data in requests:
            frame = parse_frame(data, party=party)
            envelope = frame.envelope
            if envelope.HasField("header"):
                phase, kind = envelope.step.phase, get_kind_label(envelope)
            counted_phase = phase if phase in self._phases else _UNKNOWN
            self._ledger.add(party, counted_phase, kind, "received", frame.data.nbytes, len(data))
            pipe.deliver(stream, frame)
            if envelope.last or not stream.outbox.empty():
                return True
        return False
