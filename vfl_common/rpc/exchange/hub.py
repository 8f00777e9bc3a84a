"""The computing side of an exchange: tracks the bundles that have arrived and the parties that are
late or away, and delivers the answers. It does not depend on the transport.

The parties' threads put parts of bundles into the pipe, in the order in which each party sent them.
One thread, inside ``collect``, takes them out, checks the order and the specs of bundles, assembles
them and handles late parties. There are two kinds of pipes: one for frames of serialised bytes
(``service``), and one for whole bundles within one process (``memory``). ``decide`` is a pure
function that returns whether a step may proceed. ``Patience`` tracks the parties that are away.
Both take the time as an argument.

If a party repeats a bundle that has arrived completely, the hub does not get it again. The party's
thread makes sure that the party gets the answer as soon as it is computed, even if the hub's thread
does not call ``collect`` again.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from vfl_common.bundle import Bundle, BundleSpec, Lenience, StepKey
from vfl_common.errors import Code, InternalError, LostError, PeerError, VflError
from vfl_common.frames import make_message_error

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


# The maximum time between two decisions whether to wait longer.
_MAX_WAIT_S = 3600.0
# If a wait takes longer than requested by this time, the process was suspended meanwhile.
_STANDSTILL_S = 1.0

AnyPipe = TypeVar("AnyPipe", bound=BundlePipe[Any, Any])


@dataclass(frozen=True, slots=True)
class Proceed:
    """The decision to proceed: all bundles have arrived, or the step may go on without the missing
    ones.
    """


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """The decision to wait: bundles are missing, and their parties have ``for_s`` seconds left."""

    for_s: float


@dataclass(frozen=True, slots=True)
class TimedOut:
    """The decision to give up: the parties ``late``, in roster order, have used up their time."""

    late: tuple[str, ...]


_PROCEED = Proceed()
# The number of deadlines during which a returned party must be in time before it may be late again.
_NUM_DEADLINES = 9


class Patience:
    """Tracks the parties that are away: they have missed a step and have not come back.

    Steps wait again for a party that has come back. If the party is late again within 9 deadlines,
    steps do not wait for it during the next 9 deadlines. So a slow or malicious party costs the
    other parties at most a tenth of their time. Meanwhile it takes part in the steps for which it
    is in time.
    """

    def __init__(self) -> None:
        self.away: frozenset[str] = frozenset()
        self._back_s: dict[str, float] = {}
        self._not_before_s: dict[str, float] = {}

    def note_missed(self, party: str, now_s: float, deadline_s: float) -> None:
        """Marks ``party`` as away, because a step went on without it."""
        if (
            party not in self.away
            and now_s - self._back_s.get(party, -math.inf) < _NUM_DEADLINES * deadline_s
        ):
            self._not_before_s[party] = now_s + _NUM_DEADLINES * deadline_s
        self.away |= {party}

    def note_return(self, party: str, now_s: float) -> None:
        """Marks ``party`` as present, because it has come back and knows the current step."""
        if now_s >= self._not_before_s.get(party, -math.inf):
            self._back_s[party] = now_s
            self.away -= {party}


def decide(
    waited_s: float,
    arrived: Collection[str],
    roster: Sequence[str],
    timeout_s: float,
    deadline_s: float = math.inf,
    *,
    away: Collection[str] = (),
    min_parties: int = 0,
) -> Proceed | KeepWaiting | TimedOut:
    """Decides whether a step proceeds (all bundles of ``roster`` have arrived, or ``deadline_s`` is
    over), gives up (``timeout_s`` is over), or waits.

    With a deadline, the step does not wait for parties that are ``away``.

    Args:
        waited_s: The time since the step began.
        arrived: The parties whose bundle has arrived.
        roster: All parties that send a bundle.
        timeout_s: The maximum time that a connected party may take.
        deadline_s: The maximum time for which the step waits before it goes on without late
            parties.
        away: The parties that have missed an earlier step and have not come back.
        min_parties: The number of parties that a step with a deadline needs.
    """
    if len(arrived) == len(roster):
        return _PROCEED
    missing = tuple(party for party in roster if party not in arrived)
    if len(arrived) < min_parties:
        deadline_s = math.inf
    elif not math.isinf(deadline_s) and all(party in away for party in missing):
        deadline_s = 0.0
    if waited_s >= deadline_s:
        return _PROCEED
    if waited_s >= timeout_s:
        return TimedOut(missing)
    return KeepWaiting(min(timeout_s, deadline_s) - waited_s)


class ExchangeHub(Generic[AnyPipe]):
    """A ``Hub`` for one generation of a run; see ``vfl_common.bundle.Hub``.

    Args:
        pipe: The source of the bundles; its roster lists the parties that send.
        timeout_s: The maximum time that a connected party may take for one step.
        from_first: Whether the time of a step starts when the first bundle arrives, not when
            ``collect`` is called, so that the parties' work before the step has no time limit.
        punctual: Whether every step waits for all parties, even if it has a deadline.
    """

    def __init__(
        self,
        pipe: AnyPipe,
        *,
        timeout_s: float,
        from_first: bool = False,
        punctual: bool = False,
    ) -> None:
        self.pipe = pipe
        self._timeout_s, self._from_first, self._punctual = timeout_s, from_first, punctual
        # The deliveries that are handled before the deliveries in the pipe.
        self._queued: deque[Delivery] = deque()
        # The deliveries of parties that are at a later step.
        self._ahead: list[Delivery] = []
        self._step: StepKey | None = None
        self._expect: BundleSpec | Mapping[str, BundleSpec] | None = None
        # The parties that send at this step.
        self._senders = pipe.roster
        self._arrived: dict[str, Bundle] = {}
        # The parties without which this step is computed, and which get a reply later.
        self._late: frozenset[str] = frozenset()
        self._has_timeout = True
        self._collecting = False
        # The lenience of the current step.
        self._lenience: Lenience | None = None
        self._patience = Patience()
        # The parties that were not told yet that the last lenient step has passed.
        self._not_told: set[str] = set()
        # The phases with lenient steps.
        self._lenient_phases: set[str] = set()
        # The step at which a returning party repeats its bundle.
        self._repeat_step: StepKey | None = None
        # {party: the bundle that it must repeat when it returns}
        self._to_repeat: dict[str, Bundle] = {}

    # -- any thread
    # ----------------------------------------------------------------------

    @property
    def awaited(self) -> list[str]:
        """The parties whose bundle ``collect`` is waiting for now."""
        arrived, has_ended = list(self._arrived), self.pipe.ended is not None
        if not self._collecting or has_ended or (self._from_first and not arrived):
            return []
        away = self._patience.away if self._lenience is not None else ()
        return [party for party in self._senders if party not in arrived and party not in away]

    def end(self, error: VflError) -> None:
        """Ends this generation: ``collect`` raises ``error``, which is also sent to the parties.
        Further calls do nothing.
        """
        self.pipe.end(error)

    # -- the hub's thread
    # ----------------------------------------------------------------------

    def unhurried(self) -> None:
        self._has_timeout = False

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
        roster = self.pipe.roster
        senders = (
            roster
            if isinstance(expect, BundleSpec)
            else tuple(party for party in roster if party in expect)
        )
        self._step, self._expect, self._senders = step, expect, senders
        self._queued.extendleft(reversed(self._ahead))
        self._ahead.clear()
        self._collecting, self._lenience = True, lenience
        if lenience is not None:
            deadline_s = lenience.deadline_s
            self._lenient_phases.add(step.phase)
        if self._punctual:
            deadline_s = math.inf
        now_s = time.monotonic()
        started_s = None if self._from_first else now_s
        while True:
            if self.pipe.ended is not None:
                raise self.pipe.ended
            # All deliveries that have arrived are handled first, so that their bundles do not count
            # as late.
            for _ in range(len(self._queued) + self.pipe.waiting):
                self._handle_next(0.0, arrived)
            if started_s is None and self._arrived:
                started_s = now_s
            waited_s = 0.0 if started_s is None else now_s - started_s
            has_timeout = self._has_timeout and (lenience is not None or math.isinf(deadline_s))
            decision = decide(
                waited_s,
                self._arrived.keys(),
                senders,
                self._timeout_s if has_timeout else math.inf,
                deadline_s,
                away=self._patience.away,
                min_parties=lenience.at_least if lenience is not None else 0,
            )
            if isinstance(decision, Proceed):
                self._has_timeout, self._collecting = True, False
                missing = frozenset(senders) - self._arrived.keys()
                if lenience is None:
                    self._late = missing
                else:
                    self._go_on_without(missing, now_s, deadline_s)
                return {party: self._arrived[party] for party in senders if party in self._arrived}
            if isinstance(decision, TimedOut):
                raise LostError(
                    Code.STEP_TIMEOUT,
                    f"{', '.join(decision.late)} took longer than {self._timeout_s:g} s for {step} "
                    "(run.step_timeout_s)",
                    party=decision.late[0],
                )
            before_s, wait_s = now_s, min(decision.for_s, _MAX_WAIT_S)
            self._handle_next(wait_s, arrived)
            now_s = time.monotonic()
            if started_s is not None and now_s - before_s > wait_s + _STANDSTILL_S:
                # The process or its machine was suspended. That time does not count.
                started_s += now_s - before_s - wait_s

    def _handle_next(
        self, wait_s: float, arrived: Callable[[str, Bundle], None] | None = None
    ) -> None:
        """Handles the next delivery, if a delivery comes within ``wait_s``."""
        delivery = self._queued.popleft() if self._queued else self.pipe.next(wait_s)
        if delivery is None:
            return
        if self._is_ahead(delivery):
            self._ahead.append(delivery)
        elif self._handle_part(delivery) and arrived is not None:
            arrived(delivery.party, self._arrived[delivery.party])

    def _is_ahead(self, delivery: Delivery) -> bool:
        """Returns whether a delivery belongs to a later step: its party sends nothing at this step,
        or has already sent its complete bundle.
        """
        party, incoming = delivery.party, delivery.incoming
        if party not in self._senders:
            return True
        return (
            self.pipe.in_flight > 1
            and party in self._arrived
            and incoming is not None
            and incoming.step != self._step
        )

    def ask_again(self, step: StepKey) -> None:
        self._repeat_step, self._to_repeat = step, dict(self._arrived)

    def settle(self) -> None:
        if self._step is None or not self._not_told:
            return
        self._step, self._expect = StepKey(self._step.phase, self._step.round + 1, 0), None
        give_up_s = time.monotonic() + self._timeout_s
        while self._not_told:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0.0:
                late = [party for party in self.pipe.roster if party in self._not_told]
                raise LostError(
                    Code.STEP_TIMEOUT,
                    f"{', '.join(late)} took longer than {self._timeout_s:g} s to finish phase "
                    f"{self._step.phase} (run.step_timeout_s)",
                    party=late[0],
                )
            delivery = self.pipe.next(left_s)
            if delivery is not None and delivery.party in self._not_told:
                self._handle_part(delivery)
            elif delivery is not None:
                # The party has already begun the next phase.
                self._queued.append(delivery)
        self._patience = Patience()

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        if step != self._step or set(replies) != self._arrived.keys() | self._late:
            raise InternalError(f"reply({step}) does not answer what was collected at {self._step}")
        # The generator packs one reply at a time, so each reply is sent before the next one is
        # packed.
        for party, answer in self.pipe.pack(step, replies):
            if party in self._arrived:
                self.pipe.answer(party, step, answer)
            else:
                self.pipe.answer_late(party, step, answer)
        self._arrived, self._late = {}, frozenset()

    def _go_on_without(self, missing: frozenset[str], now_s: float, deadline_s: float) -> None:
        """Goes on without the parties ``missing``, and drops the parts of their bundles that have
        arrived.
        """
        for party in missing:
            incoming = self.pipe.newest(party)
            if incoming is not None and incoming.step == self._step:
                incoming.assembly, incoming.passed = None, True
            self._patience.note_missed(party, now_s, deadline_s)
        self._not_told = set(missing)

    def _catch_up(self, party: str, incoming: Incoming[Any, Any]) -> None:
        """Sends the current step to a party whose bundle came too late, and marks the party as
        present.
        """
        if self._step is None:
            return
        self.pipe.tell(party, incoming, self._step)
        self._patience.note_return(party, time.monotonic())
        self._not_told.discard(party)

    def _check_repeat(self, party: str, bundle: Bundle, incoming: Incoming[Any, Any]) -> None:
        """Checks that a returning party's repeated bundle is unchanged, and sends the party the
        current step.
        """
        if bundle != self._to_repeat[party]:
            raise PeerError(
                Code.ROWS_DIFFER, f"{party} returned with other rows than before", party=party
            )
        if self._step is not None:
            self.pipe.tell(party, incoming, self._step)

    def _handle_part(self, delivery: Delivery) -> bool:
        """Handles one part of a bundle, in the order in which its party sent the parts. Returns
        whether the part completes the party's bundle for this step.
        """
        party, incoming = delivery.party, delivery.incoming
        self.pipe.read(party)
        if incoming is None:
            raise make_message_error(f"{party} sent a frame that belongs to no bundle", party)
        if not self.pipe.is_current(party, incoming):
            return False
        if delivery.begins:
            self._begin_bundle(delivery, incoming)
        if incoming.passed:
            if delivery.ends:
                self._catch_up(party, incoming)
            return False
        if incoming.assembly is None:
            raise make_message_error(f"{party} sent a frame that belongs to no bundle", party)
        bundle = incoming.assembly.feed(delivery.part)
        if bundle is None:
            return False
        incoming.assembly = None
        if incoming.step == self._repeat_step:
            self._check_repeat(party, bundle, incoming)
            return False
        self._arrived[party] = bundle
        if party in self._patience.away:
            self._patience.note_return(party, time.monotonic())
        return True

    def _begin_bundle(self, delivery: Delivery, incoming: Incoming[Any, Any]) -> None:
        """Begins to assemble a bundle from its first part."""
        party = delivery.party
        # A returning party repeats its bundle, independently of the current step.
        if incoming.step == self._repeat_step:
            # A bundle that the party's earlier process sent is dropped.
            self._arrived.pop(party, None)
            incoming.assembly = self.pipe.begin(delivery, self._to_repeat[party].spec())
            return
        if incoming.step != self._step and (
            self._lenience is not None or incoming.step.phase in self._lenient_phases
        ):
            # A bundle that the party's earlier process sent is dropped.
            self._arrived.pop(party, None)
            incoming.passed = True
            return
        if incoming.step != self._step or self._expect is None:
            raise PeerError(
                Code.STEP_OUT_OF_ORDER,
                f"{party} sent {incoming.step}, but the current step is {self._step}",
                party=party,
            )
        expect = self._expect if isinstance(self._expect, BundleSpec) else self._expect[party]
        incoming.assembly = self.pipe.begin(delivery, expect)
