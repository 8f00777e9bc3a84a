"""The computing side of an exchange: which bundles have arrived, and which parties are late or
away.

It does not depend on the transport; see ``pipe``. One thread, inside ``collect``, checks order and
specs, and handles assembly and lateness. ``decide`` is a pure function of the arrived bundles, the
parties that are away, and the time; it returns whether a step may proceed. ``Patience`` tracks the
parties that are away. Both take the time as an argument.
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
from vfl_common.wire.frames import message_error

# The longest time between two decisions whether to wait longer.
_LONGEST_WAIT_S = 3600.0
# If a wait takes this much longer than it should, this process was stopped meanwhile.
_STANDSTILL_S = 1.0

AnyPipe = TypeVar("AnyPipe", bound=BundlePipe[Any, Any])


@dataclass(frozen=True, slots=True)
class Proceed:
    """All bundles have arrived, or the step may go on without the others."""


@dataclass(frozen=True, slots=True)
class KeepWaiting:
    """Bundles are missing, and their parties have ``for_s`` seconds left."""

    for_s: float


@dataclass(frozen=True, slots=True)
class TimedOut:
    """``late``, in roster order, have used up their time."""

    late: tuple[str, ...]


_PROCEED = Proceed()
# The count of deadlines for which a party must be in time before it may be late again.
_DEADLINES = 9


class Patience:
    """Tracks the parties that are away: those that have missed a step and have not come back.

    Steps wait again for a party that has come back. If it is late again within 9 deadlines, steps
    do not wait for it during the next 9: so a party that is slow, or delays the others on purpose,
    costs them a tenth of their time. Meanwhile it takes part in the steps for which it is in time.
    """

    def __init__(self) -> None:
        self.away: frozenset[str] = frozenset()
        self._back_s: dict[str, float] = {}
        self._not_before_s: dict[str, float] = {}

    def note_missed(self, party: str, now_s: float, deadline_s: float) -> None:
        """Notes that a step went on without ``party``."""
        if (
            party not in self.away
            and now_s - self._back_s.get(party, -math.inf) < _DEADLINES * deadline_s
        ):
            self._not_before_s[party] = now_s + _DEADLINES * deadline_s
        self.away |= {party}

    def note_return(self, party: str, now_s: float) -> None:
        """Notes that ``party`` has come back, and knows the current step."""
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
    """Proceeds when all of ``roster`` have arrived or at ``deadline_s``; gives up on late parties
    at ``timeout_s``.

    With a deadline, parties that are ``away`` are not waited for at all.

    Args:
        waited_s: time since the step began.
        arrived: the parties whose bundle is here.
        roster: all parties.
        timeout_s: how long a living party may take.
        deadline_s: how long a step waits that may go on without the late parties.
        away: parties that have missed an earlier step, and have not come back since.
        min_parties: the number of parties that a step with a deadline needs.
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
        pipe: brings the bundles; its roster lists the parties that send.
        timeout_s: how long a connected party may take for one step.
        from_first: starts a step's time at the first bundle's arrival, not at ``collect``, so that
            the parties' work before it may take any time.
        punctual: a step waits for all parties, whatever its deadline is.
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
        # Deliveries that are handled before those in the pipe.
        self._held: deque[Delivery] = deque()
        # The deliveries of parties that are at a later step.
        self._early: list[Delivery] = []
        self._step: StepKey | None = None
        self._expect: BundleSpec | Mapping[str, BundleSpec] | None = None
        # The parties that send at this step.
        self._asked = pipe.roster
        self._arrived: dict[str, Bundle] = {}
        # Parties that this step is computed without, and that get a reply later.
        self._late: frozenset[str] = frozenset()
        self._hurried = True
        self._collecting = False
        # The lenience of the current step.
        self._lenience: Lenience | None = None
        self._patience = Patience()
        # Parties that do not know yet that the last lenient step has passed.
        self._behind: set[str] = set()
        # Phases with steps that may go on without parties.
        self._lenient: set[str] = set()
        # The step in which a party that returns repeats its bundle.
        self._again: StepKey | None = None
        # {party: the bundle that it must repeat}
        self._sent: dict[str, Bundle] = {}

    # -- any thread
    # ----------------------------------------------------------------------

    @property
    def awaited(self) -> list[str]:
        """The parties whose bundle ``collect`` is waiting for now."""
        arrived, over = list(self._arrived), self.pipe.ended is not None
        if not self._collecting or over or (self._from_first and not arrived):
            return []
        gone = self._patience.away if self._lenience is not None else ()
        return [party for party in self._asked if party not in arrived and party not in gone]

    def end(self, error: VflError) -> None:
        """Ends this generation: ``collect`` raises ``error``, which the parties get, too. Further
        calls do nothing.
        """
        self.pipe.end(error)

    # -- the hub's thread
    # ----------------------------------------------------------------------

    def unhurried(self) -> None:
        self._hurried = False

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
        asked = (
            roster
            if isinstance(expect, BundleSpec)
            else tuple(party for party in roster if party in expect)
        )
        self._step, self._expect, self._asked = step, expect, asked
        self._held.extendleft(reversed(self._early))
        self._early.clear()
        self._collecting, self._lenience = True, lenience
        if lenience is not None:
            deadline_s = lenience.deadline_s
            self._lenient.add(step.phase)
        if self._punctual:
            deadline_s = math.inf
        now_s = time.monotonic()
        started_s = None if self._from_first else now_s
        while True:
            if self.pipe.ended is not None:
                raise self.pipe.ended
            # Bundles that have arrived by now are not late.
            for _ in range(len(self._held) + self.pipe.waiting):
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
                min_parties=lenience.at_least if lenience is not None else 0,
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
                raise LostError(
                    Code.STEP_TIMEOUT,
                    f"{', '.join(decision.late)} took longer than {self._timeout_s:g} s for {step} "
                    "(run.step_timeout_s)",
                    party=decision.late[0],
                )
            before_s, wait_s = now_s, min(decision.for_s, _LONGEST_WAIT_S)
            self._next(wait_s, arrived)
            now_s = time.monotonic()
            if started_s is not None and now_s - before_s > wait_s + _STANDSTILL_S:
                # This process was stopped, or its machine was suspended; that time does not count.
                started_s += now_s - before_s - wait_s

    def _next(self, wait_s: float, arrived: Callable[[str, Bundle], None] | None = None) -> None:
        """Takes the next delivery, if one comes within ``wait_s``."""
        delivery = self._held.popleft() if self._held else self.pipe.next(wait_s)
        if delivery is None:
            return
        if self._is_ahead(delivery):
            self._early.append(delivery)
        elif self._take(delivery) and arrived is not None:
            arrived(delivery.party, self._arrived[delivery.party])

    def _is_ahead(self, delivery: Delivery) -> bool:
        """Returns whether a part belongs to a later step: its party sends nothing at this one, or
        has sent its whole bundle.
        """
        party, incoming = delivery.party, delivery.incoming
        if party not in self._asked:
            return True
        return (
            self.pipe.in_flight > 1
            and party in self._arrived
            and incoming is not None
            and incoming.step != self._step
        )

    def ask_again(self, step: StepKey) -> None:
        self._again, self._sent = step, dict(self._arrived)

    def settle(self) -> None:
        if self._step is None or not self._behind:
            return
        self._step, self._expect = StepKey(self._step.phase, self._step.round + 1, 0), None
        give_up_s = time.monotonic() + self._timeout_s
        while self._behind:
            left_s = give_up_s - time.monotonic()
            if left_s <= 0.0:
                late = [party for party in self.pipe.roster if party in self._behind]
                raise LostError(
                    Code.STEP_TIMEOUT,
                    f"{', '.join(late)} took longer than {self._timeout_s:g} s to finish phase "
                    f"{self._step.phase} (run.step_timeout_s)",
                    party=late[0],
                )
            delivery = self.pipe.next(left_s)
            if delivery is not None and delivery.party in self._behind:
                self._take(delivery)
            elif delivery is not None:
                # The party is at the next phase already.
                self._held.append(delivery)
        self._patience = Patience()

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        if step != self._step or set(replies) != self._arrived.keys() | self._late:
            raise InternalError(f"reply({step}) does not answer what was collected at {self._step}")
        # Each reply is sent before the next one is packed.
        for party, answer in self.pipe.pack(step, replies):
            if party in self._arrived:
                self.pipe.answer(party, step, answer)
            else:
                self.pipe.answer_late(party, step, answer)
        self._arrived, self._late = {}, frozenset()

    def _leave_behind(self, missing: frozenset[str], now_s: float, deadline_s: float) -> None:
        """Goes on without ``missing``; drops the parts of their bundles that have arrived."""
        for party in missing:
            incoming = self.pipe.newest(party)
            if incoming is not None and incoming.step == self._step:
                incoming.assembly, incoming.passed = None, True
            self._patience.note_missed(party, now_s, deadline_s)
        self._behind = set(missing)

    def _catch_up(self, party: str, incoming: Incoming[Any, Any]) -> None:
        """Tells a party whose bundle came too late the current step; see ``Patience``."""
        if self._step is None:
            return
        self.pipe.tell(party, incoming, self._step)
        self._patience.note_return(party, time.monotonic())
        self._behind.discard(party)

    def _check_repeat(self, party: str, bundle: Bundle, incoming: Incoming[Any, Any]) -> None:
        """Checks the bundle that a returning party repeats; its next bundle decides whether steps
        wait for it.
        """
        if bundle != self._sent[party]:
            raise PeerError(
                Code.ROWS_DIFFER, f"{party} returned with other rows than before", party=party
            )
        if self._step is not None:
            self.pipe.tell(party, incoming, self._step)

    def _take(self, delivery: Delivery) -> bool:
        """Handles a part, in the order in which its party sent them; returns whether it completes
        the party's bundle of this step.
        """
        party, incoming = delivery.party, delivery.incoming
        self.pipe.read(party)
        if incoming is None:
            raise message_error(f"{party} sent a frame that belongs to no bundle", party)
        if not self.pipe.is_current(party, incoming):
            return False
        if delivery.begins:
            self._begin(delivery, incoming)
        if incoming.passed:
            if delivery.ends:
                self._catch_up(party, incoming)
            return False
        if incoming.assembly is None:
            raise message_error(f"{party} sent a frame that belongs to no bundle", party)
        bundle = incoming.assembly.feed(delivery.part)
        if bundle is None:
            return False
        incoming.assembly = None
        if incoming.step == self._again:
            self._check_repeat(party, bundle, incoming)
            return False
        self._arrived[party] = bundle
        if party in self._patience.away:
            self._patience.note_return(party, time.monotonic())
        return True

    def _begin(self, delivery: Delivery, incoming: Incoming[Any, Any]) -> None:
        """Begins a bundle with its first part."""
        party = delivery.party
        # A party that has come back repeats its bundle, whatever the current step is.
        if incoming.step == self._again:
            # Drops the bundle of the party's earlier process.
            self._arrived.pop(party, None)
            incoming.assembly = self.pipe.begin(delivery, self._sent[party].spec())
            return
        if incoming.step != self._step and (
            self._lenience is not None or incoming.step.phase in self._lenient
        ):
            # Drops the bundle of the party's earlier process.
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
