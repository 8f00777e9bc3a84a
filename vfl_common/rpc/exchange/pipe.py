"""What brings the bundles of all parties to one hub, and takes the hub's answers back.

The threads of the parties put parts of bundles in, each party's in the order in which it sent
them. The thread of the hub takes them out with ``next``, and decides. Two kinds of pipe differ only
in what travels: frames of serialised bytes (``service``), or whole bundles within one process
(``memory``).

A bundle that came whole never reaches the hub again. The thread that brings it makes sure that its
party gets the answer, computed already or not yet, even if the hub's thread does not collect for a
long time, or never again.
"""

from __future__ import annotations

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from vfl_common.bundle import Bundle, BundleSpec, StepKey
from vfl_common.errors import VflError

T = TypeVar("T")
Part = TypeVar("Part")
Answer = TypeVar("Answer")
Part_contra = TypeVar("Part_contra", contravariant=True)

# How soon, at first and at last, a thread that has to wait for room looks again.
_POLL_S = (0.001, 0.02)


class Mailbox(Protocol[T]):
    """What one thread puts things into and another takes them out of; ``queue.SimpleQueue`` is
    one.
    """

    def put(self, item: T) -> None: ...

    def get(self, *, timeout: float | None = None) -> T:
        """Waits at most ``timeout`` seconds, or for ever. Raises ``queue.Empty``."""
        ...

    def empty(self) -> bool: ...

    def qsize(self) -> int: ...


class Assembling(Protocol[Part_contra]):
    """One bundle, as its parts come."""

    def feed(self, part: Part_contra) -> Bundle | None:
        """Takes the next part; returns the bundle after the last one."""
        ...


class PartyStream(Generic[Part, Answer]):
    """One party's open stream to the hub. ``outbox`` carries what the party gets."""

    def __init__(self, party: str, outbox: Mailbox[Answer | Exception | None]) -> None:
        self.party = party
        self.outbox = outbox
        self.closed = False
        # The stream's thread only: the incoming bundle was received before.
        self.repeating: StepKey | None = None
        # The stream's thread only.
        self.incoming: Incoming[Part, Answer] | None = None

    def close(self) -> None:
        self.closed = True
        self.outbox.put(None)


class Incoming(Generic[Part, Answer]):
    """One incoming bundle, over one stream or several after one another."""

    def __init__(self, step: StepKey, kind: str, stream: PartyStream[Part, Answer]) -> None:
        self.step, self.kind = step, kind
        # The one over which its sender waits for the answer.
        self.stream = stream
        # Delivered.
        self.parts = 0
        self.whole = False
        # To repeat it.
        self.answer: Answer | None = None
        # The hub's thread only.
        self.assembly: Assembling[Part] | None = None
        # The hub's thread only: its step was computed without it.
        self.passed = False


class Delivery(NamedTuple):
    """One part of a bundle that has come. ``begins`` and ``ends``: it is the first, the last."""

    party: str
    # None: it belongs to no bundle.
    incoming: Incoming[Any, Any] | None
    part: Any
    begins: bool
    ends: bool


class BundlePipe(ABC, Generic[Part, Answer]):
    """The bundles of one generation on their way to its hub, and the answers on their way back.

    Args:
        roster: the parties that send, in the recipe's order.
        in_flight: the most bundles of one party that may be under way.
        most_unread: the most parts of one party that the hub has not read; then the party's thread
            waits.
        lock: guards what all threads share.
        mailbox: makes a mailbox.
    """

    def __init__(
        self,
        roster: Sequence[str],
        *,
        in_flight: int,
        most_unread: float,
        lock: threading.Condition,
        mailbox: Callable[[], Mailbox[Any]],
    ) -> None:
        self.roster, self.in_flight = tuple(roster), in_flight
        self.ended: VflError | None = None
        self._most_unread = max(most_unread, in_flight)
        self._mailbox = mailbox
        self._deliveries: Mailbox[Delivery | VflError] = mailbox()
        # Only the thread of its party changes a party's count, over all its streams.
        self._delivered = dict.fromkeys(self.roster, 0)
        # Only the hub's thread changes it.
        self._read = dict.fromkeys(self.roster, 0)
        # Guards the attributes below.
        self._lock = lock
        # The newest of each party; older ones are closed.
        self._streams: dict[str, PartyStream[Part, Answer]] = {}
        # The newest bundle of each party.
        self._incoming: dict[str, Incoming[Part, Answer]] = {}
        # The others that its link may ask for after a break.
        self._earlier: dict[str, tuple[Incoming[Part, Answer], ...]] = {}
        # The last answer to each, to repeat it.
        self._answers: dict[str, tuple[StepKey, Answer]] = {}
        # Late parties that still have to fetch their answer.
        self._awaited: set[str] = set()

    # -- what travels
    # ----------------------------------------------------------------------

    @abstractmethod
    def begin(self, delivery: Delivery, expect: BundleSpec) -> Assembling[Part]:
        """Begins a bundle with its first part. Raises PeerError if it is not what ``expect``
        says.
        """

    @abstractmethod
    def pack(self, step: StepKey, replies: Mapping[str, Bundle]) -> Iterator[tuple[str, Answer]]:
        """Yields each party's reply as it travels. One bundle may be the reply to all."""

    @abstractmethod
    def passed(self, now: StepKey) -> Answer:
        """Returns the answer to a bundle whose step has passed: which one is under way."""

    # -- any thread
    # ----------------------------------------------------------------------

    def open(self, party: str) -> PartyStream[Part, Answer]:
        """Opens a stream for ``party`` and closes its older one."""
        stream = PartyStream[Part, Answer](party, self._mailbox())
        with self._lock:
            older, self._streams[party] = self._streams.get(party), stream
            if older is not None:
                older.close()
            if self.ended is not None:
                stream.outbox.put(self.ended)
        return stream

    @property
    def absent(self) -> list[str]:
        """The parties that have opened no stream yet."""
        with self._lock:
            return [party for party in self.roster if party not in self._streams]

    def put(
        self, stream: PartyStream[Part, Answer], part: Part, *, begins: bool, ends: bool
    ) -> None:
        """Passes one part to the hub; waits while too many are unread.

        Parts of a bundle that was already received are dropped; its answer goes to this stream.
        """
        if stream.repeating is not None:
            if ends:
                self._repeat(stream, stream.repeating)
            return
        party, (pause_s, longest_s) = stream.party, _POLL_S
        while self._delivered[party] - self._read[party] >= self._most_unread:
            if stream.closed or self.ended is not None:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        with self._lock:
            # Its party resumes over another, from the part after the last one counted here.
            if stream.closed:
                return
            self._delivered[party] += 1
            incoming = stream.incoming
            if incoming is not None:
                incoming.parts += 1
                incoming.whole = ends
            self._deliveries.put(Delivery(party, incoming, part, begins, ends))

    def end(self, error: VflError) -> None:
        """Ends this generation: the hub raises ``error``, the streams send it and close. Repeats do
        nothing.
        """
        with self._lock:
            if self.ended is not None:
                return
            self.ended = error
            self._lock.notify_all()
            streams = list(self._streams.values())
        self._deliveries.put(error)
        for stream in streams:
            stream.outbox.put(error)

    def wait_for_late(self) -> None:
        """Waits until every late party has its answer. Raises the error that ended this generation,
        if any.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._awaited or self.ended is not None)
            if self.ended is not None and self._awaited:
                raise self.ended

    def begun(self, stream: PartyStream[Part, Answer], step: StepKey, kind: str) -> None:
        """Notes the first part of a bundle: a new bundle, or one that was received whole before."""
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
                stream.incoming = self._incoming[party] = Incoming(step, kind, stream)

    def _repeat(self, stream: PartyStream[Part, Answer], step: StepKey) -> None:
        """Ends a repeated bundle: sends its answer to this stream, now or as soon as it is
        computed.
        """
        stream.repeating = None
        with self._lock:
            if stream.closed:
                return
            answer, incoming = (
                self._answer_to(stream.party, step),
                self._bundle_of(stream.party, step),
            )
            if answer is not None:
                self._give_again(stream, answer)
            elif incoming is not None:
                incoming.stream = stream

    def _bundle_of(self, party: str, step: StepKey) -> Incoming[Part, Answer] | None:
        """Returns what has come of a party's bundle of ``step``; None if that is not known, or no
        longer.
        """
        newest = self._incoming.get(party)
        if newest is not None and newest.step == step:
            return newest
        return next((each for each in self._earlier.get(party, ()) if each.step == step), None)

    def _answer_to(self, party: str, step: StepKey) -> Answer | None:
        """Returns the answer to a party's bundle of ``step``, if it is computed and kept."""
        last = self._answers.get(party)
        if last is not None and last[0] == step:
            return last[1]
        bundle = self._bundle_of(party, step) if self.in_flight > 1 else None
        return bundle.answer if bundle is not None else None

    def _give_again(self, stream: PartyStream[Part, Answer], answer: Answer) -> None:
        """Sends a computed answer again; the caller holds the lock."""
        stream.outbox.put(answer)
        self._awaited.discard(stream.party)
        self._lock.notify_all()

    # -- the hub's thread
    # ----------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """How many deliveries ``next`` can return at once."""
        return self._deliveries.qsize()

    def next(self, wait_s: float) -> Delivery | None:
        """Returns the next delivery; None if none comes within ``wait_s``. Raises the error that
        ended this generation.
        """
        try:
            delivery = self._deliveries.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(delivery, VflError):
            raise delivery
        return delivery

    def read(self, party: str) -> None:
        """Notes that the hub has read a part, so that there is room for another."""
        self._read[party] += 1

    def is_current(self, party: str, incoming: Incoming[Part, Answer]) -> bool:
        """Returns false if its party has begun this bundle again, over another stream."""
        return self._bundle_of(party, incoming.step) is incoming

    def newest(self, party: str) -> Incoming[Part, Answer] | None:
        """Returns the last bundle that a party has begun."""
        return self._incoming.get(party)

    def answer(self, party: str, step: StepKey, answer: Answer) -> None:
        """Answers a bundle that the hub has read."""
        with self._lock:
            self._answers[party] = (step, answer)
            incoming = self._bundle_of(party, step)
            # Else its party has begun again, and is behind.
            if incoming is not None:
                incoming.answer = answer
                incoming.stream.outbox.put(answer)

    def answer_late(self, party: str, step: StepKey, answer: Answer) -> None:
        """Answers a bundle that the hub has not read: it was computed without it. What has come of
        it is useless.
        """
        with self._lock:
            self._answers[party] = (step, answer)
            incoming = self._incoming.get(party)
            if incoming is None or incoming.step != step:
                self._awaited.add(party)
                return
            del self._incoming[party]
            if incoming.whole:
                incoming.stream.outbox.put(answer)
                return
            self._awaited.add(party)
            # It opens another, and gets its answer there.
            self._streams.pop(party).close()

    def tell(self, party: str, incoming: Incoming[Part, Answer], now: StepKey) -> None:
        """Answers a whole bundle with the step that is under way."""
        told = self.passed(now)
        with self._lock:
            # If it is lost, the party sends its bundle again.
            self._answers[party] = (incoming.step, told)
            incoming.stream.outbox.put(told)
