"""Link and Hub without a wire, for parties that are threads of one process.

They keep the contract of every transport (``tests/contract``), and count what the same bundles
would be on the wire. A bundle is copied when it is sent, because the receiver of a wire has its own
memory, too.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from vfl_common.bundle import Buffer, Bundle, BundleSpec, StepKey, TensorSpec
from vfl_common.errors import Code, InternalError, LostError, PeerError, VflError
from vfl_common.ledger import Direction, Ledger
from vfl_common.link import Hub, Lenience, Link, StepPassed
from vfl_common.rpc.arrivals import Patience, Proceed, TimedOut, decide
from vfl_common.rpc.failures import from_failure, to_failure
from vfl_common.wire.frames import BundleSizes, measure


class Turns:
    """The one lock of a hub and its links. A thread that waits gives it up, and others take their
    turn.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def condition(self) -> threading.Condition:
        """Returns a condition to wait for."""
        return threading.Condition(self.lock)

    def wait_for(
        self, condition: threading.Condition, is_so: Callable[[], object], timeout_s: float
    ) -> bool:
        """Waits, at most ``timeout_s`` (``inf``: for ever), until ``is_so`` is true; returns
        whether it is.
        """
        return bool(condition.wait_for(is_so, None if math.isinf(timeout_s) else timeout_s))


class Carried(NamedTuple):
    """A copy of a bundle, so that the receiver has its own memory; ``size``: what it would be on
    the wire.
    """

    bundle: Bundle
    size: BundleSizes

    @classmethod
    def of(cls, bundle: Bundle, size: BundleSizes) -> Carried:
        tensors = {
            name: Buffer(buffer.dtype, buffer.shape, memoryview(bytearray(buffer.data)))
            for name, buffer in bundle.tensors.items()
        }
        return cls(Bundle(bundle.kind, tensors), size)


class MemoryHub(Hub):
    """A ``Hub`` that also holds the bundles of its links.

    Args:
        name: of the party that answers.
        roster: the parties that ask.
        timeout_s: the longest time of a step.
        ledger: of the party that answers.
        turns: the lock; one that others share, if only one of them is to run at a time.
        punctual: nobody is ever late: a step waits for all, whatever its deadline is.
        in_flight: the most bundles of one party that may be under way.
    """

    def __init__(
        self,
        name: str,
        roster: Sequence[str],
        *,
        timeout_s: float,
        ledger: Ledger | None = None,
        turns: Turns | None = None,
        punctual: bool = False,
        in_flight: int = 1,
    ) -> None:
        self.name, self.roster, self.timeout_s = name, tuple(roster), timeout_s
        self.turns = turns if turns is not None else Turns()
        self.ended: VflError | None = None
        # Unanswered.
        self.asked: dict[str, deque[tuple[StepKey, Carried]]] = {
            party: deque() for party in self.roster
        }
        # The last replies to each, in order, or the step that is under way.
        self.replies: dict[str, dict[StepKey, Carried | StepKey]] = {
            party: {} for party in self.roster
        }
        self.in_flight = in_flight
        # Something has come, or the hub has ended.
        self.changed = self.turns.condition()
        self.answered = {party: self.turns.condition() for party in self.roster}
        self.ledger = ledger if ledger is not None else Ledger()
        self._punctual = punctual
        self._step: StepKey | None = None
        self._due: set[str] = set()
        self._hurried = True
        self._patience = Patience()
        # Parties that were not there at the last step, and do not know the next.
        self._behind: set[str] = set()

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
        if self._due:
            raise InternalError(f"collect({step}) before the reply to {self._step}")
        self._step = step
        roster = (
            self.roster
            if isinstance(expect, BundleSpec)
            else [each for each in self.roster if each in expect]
        )
        if lenience is not None:
            deadline_s = lenience.deadline_s
        if self._punctual:
            deadline_s = math.inf
        at_least = lenience.at_least if lenience is not None else 0
        hurried = self._hurried and (lenience is not None or math.isinf(deadline_s))
        timeout_s = self.timeout_s if hurried else math.inf
        began_s = time.monotonic()
        got: dict[str, Bundle] = {}
        while True:
            decision = decide(
                time.monotonic() - began_s,
                got.keys(),
                roster,
                timeout_s,
                deadline_s,
                away=self._patience.away,
                at_least=at_least,
            )
            if isinstance(decision, Proceed):
                self._hurried, self._due = True, set(roster if lenience is None else got)
                self._behind = set(roster) - self._due
                for party in self._behind:
                    self._patience.missed(party, time.monotonic(), deadline_s)
                return {party: got[party] for party in roster if party in got}
            if isinstance(decision, TimedOut):
                text = (
                    f"{', '.join(decision.late)} took longer than {self.timeout_s:g} s for {step}"
                )
                raise LostError(Code.STEP_TIMEOUT, text, party=decision.late[0])
            for party, (asked, carried) in self._wait(got, decision.for_s, of=roster).items():
                if asked != step and lenience is not None:
                    self._catch_up(party, asked, step)
                    continue
                if asked != step:
                    text = f"{party} sent {asked} while {step} is under way"
                    raise PeerError(Code.STEP_OUT_OF_ORDER, text, party=party)
                bundle = got[party] = carried.bundle
                check(
                    expect if isinstance(expect, BundleSpec) else expect[party], bundle, party, step
                )
                count(self.ledger, party, "received", step, bundle, carried.size)
                if party in self._patience.away:
                    self._patience.came(party, time.monotonic())
                if arrived is not None:
                    arrived(party, bundle)

    def ask_again(self, step: StepKey) -> None:
        """Nothing: a party that is in this process does not return."""

    def settle(self) -> None:
        assert self._step is not None  # noqa: S101 - a phase settles after its steps
        over = StepKey(self._step.phase, self._step.round + 1, 0)
        give_up_s = time.monotonic() + self.timeout_s
        while self._behind:
            new = self._wait((), give_up_s - time.monotonic(), of=self._behind)
            if not new:
                party = next(party for party in self.roster if party in self._behind)
                raise LostError(
                    Code.STEP_TIMEOUT, f"{party} took longer than {self.timeout_s:g} s", party=party
                )
            for party, (asked, _) in new.items():
                self._catch_up(party, asked, over)
        self._patience = Patience()

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        if step != self._step or set(replies) != self._due:
            raise InternalError(f"reply({step}) does not answer what was collected at {self._step}")
        with self.turns.lock:
            self._due = set()
            # Often one for all.
            apart = {id(bundle): bundle for bundle in replies.values()}
            size = {key: measure(step, bundle) for key, bundle in apart.items()}
            for party, bundle in replies.items():
                count(self.ledger, party, "sent", step, bundle, size[id(bundle)])
                self._answer(party, step, Carried.of(bundle, size[id(bundle)]))

    def _answer(self, party: str, step: StepKey, reply: Carried | StepKey) -> None:
        """Gives a party its reply; the caller holds the lock."""
        asked, replies = self.asked[party], self.replies[party]
        if asked and asked[0][0] == step:
            asked.popleft()
        replies[step] = reply
        while len(replies) > self.in_flight:
            del replies[next(iter(replies))]
        self.answered[party].notify_all()

    def end(self, error: VflError) -> None:
        """Ends the generation: whoever waits, or calls later, gets ``error``. Any thread may call
        this.
        """
        with self.turns.lock:
            self.ended = self.ended or error
            for condition in (self.changed, *self.answered.values()):
                condition.notify_all()

    def _wait(
        self, got: Collection[str], timeout_s: float, of: Collection[str] | None = None
    ) -> dict[str, tuple[StepKey, Carried]]:
        """Waits until something new has come, at most ``timeout_s``. Raises the error that has
        ended the hub.
        """
        parties = self.roster if of is None else of
        with self.turns.lock:
            self.turns.wait_for(
                self.changed, lambda: self.ended or self._new(parties, got), timeout_s
            )
            if self.ended is not None:
                raise self.ended
            return self._new(parties, got)

    def _new(
        self, parties: Collection[str], got: Collection[str]
    ) -> dict[str, tuple[StepKey, Carried]]:
        """Returns each party's first bundle without a reply that is not taken yet; the caller holds
        the lock.
        """
        return {
            party: self.asked[party][0]
            for party in parties
            if party not in got and self.asked[party]
        }

    def _catch_up(self, party: str, asked: StepKey, now: StepKey) -> None:
        """Tells a party whose step has passed which one is under way."""
        with self.turns.lock:
            self._answer(party, asked, now)
            self._patience.came(party, time.monotonic())
        self._behind.discard(party)


class MemoryLink(Link):
    """A ``Link`` of the party ``me`` to a ``MemoryHub``. ``ledger``: the party's."""

    def __init__(
        self, hub: MemoryHub, me: str, *, timeout_s: float, ledger: Ledger | None = None
    ) -> None:
        self._hub, self._me, self.timeout_s = hub, me, timeout_s
        self._ledger = ledger if ledger is not None else Ledger()
        self._ended: VflError | None = None
        self._hurried = True

    def swap(self, step: StepKey, bundle: Bundle, expect: BundleSpec) -> Bundle:
        self.send(step, bundle)
        return self.receive(step, expect)

    def unhurried(self) -> None:
        self._hurried = False

    def send(self, step: StepKey, bundle: Bundle) -> None:
        hub = self._hub
        with hub.turns.lock:
            if self._ended is not None:
                raise self._ended
            size = measure(step, bundle)
            count(self._ledger, hub.name, "sent", step, bundle, size)
            asked = hub.asked[self._me]
            if step in hub.replies[self._me] or any(step == each for each, _ in asked):
                # It is sent again.
                return
            # Its sender has given up the first, and begins again.
            if len(asked) >= hub.in_flight:
                asked.popleft()
            asked.append((step, Carried.of(bundle, size)))
            hub.changed.notify_all()

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        hub = self._hub
        with hub.turns.lock:
            timeout_s = self.timeout_s if self._hurried else math.inf
            mine = hub.answered[self._me]
            if not hub.turns.wait_for(
                mine, lambda: self._ended or hub.ended or self._answered(step), timeout_s
            ):
                text = f"{hub.name} took longer than {self.timeout_s:g} s for {step}"
                self._ended = LostError(Code.STEP_TIMEOUT, text, party=hub.name)
            if self._ended is not None:
                raise self._ended
            if hub.ended is not None:
                raise from_failure(to_failure(hub.ended), sender=hub.name, me=self._me)
            reply = hub.replies[self._me][step]
        if isinstance(reply, StepKey):
            raise StepPassed(reply)
        check(expect, reply.bundle, hub.name, step)
        count(self._ledger, hub.name, "received", step, reply.bundle, reply.size)
        self._hurried = True
        return reply.bundle

    def end(self, error: VflError) -> None:
        """Ends the generation for this party; see ``MemoryHub.end``."""
        with self._hub.turns.lock:
            self._ended = self._ended or error
            self._hub.answered[self._me].notify_all()

    def _answered(self, step: StepKey) -> bool:
        return step in self._hub.replies[self._me]


def count(
    ledger: Ledger,
    peer: str,
    direction: Direction,
    step: StepKey,
    bundle: Bundle,
    size: BundleSizes,
) -> None:
    """Counts a bundle as the frames that it would be on the wire."""
    ledger.add(
        peer,
        step.phase,
        bundle.kind.label,
        direction,
        size.payload_bytes,
        size.message_bytes,
        size.messages,
    )


def check(expect: BundleSpec, bundle: Bundle, party: str, step: StepKey) -> None:
    """Raises PeerError if ``bundle`` is not what ``expect`` says."""
    specs = {
        name: TensorSpec(buffer.dtype, buffer.shape) for name, buffer in bundle.tensors.items()
    }
    expect.check(bundle.kind, specs, party=party, step=step)
