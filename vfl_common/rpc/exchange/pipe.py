"""Brings the bundles of all parties to one hub, and the hub's answers back to the parties.

The threads of the parties put parts of bundles in, those of a party in the order in which it sent
them. The thread of the hub takes them out with ``next``, and decides. The two kinds of pipe differ
only in what they carry: frames of serialised bytes (``service``), or whole bundles within one
process (``memory``).

A bundle that has arrived completely does not reach the hub again if it is repeated. The thread that
brings the repeat makes sure that the party gets the answer, as soon as it is computed, even if the
hub's thread does not collect for a long time, or never again.
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

# The first and the longest pause of a thread that waits for room.
_POLL_S = (0.001, 0.02)


class Mailbox(Protocol[T]):
    """A queue between threads; ``queue.SimpleQueue`` is one."""

    def put(self, item: T) -> None:
        """Adds an item."""
        ...

    def get(self, *, timeout: float | None = None) -> T:
        """Waits at most ``timeout`` seconds, or for ever. Raises ``queue.Empty``."""
        ...

    def empty(self) -> bool:
        """Returns whether the queue is empty."""
        ...

    def qsize(self) -> int:
        """Returns the number of items."""
        ...


class Assembling(Protocol[Part_contra]):
    """One bundle that is assembled from its parts."""

    def feed(self, part: Part_contra) -> Bundle | None:
        """Takes the next part; returns the bundle after the last one."""
        ...


class PartyStream(Generic[Part, Answer]):
    """One party's open stream to the hub. ``outbox``: the answers for the party; None ends it."""

    def __init__(self, party: str, outbox: Mailbox[Answer | Exception | None]) -> None:
        self.party = party
        self.outbox = outbox
        self.closed = False
        # The step of the incoming bundle if it was received before; for the stream's thread only.
        self.repeating: StepKey | None = None
        # The incoming bundle, for the stream's thread only.
        self.incoming: Incoming[Part, Answer] | None = None

    def close(self) -> None:
        """Ends the stream."""
        self.closed = True
        self.outbox.put(None)


class Incoming(Generic[Part, Answer]):
    """One incoming bundle, over one stream or several after one another."""

    def __init__(self, step: StepKey, kind: str, stream: PartyStream[Part, Answer]) -> None:
        self.step, self.kind = step, kind
        # The stream over which the sender waits for the answer.
        self.stream = stream
        # The count of delivered parts, and whether these are all.
        self.parts = 0
        self.whole = False
        # The answer, in case it must be repeated.
        self.answer: Answer | None = None
        # The two attributes below are for the hub's thread only.
        self.assembly: Assembling[Part] | None = None
        # Whether the step was computed without this bundle.
        self.passed = False


class Delivery(NamedTuple):
    """One part of a bundle that has arrived. ``begins``, ``ends``: whether it is the first, the
    last.
    """

    party: str
    # None if the part belongs to no bundle.
    incoming: Incoming[Any, Any] | None
    part: Any
    begins: bool
    ends: bool


class BundlePipe(ABC, Generic[Part, Answer]):
    """The bundles of one generation on their way to its hub, and the answers on their way back.

    Args:
        roster: the parties that send, in the recipe's order.
        in_flight: the most bundles of one party in flight.
        max_unread: the most parts of one party that the hub has not read; at that number, the
            party's thread waits.
        lock: guards the attributes that all threads share.
        mailbox: makes a mailbox.
    """

    def __init__(
        self,
        roster: Sequence[str],
        *,
        in_flight: int,
        max_unread: float,
        lock: threading.Condition,
        mailbox: Callable[[], Mailbox[Any]],
    ) -> None:
        self.roster, self.in_flight = tuple(roster), in_flight
        self.ended: VflError | None = None
        self._max_unread = max(max_unread, in_flight)
        self._mailbox = mailbox
        self._deliveries: Mailbox[Delivery | VflError] = mailbox()
        # Only the thread of its party changes a party's count, over all its streams.
        self._delivered = dict.fromkeys(self.roster, 0)
        # Only the hub's thread changes it.
        self._read = dict.fromkeys(self.roster, 0)
        # Guards the attributes below.
        self._lock = lock
        # The newest stream of each party; older ones are closed.
        self._streams: dict[str, PartyStream[Part, Answer]] = {}
        # The newest bundle of each party.
        self._incoming: dict[str, Incoming[Part, Answer]] = {}
        # The older bundles for which its link may ask after a break.
        self._earlier: dict[str, tuple[Incoming[Part, Answer], ...]] = {}
        # The last answer to each party, in case it must be repeated.
        self._answers: dict[str, tuple[StepKey, Answer]] = {}
        # Late parties that still have to fetch their answer.
        self._awaited: set[str] = set()

    # -- for the subclass
    # ----------------------------------------------------------------------

    @abstractmethod
    def begin(self, delivery: Delivery, expect: BundleSpec) -> Assembling[Part]:
        """Begins a bundle with its first part. Raises PeerError if it does not match ``expect``."""

    @abstractmethod
    def pack(self, step: StepKey, replies: Mapping[str, Bundle]) -> Iterator[tuple[str, Answer]]:
        """Yields (party, its reply as it is sent). One bundle may be the reply to all."""

    @abstractmethod
    def answer_passed(self, now: StepKey) -> Answer:
        """Returns the answer to a bundle whose step has passed, with the current step ``now``."""

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

        Parts of a bundle that was already received are dropped; its answer is sent to this stream.
        """
        if stream.repeating is not None:
            if ends:
                self._repeat(stream, stream.repeating)
            return
        party, (pause_s, longest_s) = stream.party, _POLL_S
        while self._delivered[party] - self._read[party] >= self._max_unread:
            if stream.closed or self.ended is not None:
                return
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, longest_s)
        with self._lock:
            # The party resumes over another stream, after the last part that is counted here.
            if stream.closed:
                return
            self._delivered[party] += 1
            incoming = stream.incoming
            if incoming is not None:
                incoming.parts += 1
                incoming.whole = ends
            self._deliveries.put(Delivery(party, incoming, part, begins, ends))

    def end(self, error: VflError) -> None:
        """Ends this generation: the hub raises ``error``, the streams send it and close. Further
        calls do nothing.
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

    def note_begin(self, stream: PartyStream[Part, Answer], step: StepKey, kind: str) -> None:
        """Notes the first part of a bundle, which is new or was received completely before."""
        party = stream.party
        with self._lock:
            before = self._bundle_of(party, step)
            is_known = self._answer_to(party, step) is not None or (
                before is not None and before.whole
            )
            stream.repeating = step if is_known else None
            if not is_known and not stream.closed:
                if self.in_flight > 1 and party in self._incoming:
                    others = [*self._earlier.get(party, ()), self._incoming[party]]
                    others = [bundle for bundle in others if bundle is not before]
                    self._earlier[party] = tuple(others[-(self.in_flight - 1) :])
                stream.incoming = self._incoming[party] = Incoming(step, kind, stream)

    def _repeat(self, stream: PartyStream[Part, Answer], step: StepKey) -> None:
        """Ends a repeated bundle: sends its answer to this stream, now or as soon as it is
        computed.
        """
        stream.repeating = None
        with self._lock:
            if stream.closed:
                return
            answer = self._answer_to(stream.party, step)
            incoming = self._bundle_of(stream.party, step)
            if answer is not None:
                self._resend(stream, answer)
            elif incoming is not None:
                incoming.stream = stream

    def _bundle_of(self, party: str, step: StepKey) -> Incoming[Part, Answer] | None:
        """Returns the incoming bundle of a party at ``step``; None if it is not kept."""
        newest = self._incoming.get(party)
        if newest is not None and newest.step == step:
            return newest
        return next((b for b in self._earlier.get(party, ()) if b.step == step), None)

    def _answer_to(self, party: str, step: StepKey) -> Answer | None:
        """Returns the answer to a party's bundle of ``step``, if it is computed and kept."""
        last = self._answers.get(party)
        if last is not None and last[0] == step:
            return last[1]
        bundle = self._bundle_of(party, step) if self.in_flight > 1 else None
        return bundle.answer if bundle is not None else None

    def _resend(self, stream: PartyStream[Part, Answer], answer: Answer) -> None:
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
        """Returns False if the party has begun this bundle again, over another stream."""
        return self._bundle_of(party, incoming.step) is incoming

    def newest(self, party: str) -> Incoming[Part, Answer] | None:
        """Returns the last bundle that a party has begun."""
        return self._incoming.get(party)

    def answer(self, party: str, step: StepKey, answer: Answer) -> None:
        """Answers a bundle that the hub has read."""
        with self._lock:
            self._answers[party] = (step, answer)
            incoming = self._bundle_of(party, step)
            # None if the party has begun again, and is behind.
            if incoming is not None:
                incoming.answer = answer
                incoming.stream.outbox.put(answer)

    def answer_late(self, party: str, step: StepKey, answer: Answer) -> None:
        """Answers a bundle without which its step was computed; drops its parts that have "
        "arrived."""
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
            # The party opens another stream, and gets its answer there.
            self._streams.pop(party).close()

    def tell(self, party: str, incoming: Incoming[Part, Answer], now: StepKey) -> None:
        """Answers a complete bundle with the current step ``now``."""
        answer = self.answer_passed(now)
        with self._lock:
            # If the answer is lost, the party sends its bundle again.
            self._answers[party] = (incoming.step, answer)
            incoming.stream.outbox.put(answer)
