"""The computing side of an exchange: tracks the bundles that have arrived and the parties that are
late or away.

It does not depend on the transport: see ``pipe``. One thread, inside ``collect``, checks the order
and the specs of bundles, assembles them and handles late parties. ``decide`` is a pure function
that returns whether a step may proceed. ``Patience`` tracks the parties that are away. Both take
the time as an argument.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vfl_common.bundle import Bundle, BundleSpec, StepKey
from vfl_common.errors import Code, InternalError, LostError, PeerError, VflError
from vfl_common.link import Lenience
from vfl_common.rpc.exchange.pipe import BundlePipe, Delivery, Incoming
from vfl_common.wire.frames import make_message_error

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
    """A ``Hub`` for one generation of a run; see ``vfl_common.link.Hub``.

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
