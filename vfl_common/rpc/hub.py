"""The computing side of an exchange over gRPC.

gRPC's threads only move frames: one thread a stream puts each frame into one queue, and the main thread, inside
``collect``, does everything else (order, specs, assembly). A bundle that a party sends again, over a new stream after
the old one broke, never reaches the queue: the stream's own thread sees to it that it gets the reply that was, or will
be, computed, even where the main thread does not collect for a long time, or never again.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from vfl_common.bundle import Bundle, BundleSpec, StepKey
from vfl_common.errors import Code, InternalError, LostError, PeerError, VflError
from vfl_common.ledger import CONTROL, Ledger
from vfl_common.pb.vfl.v1 import exchange_pb2
from vfl_common.rpc.arrivals import GiveUp, Proceed, decide
from vfl_common.rpc.channel import PROTOCOL, Context, Handler, caller, stream_handler
from vfl_common.rpc.failures import to_failure
from vfl_common.rpc.tcp import TcpMeter
from vfl_common.wire.frames import Allocate, Assembly, Encoded, encode, label, malformed, parse_frame, step_of

SERVICE = exchange_pb2.DESCRIPTOR.services_by_name["Exchange"].full_name
MAX_STREAMS = 3  # of one party: the one in use, and others that are ending or beginning
_LONGEST_WAIT_S = 3600.0  # at once; then it is decided again
_UNREAD_FRAMES = 16  # of one stream, before its thread stops reading and gRPC's flow control holds the sender


class _Stream:
    """One party's open stream. ``outbox`` is the way from the main thread to the stream's thread."""

    def __init__(self, party: str) -> None:
        self.party = party
        self.outbox: queue.SimpleQueue[list[Encoded] | VflError | None] = queue.SimpleQueue()
        self.delivered = 0  # frames; counted by the stream's thread alone
        self.taken = 0  # counted by the main thread alone
        self.closed = False
        self.repeating: StepKey | None = None  # the stream's thread only: what is coming in was sent before
        self.assembly: Assembly | None = None  # the main thread only

    def close(self) -> None:
        self.closed = True
        self.outbox.put(None)


_Event = tuple[_Stream, exchange_pb2.Frame] | VflError


class ExchangeHub:
    """A ``Hub`` for one generation of a run; see ``vfl_common.link.Hub``.

    Args:
        run_id, generation: a stream attaches with both.
        roster: the parties that send, in the recipe's order.
        timeout_s: how long a living party may take for one step.
        from_first: a step's time runs from the first bundle's arrival, not from ``collect``: what the parties do on
            their own before it takes as long as it takes.
        allocate: buffers for what arrives (pinned where the device is a GPU).
    """

    def __init__(
        self,
        run_id: str,
        generation: int,
        roster: Sequence[str],
        ledger: Ledger,
        *,
        timeout_s: float,
        allocate: Allocate | None = None,
        from_first: bool = False,
    ) -> None:
        self.run_id, self.generation, self.roster = run_id, generation, tuple(roster)
        self.ledger = ledger
        self._timeout_s, self._allocate, self._from_first = timeout_s, allocate, from_first
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        self._expect: BundleSpec | None = None  # the main thread only
        self._hurried = True  # the main thread only
        self._lock = threading.Lock()  # guards what follows
        self._ended: VflError | None = None
        self._streams: dict[str, _Stream] = {}  # the newest of each party; older ones are closed
        self._step: StepKey | None = None
        self._arrived: dict[str, Bundle] = {}
        self._owed: dict[str, _Stream] = {}  # where the reply of a party that has arrived goes
        self._replies: dict[str, tuple[StepKey, list[Encoded]]] = {}  # the last reply to each, to give it again

    # -- any thread ---------------------------------------------------------------------------------------------

    def open(self, party: str) -> _Stream:
        """A stream for ``party``; an older one of its is closed."""
        stream = _Stream(party)
        with self._lock:
            older, self._streams[party] = self._streams.get(party), stream
            if older is not None:
                older.close()
            if self._ended is not None:
                stream.outbox.put(self._ended)
        return stream

    @property
    def absent(self) -> list[str]:
        """The parties that have opened no stream yet."""
        with self._lock:
            return [party for party in self.roster if party not in self._streams]

    def deliver(self, stream: _Stream, frame: exchange_pb2.Frame) -> None:
        """Passes one frame to the main thread; waits while too many are unread.

        The frames of a bundle that this party has sent before go no further: its reply is due here from now on.
        """
        if frame.HasField("header"):
            stream.repeating = self._repeated(stream.party, step_of(frame))
        if stream.repeating is not None:
            if frame.last:
                self._repeat(stream, stream.repeating)
            return
        while stream.delivered - stream.taken >= _UNREAD_FRAMES:
            if stream.closed or self._ended is not None:
                return
            time.sleep(0.001)
        stream.delivered += 1
        self._events.put((stream, frame))

    def end(self, error: VflError) -> None:
        """Ends this generation: ``collect`` raises ``error``, the streams are told and closed. Repeats do nothing."""
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            streams = list(self._streams.values())
        self._events.put(error)
        for stream in streams:
            stream.outbox.put(error)

    def _repeated(self, party: str, step: StepKey) -> StepKey | None:
        """``step`` where a bundle of ``party`` for it has arrived already, or was answered."""
        with self._lock:
            answered = self._replies.get(party)
            known = (answered is not None and answered[0] == step) or (step == self._step and party in self._arrived)
            return step if known else None

    def _repeat(self, stream: _Stream, step: StepKey) -> None:
        """The whole of a repeated bundle is in: its reply, now or as soon as it is computed."""
        stream.repeating = None
        with self._lock:
            answered = self._replies.get(stream.party)
            if answered is not None and answered[0] == step:
                stream.outbox.put(answered[1])
            else:
                self._owed[stream.party] = stream

    # -- the main thread ----------------------------------------------------------------------------------------

    def unhurried(self) -> None:
        self._hurried = False

    def collect(
        self, step: StepKey, expect: BundleSpec, arrived: Callable[[str, Bundle], None] | None = None
    ) -> dict[str, Bundle]:
        if self._arrived:
            raise InternalError(f"collect({step}) before the reply to {self._step}")
        with self._lock:
            self._step, self._expect, self._owed = step, expect, {}
        now_s = time.monotonic()
        started_s = None if self._from_first else now_s
        while True:
            if self._ended is not None:
                raise self._ended
            waited_s = 0.0 if started_s is None else now_s - started_s
            timeout_s = self._timeout_s if self._hurried else math.inf
            decision = decide(waited_s, self._arrived.keys(), self.roster, timeout_s)
            if isinstance(decision, Proceed):
                self._hurried = True
                return {party: self._arrived[party] for party in self.roster}
            if isinstance(decision, GiveUp):
                late = ", ".join(decision.late)
                text = f"{late} took longer than {self._timeout_s:g} s for {step} (run.step_timeout_s)"
                raise LostError(Code.STEP_TIMEOUT, text, public=text, party=decision.late[0])
            try:
                event = self._events.get(timeout=min(decision.for_s, _LONGEST_WAIT_S))
            except queue.Empty:
                pass
            else:
                if isinstance(event, VflError):
                    raise event
                party = self._take(*event)
                if arrived is not None and party is not None:
                    arrived(party, self._arrived[party])
            now_s = time.monotonic()
            if started_s is None and self._arrived:
                started_s = now_s

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        if step != self._step or set(replies) != set(self._arrived):
            raise InternalError(f"reply({step}) does not answer what was collected at {self._step}")
        encoded: dict[int, list[Encoded]] = {}  # one bundle may be the reply to all
        for party, bundle in replies.items():  # the first reply is on its way while the second is encoded
            frames = encoded.get(id(bundle)) or encode(step, bundle)
            encoded[id(bundle)] = frames
            with self._lock:
                self._replies[party] = (step, frames)
                self._owed[party].outbox.put(frames)
        with self._lock:
            self._arrived, self._owed = {}, {}

    def _take(self, stream: _Stream, frame: exchange_pb2.Frame) -> str | None:
        """One frame, in the order of its stream; the party whose bundle is complete with it."""
        stream.taken += 1
        if stream.closed:  # its party sends the whole bundle again, over another stream
            return None
        if frame.HasField("header"):
            self._begin(stream, frame)
        if stream.assembly is None:
            raise malformed(f"{stream.party} sent a frame that belongs to no bundle", stream.party)
        bundle = stream.assembly.feed(frame)
        if bundle is None:
            return None
        stream.assembly = None
        with self._lock:
            if stream.closed:
                return None
            self._arrived[stream.party] = bundle
            self._owed[stream.party] = stream
            return stream.party

    def _begin(self, stream: _Stream, frame: exchange_pb2.Frame) -> None:
        """The first frame of a bundle."""
        step = step_of(frame)
        if step != self._step or self._expect is None:
            text = f"{stream.party} sent {step} while {self._step} is under way"
            raise PeerError(Code.STEP_OUT_OF_ORDER, text, public=text, party=stream.party)
        stream.assembly = Assembly(frame, self._expect, party=stream.party, allocate=self._allocate)


class ExchangeService:
    """The gRPC side: lets parties of ``roster`` in and moves frames between their streams and the current hub."""

    def __init__(self, roster: Sequence[str], ledger: Ledger, meter: TcpMeter, *, attach_timeout_s: float) -> None:
        self._roster = frozenset(roster)
        self._ledger, self._meter = ledger, meter
        self._attach_timeout_s = attach_timeout_s
        self._changed = threading.Condition()
        self._hub: ExchangeHub | None = None
        self._open = 0  # streams that have attached
        self._held: Counter[str] = Counter()  # streams of each party, attached or not
        self._closed = False

    def handler(self) -> Handler:
        return stream_handler(SERVICE, "Swap", self._swap)

    def use(self, hub: ExchangeHub | None) -> None:
        """From now on streams attach to ``hub``."""
        with self._changed:
            self._hub = hub
            self._changed.notify_all()

    def close(self) -> None:
        """Streams that wait for a hub are refused from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def wait_until_idle(self, timeout_s: float) -> None:
        """Waits, at most so long, until no stream is open: the parties end theirs once they have the last reply."""
        with self._changed:
            self._changed.wait_for(lambda: self._open == 0, timeout=timeout_s)

    def _swap(self, requests: Iterator[bytes], context: Context) -> Iterator[bytes]:
        try:
            with self._admitted(context) as party:
                self._meter.name_caller(context.peer(), party)
                hub = self._attach(requests, party)
                stream = hub.open(party)
                if context.add_callback(stream.close):  # otherwise the stream has ended already
                    yield from self._until_it_ends(hub, stream, requests)
        except Exception as error:  # noqa: BLE001 - whatever happens, the peer learns the public text and no more
            yield exchange_pb2.Frame(failure=to_failure(error)).SerializeToString()

    @contextmanager
    def _admitted(self, context: Context) -> Iterator[str]:
        """The caller's name, while its stream lasts.

        Raises PeerError where it has no part in this exchange, or holds too many streams already: each takes a thread.
        """
        party = caller(context)
        if party not in self._roster:
            text = f"{party} has no part in this exchange"
            raise PeerError(Code.ROLE_MISMATCH, text, public=text, party=party)
        with self._changed:
            if self._held[party] >= MAX_STREAMS:
                raise PeerError(Code.NAME_TAKEN, f"{party} holds {MAX_STREAMS} streams already", party=party)
            self._held[party] += 1
        try:
            yield party
        finally:
            with self._changed:
                self._held[party] -= 1

    def _until_it_ends(self, hub: ExchangeHub, stream: _Stream, requests: Iterator[bytes]) -> Iterator[bytes]:
        with self._changed:
            self._open += 1
        try:
            yield from self._serve(hub, stream, requests)
        except PeerError as error:  # a party of this run that breaks the protocol ends it
            hub.end(error)
            raise
        finally:
            self._meter.sample()  # the party closes its connection once the stream has ended
            with self._changed:
                self._open -= 1
                self._changed.notify_all()

    def _attach(self, requests: Iterator[bytes], party: str) -> ExchangeHub:
        data = next(requests, b"")
        frame = parse_frame(data, party=party)
        if not frame.HasField("attach"):
            raise malformed(f"{party} opened a stream without attaching", party)
        attach = frame.attach
        self._ledger.add(party, CONTROL, CONTROL, "received", 0, len(data))
        if attach.protocol != PROTOCOL:
            text = f"{party} speaks protocol {attach.protocol}, this party {PROTOCOL}; install the same version"
            raise PeerError(Code.PROTOCOL_DIFFERS, text, public=text, party=party)

        def settled() -> bool:
            return self._closed or (self._hub is not None and self._hub.generation >= attach.generation)

        with self._changed:  # a party may learn of a new generation a little earlier than we do
            self._changed.wait_for(settled, timeout=self._attach_timeout_s)
            hub = self._hub
        if hub is None or (hub.run_id, hub.generation) != (attach.run_id, attach.generation):
            raise PeerError(Code.STALE_GENERATION, f"{party} attached to another generation", party=party)
        return hub

    def _serve(self, hub: ExchangeHub, stream: _Stream, requests: Iterator[bytes]) -> Iterator[bytes]:
        add = self._ledger.add
        party, phase, kind = stream.party, "", ""
        while True:
            for data in requests:
                frame = parse_frame(data, party=party)
                if frame.HasField("header"):
                    phase, kind = frame.step.phase, label(frame)
                add(party, phase, kind, "received", len(frame.data), len(data))
                hub.deliver(stream, frame)
                if frame.last or not stream.outbox.empty():
                    break
            else:
                return  # the party has closed its side
            reply = stream.outbox.get()
            if reply is None:
                return
            if isinstance(reply, VflError):
                raise reply
            for encoded in reply:
                add(party, encoded.phase, encoded.kind, "sent", encoded.payload_bytes, len(encoded.data))
                yield encoded.data
