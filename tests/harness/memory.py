"""Link and Hub without a wire, for threads of one process with one lock: the contract in its shortest form."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from vfl_common.bundle import Buffer, Bundle, BundleSpec, StepKey, TensorSpec
from vfl_common.errors import Code, InternalError, LostError, PeerError, VflError
from vfl_common.link import Hub, Lenience, Link, StepPassed
from vfl_common.rpc.arrivals import Proceed, TimedOut, decide
from vfl_common.rpc.failures import from_failure, to_failure


class MemoryHub(Hub):
    """A ``Hub`` that also holds the bundles of its links."""

    def __init__(self, name: str, roster: Sequence[str], *, timeout_s: float) -> None:
        self.name, self.roster, self._timeout_s = name, tuple(roster), timeout_s
        self.changed = threading.Condition()
        self.ended: VflError | None = None
        self.asked: dict[str, tuple[StepKey, Bundle]] = {}
        self.replies: dict[str, tuple[StepKey, Bundle | StepKey]] = {}  # or the step that is under way
        self._step: StepKey | None = None
        self._due: set[str] = set()
        self._hurried = True
        self._away: set[str] = set()

    def unhurried(self) -> None:
        self._hurried = False

    def collect(
        self,
        step: StepKey,
        expect: BundleSpec,
        arrived: Callable[[str, Bundle], None] | None = None,
        deadline_s: float = math.inf,
        lenience: Lenience | None = None,
    ) -> dict[str, Bundle]:
        if self._due:
            raise InternalError(f"collect({step}) before the reply to {self._step}")
        self._step = step
        if lenience is not None:
            deadline_s = lenience.deadline_s
        at_least = lenience.at_least if lenience is not None else 0
        hurried = self._hurried and (lenience is not None or math.isinf(deadline_s))
        timeout_s = self._timeout_s if hurried else math.inf
        began_s = time.monotonic()
        got: dict[str, Bundle] = {}
        while True:
            decision = decide(
                time.monotonic() - began_s,
                got.keys(),
                self.roster,
                timeout_s,
                deadline_s,
                away=self._away,
                at_least=at_least,
            )
            if isinstance(decision, Proceed):
                self._hurried, self._due = True, set(self.roster if lenience is None else got)
                self._away |= set(self.roster) - self._due
                return {party: got[party] for party in self.roster if party in got}
            if isinstance(decision, TimedOut):
                text = f"{', '.join(decision.late)} took longer than {self._timeout_s:g} s for {step}"
                raise LostError(Code.STEP_TIMEOUT, text, party=decision.late[0])
            with self.changed:
                left_s = None if math.isinf(decision.for_s) else decision.for_s
                self.changed.wait_for(lambda: self.ended or self._new(got), timeout=left_s)
                if self.ended is not None:
                    raise self.ended
                new = self._new(got)
            for party, (asked, bundle) in new.items():
                if asked != step and lenience is not None:
                    self._catch_up(party, asked, step)
                    continue
                if asked != step:
                    text = f"{party} sent {asked} while {step} is under way"
                    raise PeerError(Code.STEP_OUT_OF_ORDER, text, party=party)
                check(expect, bundle, party, step)
                got[party] = bundle
                if arrived is not None:
                    arrived(party, bundle)

    def settle(self) -> None:
        assert self._step is not None
        over = StepKey(self._step.phase, self._step.round + 1, 0)
        give_up_s = time.monotonic() + self._timeout_s
        while self._away:
            with self.changed:
                came = self.changed.wait_for(
                    lambda: self.ended or self._away & self._new(()).keys(), give_up_s - time.monotonic()
                )
                if self.ended is not None:
                    raise self.ended
                new = self._new(())
            if not came:
                party = min(self._away)
                raise LostError(Code.STEP_TIMEOUT, f"{party} took longer than {self._timeout_s:g} s", party=party)
            for party, (asked, _) in new.items():
                if party in self._away:
                    self._catch_up(party, asked, over)

    def _catch_up(self, party: str, asked: StepKey, now: StepKey) -> None:
        with self.changed:
            self.replies[party] = (asked, now)
            self._away.discard(party)
            self.changed.notify_all()

    def _new(self, got: Collection[str]) -> dict[str, tuple[StepKey, Bundle]]:
        """Returns the bundles that were sent and are neither answered nor taken; the caller holds the lock."""
        return {
            party: sent
            for party, sent in self.asked.items()
            if party not in got and self.replies.get(party, (None,))[0] != sent[0]
        }

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        if step != self._step or set(replies) != self._due:
            raise InternalError(f"reply({step}) does not answer what was collected at {self._step}")
        with self.changed:
            self._due = set()
            self.replies.update({party: (step, copied(bundle)) for party, bundle in replies.items()})
            self.changed.notify_all()

    def end(self, error: VflError) -> None:
        with self.changed:
            self.ended = self.ended or error
            self.changed.notify_all()


class MemoryLink(Link):
    """A ``Link`` to a MemoryHub."""

    def __init__(self, hub: MemoryHub, me: str, *, timeout_s: float) -> None:
        self._hub, self._me, self._timeout_s = hub, me, timeout_s
        self._ended: VflError | None = None
        self._hurried = True

    def swap(self, step: StepKey, bundle: Bundle, expect: BundleSpec) -> Bundle:
        self.send(step, bundle)
        return self.receive(step, expect)

    def unhurried(self) -> None:
        self._hurried = False

    def send(self, step: StepKey, bundle: Bundle) -> None:
        with self._hub.changed:
            if self._ended is not None:
                raise self._ended
            self._hub.asked[self._me] = (step, copied(bundle))
            self._hub.changed.notify_all()

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        hub = self._hub
        with hub.changed:
            timeout_s = self._timeout_s if self._hurried else None
            if not hub.changed.wait_for(lambda: self._ended or hub.ended or self._answered(step), timeout_s):
                text = f"{hub.name} took longer than {self._timeout_s:g} s for {step}"
                self._ended = LostError(Code.STEP_TIMEOUT, text, party=hub.name)
            if self._ended is not None:
                raise self._ended
            if hub.ended is not None:
                raise from_failure(to_failure(hub.ended), sender=hub.name, me=self._me)
            answer = hub.replies[self._me][1]
            if isinstance(answer, StepKey):
                raise StepPassed(answer)
            reply = copied(answer)
        check(expect, reply, hub.name, step)
        self._hurried = True
        return reply

    def end(self, error: VflError) -> None:
        with self._hub.changed:
            self._ended = self._ended or error
            self._hub.changed.notify_all()

    def _answered(self, step: StepKey) -> bool:
        return self._me in self._hub.replies and self._hub.replies[self._me][0] == step


def check(expect: BundleSpec, bundle: Bundle, party: str, step: StepKey) -> None:
    specs = {name: TensorSpec(buffer.dtype, buffer.shape) for name, buffer in bundle.tensors.items()}
    expect.check(bundle.kind, specs, party=party, step=step)


def copied(bundle: Bundle) -> Bundle:
    """Copies a bundle, because the receiver of a wire has its own memory too."""
    tensors = {
        name: Buffer(buffer.dtype, buffer.shape, memoryview(bytearray(buffer.data)))
        for name, buffer in bundle.tensors.items()
    }
    return Bundle(bundle.kind, tensors)
