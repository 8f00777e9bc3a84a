"""The computing side of an exchange over gRPC.

gRPC's threads only move frames: one thread for each stream puts frames into one queue. The main
thread, inside ``collect``, does everything else (order, specs, assembly). If a stream breaks within
a bundle, the frames that came are kept: the party asks for their number over a new stream and sends
the rest. A bundle that was received whole never reaches the queue again: the stream's own thread
makes sure that the party gets its reply, computed already or not yet, even if the main thread does
not collect for a long time, or never again.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from vfl_common.bundle import Bundle, BundleSpec, StepKey, TensorSpec
from vfl_common.errors import Code, InternalError, LostError, PeerError, VflError
from vfl_common.ledger import Ledger
from vfl_common.link import Lenience
from vfl_common.pb.vfl.v1 import exchange_pb2
from vfl_common.rpc.arrivals import Patience, Proceed, TimedOut, decide
from vfl_common.wire.frames import (
    Allocate,
    Assembly,
    Encoded,
    Received,
    encode,
    encode_passed,
    label,
    malformed,
    step_of,
)

# Between two decisions whether to wait on.
_LONGEST_WAIT_S = 3600.0
# Of one party; then its streams' threads stop reading, and gRPC's flow control holds the sender.
_UNREAD_FRAMES = 16
# More than one wait may take too long.
_STANDSTILL_S = 1.0
# How soon, at first and at last, such a thread looks again.
_POLL_S = (0.001, 0.02)

log = logging.getLogger(__name__)


class PartyStream:
    """One party's open stream. ``outbox`` carries replies from the main thread to the stream's
    thread.
    """

    def __init__(self, party: str) -> None:
        self.party = party
        self.outbox: queue.SimpleQueue[list[Encoded] | Exception | None] = queue.SimpleQueue()
        self.closed = False
        # The stream's thread only: the incoming bundle was received before.
        self.repeating: StepKey | None = None
        # The stream's thread only.
        self.incoming: _Incoming | None = None

    def close(self) -> None:
        self.closed = True
        self.outbox.put(None)


class _Incoming:
    """One incoming bundle, over one stream or several after one another."""

    def __init__(self, step: StepKey, kind: str, stream: PartyStream) -> None:
        self.step, self.kind = step, kind
        # The one over which its sender waits for the reply.
        self.stream = stream
        # Delivered.
        self.frames = 0
        self.whole = False
        # To repeat it.
        self.reply: list[Encoded] | None = None
        # The main thread only.
        self.assembly: Assembly | None = None
        # The main thread only: its step was computed without it.
        self.passed = False


_Frame = tuple[PartyStream, _Incoming | None, Received]
_Event = _Frame | VflError


class ExchangeHub:
    """A ``Hub`` for one generation of a run; see ``vfl_common.link.Hub``.

    Args:
        run_id, generation: a stream names both to attach.
        roster: the parties that send, in the recipe's order.
        timeout_s: how long a living party may take for one step.
        in_flight: the most bundles of one party that may be under way.
        protocol: that all parties speak in this generation; 0: any that this release knows.
        from_first: starts a step's time at the first bundle's arrival, not at ``collect``; so the
            parties' own work before it may take any time.
        allocate: makes buffers for what arrives (pinned if the device is a GPU).
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
        in_flight: int = 1,
        protocol: int = 0,
    ) -> None:
        self.protocol = protocol
        self.in_flight, self._unread_frames = in_flight, max(_UNREAD_FRAMES, in_flight)
        self.run_id, self.generation, self.roster = run_id, generation, tuple(roster)
        self.ledger = ledger
        self._timeout_s, self._allocate, self._from_first = timeout_s, allocate, from_first
        self._events: queue.SimpleQueue[_Event] = queue.SimpleQueue()
        # The main thread only: events that come before those in the queue.
        self._held: deque[_Frame] = deque()
        # The main thread only.
        self._expect: BundleSpec | Mapping[str, BundleSpec] | None = None
        # The parties that send at this step.
        self._asked = self.roster
        # The main thread only: of parties that are at a later step.
        self._early: list[_Frame] = []
        # The main thread only.
        self._hurried = True
        # Only the main thread sets it.
        self._collecting = False
        # The main thread only: of the step.
        self._lenience: Lenience | None = None
        # Only the main thread changes it.
        self._patience = Patience()
        # The main thread only: they do not know that the last lenient step has passed.
        self._behind: set[str] = set()
        # The main thread only: phases that went on without parties.
        self._lenient: set[str] = set()
        # The main thread only: the step in which a party that returns repeats.
        self._again: StepKey | None = None
        # The main thread only: what it has sent before.
        self._sent: dict[str, Bundle] = {}
        # Guards the attributes below.
        self._lock = threading.Condition(threading.Lock())
        self._ended: VflError | None = None
        # The newest of each party; older ones are closed.
        self._streams: dict[str, PartyStream] = {}
        self._step: StepKey | None = None
        # The newest bundle of each party.
        self._incoming: dict[str, _Incoming] = {}
        # The others that its link may ask for after a break.
        self._earlier: dict[str, tuple[_Incoming, ...]] = {}
        self._arrived: dict[str, Bundle] = {}
        # Parties that this step is computed without.
        self._late: frozenset[str] = frozenset()
        # Late ones that still have to fetch their reply.
        self._awaited: set[str] = set()
        # The last reply to each, to repeat it.
        self._replies: dict[str, tuple[StepKey, list[Encoded]]] = {}
        # Frames of each party, over all its streams.
        self._delivered = dict.fromkeys(self.roster, 0)
        # The main thread only.
        self._taken = dict.fromkeys(self.roster, 0)

    # -- any thread
    # ----------------------------------------------------------------------

    def open(self, party: str) -> PartyStream:
        """Opens a stream for ``party`` and closes its older one."""
        stream = PartyStream(party)
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

    @property
    def awaited(self) -> list[str]:
        """The parties whose bundle ``collect`` is waiting for now."""
        arrived = list(self._arrived)
        if not self._collecting or self._ended is not None or (self._from_first and not arrived):
            return []
        gone = self._patience.away if self._lenience is not None else ()
        return [party for party in self._asked if party not in arrived and party not in gone]

    def deliver(self, stream: PartyStream, frame: Received) -> None:
        """Passes one frame to the main thread; waits while too many are unread.

        Frames of a bundle that was already received are dropped; the reply goes to this stream.
        """
        envelope = frame.envelope
        if envelope.HasField("header"):
            self._begun(stream, step_of(envelope), label(envelope))
        if stream.repeating is not None:
            if envelope.last:
                self._repeat(stream, stream.repeating)
            return
        party, (pause_s, longest_s) = stream.party, _POLL_S
        while self._delivered[party] - self._taken[party] >= self._unread_frames:
            if stream.closed or self._ended is not None:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        with self._lock:
            # Its party resumes over another, from the frame after the last one counted here.
            if stream.closed:
                return
            self._delivered[party] += 1
            if stream.incoming is not None:
                stream.incoming.frames += 1
                stream.incoming.whole = envelope.last
            self._events.put((stream, stream.incoming, frame))

    def resume(self, stream: PartyStream, step: StepKey) -> exchange_pb2.Resume:
        """Returns how much of a bundle came over this party's broken streams; the rest will come
        over ``stream``.
        """
        with self._lock:
            first, answered = (
                self._bundle_of(stream.party, step),
                self._answer_to(stream.party, step),
            )
            if first is None:
                if answered is None:
                    return exchange_pb2.Resume()
                self._give_again(stream, answered)
                return exchange_pb2.Resume(whole=True)
            known = [*self._earlier.get(stream.party, ()), self._incoming[stream.party]]
            frames = 0
            # In the order in which they were sent.
            for each in known[known.index(first) :]:
                reply = self._answer_to(stream.party, each.step)
                if reply is not None:
                    self._give_again(stream, reply)
                stream.incoming, each.stream = each, stream
                frames += each.frames
            return exchange_pb2.Resume(frames=frames, whole=first.whole or answered is not None)

    def end(self, error: VflError) -> None:
        """Ends this generation: ``collect`` raises ``error``, the streams send it and close.
        Repeats do nothing.
        """
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            self._lock.notify_all()
            streams = list(self._streams.values())
        self._events.put(error)
        for stream in streams:
            stream.outbox.put(error)

    def _begun(self, stream: PartyStream, step: StepKey, kind: str) -> None:
        """Notes the first frame of a bundle: a new bundle, or one that was received whole
        before.
        """
        party = stream.party
        with self._lock:
            before = self._bundle_of(party, step)
            known = self._answer_to(party, step) is not None or (
                before is not None and before.whole
            )
            stream.repeating = step if known else None
            if not known and not stream.closed:
                if self.in_flight > 1 and party in self._incoming:
                    others = [*self._earlier.get(party, ()), self._incoming[party]]
                    kept = [each for each in others if each is not before]
                    self._earlier[party] = tuple(kept[-(self.in_flight - 1) :])
                stream.incoming = self._incoming[party] = _Incoming(step, kind, stream)

    def _repeat(self, stream: PartyStream, step: StepKey) -> None:
        """Ends a repeated bundle: sends its reply to this stream, now or as soon as it is
        computed.
        """
        stream.repeating = None
        with self._lock:
            if stream.closed:
                return
            answered, incoming = (
                self._answer_to(stream.party, step),
                self._bundle_of(stream.party, step),
            )
            if answered is not None:
                self._give_again(stream, answered)
            elif incoming is not None:
                incoming.stream = stream

    def _bundle_of(self, party: str, step: StepKey) -> _Incoming | None:
        """Returns what has come of a party's bundle of ``step``; None if that is not known, or no
        longer.
        """
        newest = self._incoming.get(party)
        if newest is not None and newest.step == step:
            return newest
        return next((each for each in self._earlier.get(party, ()) if each.step == step), None)

    def _answer_to(self, party: str, step: StepKey) -> list[Encoded] | None:
        """Returns the reply to a party's bundle of ``step``, if it is computed and kept."""
        last = self._replies.get(party)
        if last is not None and last[0] == step:
            return last[1]
        bundle = self._bundle_of(party, step) if self.in_flight > 1 else None
        return bundle.reply if bundle is not None else None

    def _give_again(self, stream: PartyStream, reply: list[Encoded]) -> None:
        """Sends a computed reply again; the caller holds the lock."""
        stream.outbox.put(reply)
        self._awaited.discard(stream.party)
        self._lock.notify_all()

    # -- the main thread
    # ----------------------------------------------------------------------

    def unhurried(self) -> None:
        self._hurried = False

    def wait_for_late(self) -> None:
        """Waits until every late party has its reply. Raises the error that ended this generation,
        if any.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._awaited or self._ended is not None)
            if self._ended is not None and self._awaited:
                raise self._ended

    def collect(
        self,
        step: StepKey,
        expect: BundleSpec | Mapping[str, BundleSpec],
        arrived: Callable[[str, Bundle], None] | None = None,
        deadline_s: float = math.inf,
        lenience: Lenience | None = None,
    ) -> dict[str, Bundle]:
        if self._arrived or self._late:
            raise InternalError(f"collect({step}) before the reply to {self._step}")
        asked = (
            self.roster
            if isinstance(expect, BundleSpec)
            else tuple(each for each in self.roster if each in expect)
        )
        with self._lock:
            self._step, self._expect, self._asked = step, expect, asked
        self._held.extendleft(reversed(self._early))
        self._early.clear()
        self._collecting, self._lenience = True, lenience
        if lenience is not None:
            deadline_s = lenience.deadline_s
            self._lenient.add(step.phase)
        now_s = time.monotonic()
        started_s = None if self._from_first else now_s
        while True:
            if self._ended is not None:
                raise self._ended
            # What is here is not late.
            for _ in range(len(self._held) + self._events.qsize()):
                self._next(0.0, arrived)
            if started_s is None and self._arrived:
                started_s = now_s
            waited_s = 0.0 if started_s is None else now_s - started_s
            hurried = self._hurried and (lenience is not None or math.isinf(deadline_s))
            decision = decide(
                waited_s,
                self._arrived.keys(),
                asked,
                self._timeout_s if hurried else math.inf,
                deadline_s,
                away=self._patience.away,
                at_least=lenience.at_least if lenience is not None else 0,
            )
            if isinstance(decision, Proceed):
                self._hurried, self._collecting = True, False
                missing = frozenset(asked) - self._arrived.keys()
                if lenience is None:
                    self._late = missing
                else:
                    self._leave_behind(missing, now_s, deadline_s)
                return {party: self._arrived[party] for party in asked if party in self._arrived}
            if isinstance(decision, TimedOut):
                late = ", ".join(decision.late)
                text = (
                    f"{late} took longer than {self._timeout_s:g} s for {step} (run.step_timeout_s)"
                )
                raise LostError(Code.STEP_TIMEOUT, text, party=decision.late[0])
            before_s, wait_s = now_s, min(decision.for_s, _LONGEST_WAIT_S)
            self._next(wait_s, arrived)
            now_s = time.monotonic()
            if started_s is not None and now_s - before_s > wait_s + _STANDSTILL_S:
                # This process was stopped, or its machine slept.
                started_s += now_s - before_s - wait_s

    def _next(self, wait_s: float, arrived: Callable[[str, Bundle], None] | None = None) -> None:
        """Takes the next event, if one comes within ``wait_s``. Raises as ``_event``."""
        event = self._held.popleft() if self._held else self._event(wait_s)
        if event is not None and self._is_ahead(event[0].party, event[1]):
            self._early.append(event)
            return
        party = self._take(*event) if event is not None else None
        if arrived is not None and party is not None:
            arrived(party, self._arrived[party])

    def _is_ahead(self, party: str, incoming: _Incoming | None) -> bool:
        """Returns whether a frame is of a later step: its party sends nothing at this one, or has
        sent all of it.
        """
        if party not in self._asked:
            return True
        return (
            self.in_flight > 1
            and party in self._arrived
            and incoming is not None
            and incoming.step != self._step
        )

    def _event(self, wait_s: float) -> _Frame | None:
        """Returns the next event; None if none comes within ``wait_s``. Raises the error that ended
        this generation.
        """
        try:
            event = self._events.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(event, VflError):
            raise event
        return event

    def ask_again(self, step: StepKey) -> None:
        self._again, self._sent = step, dict(self._arrived)

    def settle(self) -> None:
        if self._step is None or not self._behind:
            return
        with self._lock:
            self._step, self._expect = StepKey(self._step.phase, self._step.round + 1, 0), None
        give_up_s = time.monotonic() + self._timeout_s
        while self._behind:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0.0:
                late = [party for party in self.roster if party in self._behind]
                text = (
                    f"{', '.join(late)} took longer than {self._timeout_s:g} s to finish phase "
                    f"{self._step.phase}"
                )
                raise LostError(Code.STEP_TIMEOUT, text, party=late[0])
            event = self._event(left_s)
            if event is not None and event[0].party in self._behind:
                self._take(*event)
            elif event is not None:
                # Of a party that is at the next phase already.
                self._held.append(event)
        self._patience = Patience()

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        if step != self._step or set(replies) != self._arrived.keys() | self._late:
            raise InternalError(f"reply({step}) does not answer what was collected at {self._step}")
        # One bundle may be the reply to all.
        encoded: dict[int, list[Encoded]] = {}
        # The first reply is on its way while the second is encoded.
        for party, bundle in replies.items():
            frames = encoded.get(id(bundle)) or encode(step, bundle)
            encoded[id(bundle)] = frames
            with self._lock:
                self._replies[party] = (step, frames)
                incoming = self._bundle_of(party, step)
                if party in self._arrived:
                    # Else it has begun again, and is behind.
                    if incoming is not None:
                        incoming.reply = frames
                        incoming.stream.outbox.put(frames)
                    continue
                self._awaited.add(party)
                # What came of its bundle is useless:
                if incoming is not None and incoming is self._incoming[party]:
                    del self._incoming[party]
                    # It opens another, and gets its answer there.
                    self._streams.pop(party).close()
        with self._lock:
            self._arrived, self._late = {}, frozenset()

    def _leave_behind(self, missing: frozenset[str], now_s: float, deadline_s: float) -> None:
        """Goes on without ``missing``; what has come of their bundles is dropped."""
        for party in missing:
            incoming = self._incoming.get(party)
            if incoming is not None and incoming.step == self._step:
                incoming.assembly, incoming.passed = None, True
            self._patience.missed(party, now_s, deadline_s)
        self._behind = set(missing)

    def _catch_up(self, party: str, incoming: _Incoming) -> None:
        """Tells a party whose whole bundle came too late which step is under way; see ``Patience``
        for what follows.
        """
        if self._step is None:
            return
        self._tell_step(party, incoming, self._step)
        self._patience.came(party, time.monotonic())
        self._behind.discard(party)

    def _tell_step(self, party: str, incoming: _Incoming, now: StepKey) -> None:
        """Answers a whole bundle with the step that is under way."""
        told = [encode_passed(now)]
        with self._lock:
            # If it is lost, the party sends its bundle again.
            self._replies[party] = (incoming.step, told)
            incoming.stream.outbox.put(told)

    def _repeated(self, party: str, bundle: Bundle, incoming: _Incoming) -> None:
        """Takes what a party that returns repeats; its next bundle decides whether it is waited
        for.
        """
        if bundle != self._sent[party]:
            text = f"{party} returned with other rows than it had"
            raise PeerError(Code.ROWS_DIFFER, text, party=party)
        if self._step is not None:
            self._tell_step(party, incoming, self._step)

    def _take(self, stream: PartyStream, incoming: _Incoming | None, frame: Received) -> str | None:
        """Takes a frame, in the order in which its party sent them; returns the party if it
        completes its bundle.
        """
        party = stream.party
        self._taken[party] += 1
        if incoming is None:
            raise malformed(f"{party} sent a frame that belongs to no bundle", party)
        # Its party began again, over another stream.
        if self._bundle_of(party, incoming.step) is not incoming:
            return None
        if frame.envelope.HasField("header"):
            self._begin(party, incoming, frame)
        if incoming.passed:
            if frame.envelope.last:
                self._catch_up(party, incoming)
            return None
        if incoming.assembly is None:
            raise malformed(f"{party} sent a frame that belongs to no bundle", party)
        bundle = incoming.assembly.feed(frame)
        if bundle is None:
            return None
        incoming.assembly = None
        if incoming.step == self._again:
            self._repeated(party, bundle, incoming)
            return None
        self._arrived[party] = bundle
        if party in self._patience.away:
            self._patience.came(party, time.monotonic())
        return party

    def _begin(self, party: str, incoming: _Incoming, frame: Received) -> None:
        """Begins a bundle with its first frame."""
        # Of a party that has come back, whatever is under way.
        if incoming.step == self._again:
            # Of the process that it was before it came back.
            self._arrived.pop(party, None)
            before = self._sent[party]
            spec = BundleSpec(
                before.kind,
                {name: TensorSpec(x.dtype, x.shape) for name, x in before.tensors.items()},
            )
            incoming.assembly = Assembly(frame, spec, party=party, allocate=self._allocate)
            return
        if incoming.step != self._step and (
            self._lenience is not None or incoming.step.phase in self._lenient
        ):
            # Of the process that it was before it came back.
            self._arrived.pop(party, None)
            incoming.passed = True
            return
        if incoming.step != self._step or self._expect is None:
            text = f"{party} sent {incoming.step} while {self._step} is under way"
            raise PeerError(Code.STEP_OUT_OF_ORDER, text, party=party)
        expect = self._expect if isinstance(self._expect, BundleSpec) else self._expect[party]
        incoming.assembly = Assembly(frame, expect, party=party, allocate=self._allocate)
