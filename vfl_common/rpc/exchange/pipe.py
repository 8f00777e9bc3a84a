"""Delivers the bundles of all parties to one hub, and the hub's answers to the parties.

The parties' threads put parts of bundles into the pipe, in the order in which each party sent them.
The hub's thread takes them out with ``next``. There are two kinds of pipes: one for frames of
serialised bytes (``service``), and one for whole bundles within one process (``memory``).

If a party repeats a bundle that has arrived completely, the hub does not get it again. The party's
thread makes sure that the party gets the answer as soon as it is computed, even if the hub's thread
does not call ``collect`` again.
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

# The first and the longest pause of a thread that waits until the hub has read more parts.
_POLL_S = (0.001, 0.02)


class Mailbox(Protocol[T]):
    """A queue between threads, such as ``queue.SimpleQueue``."""

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
    """A bundle that is being assembled from its parts."""

    def feed(self, part: Part_contra) -> Bundle | None:
        """Adds the next part. Returns the bundle after the last part, otherwise None."""
        ...


class PartyStream(Generic[Part, Answer]):
    """One party's open stream to the hub. ``outbox``: the answers for the party; None ends the
    stream.
    """

    def __init__(self, party: str, outbox: Mailbox[Answer | Exception | None]) -> None:
        self.party = party
        self.outbox = outbox
        self.closed = False
        # The step of the incoming bundle if the bundle was received before. Only the stream's
        # thread uses this attribute.
        self.repeating: StepKey | None = None
        # The incoming bundle. Only the stream's thread uses this attribute.
        self.incoming: Incoming[Part, Answer] | None = None

    def close(self) -> None:
        """Ends the stream."""
        self.closed = True
        self.outbox.put(None)


class Incoming(Generic[Part, Answer]):
    """An incoming bundle, which may arrive over several streams, one after another."""

    def __init__(self, step: StepKey, kind: str, stream: PartyStream[Part, Answer]) -> None:
        self.step, self.kind = step, kind
        # The stream over which the sender waits for the answer.
        self.stream = stream
        # The number of delivered parts, and whether the bundle is complete.
        self.parts = 0
        self.whole = False
        # The answer to the bundle, in case it must be sent again.
        self.answer: Answer | None = None
        # Only the hub's thread uses the two attributes below.
        self.assembly: Assembling[Part] | None = None
        # Whether the step was computed without this bundle.
        self.passed = False


class Delivery(NamedTuple):
    """A part of a bundle that has arrived. ``begins``, ``ends``: whether it is the bundle's first
    or last part.
    """

    party: str
    # The bundle of the part; None if the part belongs to no bundle.
    incoming: Incoming[Any, Any] | None
    part: Any
    begins: bool
    ends: bool


class BundlePipe(ABC, Generic[Part, Answer]):
    """Carries the bundles of one generation to its hub, and the answers back.

    Args:
        roster: The parties that send, in the recipe's order.
        in_flight: The maximum number of bundles of one party in flight.
        max_unread: The maximum number of parts of one party that the hub has not read. At that
            number, the party's thread waits.
        lock: The lock for the attributes that all threads share.
        mailbox: Creates a mailbox.
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
        # {party: number of delivered parts}. Only the party's thread changes its count.
        self._delivered = dict.fromkeys(self.roster, 0)
        # {party: number of parts that the hub has read}. Only the hub's thread changes it.
        self._read = dict.fromkeys(self.roster, 0)
        # Guards the attributes below.
        self._lock = lock
        # The newest stream of each party. Older streams are closed.
        self._streams: dict[str, PartyStream[Part, Answer]] = {}
        # The newest bundle of each party.
        self._incoming: dict[str, Incoming[Part, Answer]] = {}
        # {party: older bundles that its link may resume after a break}.
        self._earlier: dict[str, tuple[Incoming[Part, Answer], ...]] = {}
        # The last answer to each party, in case it must be sent again.
        self._answers: dict[str, tuple[StepKey, Answer]] = {}
        # The late parties that have not fetched their answer yet.
        self._unfetched: set[str] = set()

    # -- for the subclass
    # ----------------------------------------------------------------------

    @abstractmethod
    def begin(self, delivery: Delivery, expect: BundleSpec) -> Assembling[Part]:
        """Begins to assemble a bundle from its first part. Raises PeerError if the bundle does not
        match ``expect``.
        """

    @abstractmethod
    def pack(self, step: StepKey, replies: Mapping[str, Bundle]) -> Iterator[tuple[str, Answer]]:
        """Encodes the replies: yields (party, encoded reply). The same bundle may be the reply to
        several parties.
        """

    @abstractmethod
    def answer_passed(self, now: StepKey) -> Answer:
        """Encodes the answer to a bundle whose step has passed. ``now``: the current step."""

    # -- any thread
    # ----------------------------------------------------------------------

    def open(self, party: str) -> PartyStream[Part, Answer]:
        """Opens a stream for ``party`` and closes the party's previous stream."""
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
        """The parties that have not opened a stream yet."""
        with self._lock:
            return [party for party in self.roster if party not in self._streams]

    def put(
        self, stream: PartyStream[Part, Answer], part: Part, *, begins: bool, ends: bool
    ) -> None:
        """Passes one part to the hub. Waits while too many parts are unread.

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
            # If the stream was closed, the party resumes over another stream, after the last part
            # that was counted.
            if stream.closed:
                return
            self._delivered[party] += 1
            incoming = stream.incoming
            if incoming is not None:
                incoming.parts += 1
                incoming.whole = ends
            self._deliveries.put(Delivery(party, incoming, part, begins, ends))

    def end(self, error: VflError) -> None:
        """Ends this generation: the hub raises ``error``, and the streams send it and close.
        Further calls do nothing.
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
        """Waits until every late party has fetched its answer. Raises the error that ended this
        generation, if any.
        """
        with self._lock:
            self._lock.wait_for(lambda: not self._unfetched or self.ended is not None)
            if self.ended is not None and self._unfetched:
                raise self.ended

    def note_begin(self, stream: PartyStream[Part, Answer], step: StepKey, kind: str) -> None:
        """Begins an incoming bundle, which may be new or a repetition of a complete one."""
        party = stream.party
        with self._lock:
            previous = self._bundle_of(party, step)
            is_known = self._answer_to(party, step) is not None or (
                previous is not None and previous.whole
            )
            stream.repeating = step if is_known else None
            if not is_known and not stream.closed:
                if self.in_flight > 1 and party in self._incoming:
                    earlier = [*self._earlier.get(party, ()), self._incoming[party]]
                    earlier = [bundle for bundle in earlier if bundle is not previous]
                    self._earlier[party] = tuple(earlier[-(self.in_flight - 1) :])
                stream.incoming = self._incoming[party] = Incoming(step, kind, stream)

    def _repeat(self, stream: PartyStream[Part, Answer], step: StepKey) -> None:
        """Handles the end of a repeated bundle: its answer is sent over this stream, now or as soon
        as it is computed.
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
        """Returns a party's incoming bundle for ``step``; None if the pipe does not keep it."""
        newest = self._incoming.get(party)
        if newest is not None and newest.step == step:
            return newest
        return next((b for b in self._earlier.get(party, ()) if b.step == step), None)

    def _answer_to(self, party: str, step: StepKey) -> Answer | None:
        """Returns the answer to a party's bundle for ``step``; None if it is not computed or no
        longer kept.
        """
        last = self._answers.get(party)
        if last is not None and last[0] == step:
            return last[1]
        bundle = self._bundle_of(party, step) if self.in_flight > 1 else None
        return bundle.answer if bundle is not None else None

    def _resend(self, stream: PartyStream[Part, Answer], answer: Answer) -> None:
        """Sends a computed answer again. The caller must hold the lock."""
        stream.outbox.put(answer)
        self._unfetched.discard(stream.party)
        self._lock.notify_all()

    # -- the hub's thread
    # ----------------------------------------------------------------------

    @property
    def waiting(self) -> int:
        """The number of deliveries that ``next`` can return without waiting."""
        return self._deliveries.qsize()

    def next(self, wait_s: float) -> Delivery | None:
        """Returns the next delivery; None if no delivery comes within ``wait_s``. Raises the error
        that ended this generation.
        """
        try:
            delivery = self._deliveries.get(timeout=wait_s)
        except queue.Empty:
            return None
        if isinstance(delivery, VflError):
            raise delivery
        return delivery

    def read(self, party: str) -> None:
        """Counts a part that the hub has read, so that its party may send another part."""
        self._read[party] += 1

    def is_current(self, party: str, incoming: Incoming[Part, Answer]) -> bool:
        """Returns whether ``incoming`` is the party's current bundle for its step; False if the
        party has begun the bundle again.
        """
        return self._bundle_of(party, incoming.step) is incoming

    def newest(self, party: str) -> Incoming[Part, Answer] | None:
        """Returns the last bundle that a party has begun."""
        return self._incoming.get(party)

    def answer(self, party: str, step: StepKey, answer: Answer) -> None:
        """Sends the answer to a bundle that the hub has read."""
        with self._lock:
            self._answers[party] = (step, answer)
            incoming = self._bundle_of(party, step)
            # It is None if the party has restarted and is behind.
            if incoming is not None:
                incoming.answer = answer
                incoming.stream.outbox.put(answer)

    def answer_late(self, party: str, step: StepKey, answer: Answer) -> None:
        """Sends the answer to a bundle that came too late for its step. Drops the parts of the
        bundle that have arrived.
        """
        with self._lock:
            self._answers[party] = (step, answer)
            incoming = self._incoming.get(party)
            if incoming is None or incoming.step != step:
                self._unfetched.add(party)
                return
            del self._incoming[party]
            if incoming.whole:
                incoming.stream.outbox.put(answer)
                return
            self._unfetched.add(party)
            # The party will open another stream, over which it gets its answer.
            self._streams.pop(party).close()

    def tell(self, party: str, incoming: Incoming[Part, Answer], now: StepKey) -> None:
        """Answers a complete bundle whose step has passed with the current step ``now``."""
        answer = self.answer_passed(now)
        with self._lock:
            # If the answer is lost, the party sends its bundle again.
            self._answers[party] = (incoming.step, answer)
            incoming.stream.outbox.put(answer)
