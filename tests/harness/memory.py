"""Link and Hub without a wire: threads of one process and one lock. What the contract means, in its shortest form."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence

from vfl_common.bundle import Buffer, Bundle, BundleSpec, StepKey, TensorSpec
from vfl_common.errors import Code, InternalError, LostError, PeerError, VflError
from vfl_common.rpc.failures import from_failure, to_failure


class MemoryHub:
    """A ``Hub``, and where its links leave their bundles."""

    def __init__(self, name: str, roster: Sequence[str], *, timeout_s: float) -> None:
        self.name, self.roster, self._timeout_s = name, tuple(roster), timeout_s
        self.changed = threading.Condition()
        self.ended: VflError | None = None
        self.asked: dict[str, tuple[StepKey, Bundle]] = {}
        self.replies: dict[str, tuple[StepKey, Bundle]] = {}
        self._step: StepKey | None = None
        self._due: set[str] = set()

    def collect(
        self,
        step: StepKey,
        expect: BundleSpec,
        each: Callable[[str, Bundle], None] | None = None,
        deadline_s: float = math.inf,
    ) -> dict[str, Bundle]:
        if self._due:
            raise InternalError(f"collect({step}) before the reply to {self._step}")
        self._step = step
        began_s = time.monotonic()
        give_up_s = began_s + min(self._timeout_s, deadline_s)
        arrived: dict[str, Bundle] = {}
        with self.changed:
            while True:
                if self.ended is not None:
                    raise self.ended
                for party, (asked, bundle) in self.asked.items():
                    if party in arrived or self.replies.get(party, (None,))[0] == asked:
                        continue
                    if asked != step:
                        text = f"{party} sent {asked} while {step} is under way"
                        raise PeerError(Code.STEP_OUT_OF_ORDER, text, public=text, party=party)
                    check(expect, bundle, party, step)
                    arrived[party] = bundle
                late = [party for party in self.roster if party not in arrived]
                if not late or time.monotonic() >= began_s + deadline_s:
                    self._due = set(self.roster)
                    for party, bundle in arrived.items() if each is not None else ():
                        each(party, bundle)
                    return {party: arrived[party] for party in self.roster if party in arrived}
                waited = self.changed.wait(max(0.0, give_up_s - time.monotonic()))
                if not waited and time.monotonic() >= began_s + self._timeout_s:
                    text = f"{', '.join(late)} took longer than {self._timeout_s:g} s for {step}"
                    raise LostError(Code.STEP_TIMEOUT, text, public=text, party=late[0])

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


class MemoryLink:
    """A ``Link`` to a MemoryHub."""

    def __init__(self, hub: MemoryHub, me: str) -> None:
        self._hub, self._me = hub, me
        self._ended: VflError | None = None

    def swap(self, step: StepKey, bundle: Bundle, expect: BundleSpec) -> Bundle:
        self.send(step, bundle)
        return self.receive(step, expect)

    def send(self, step: StepKey, bundle: Bundle) -> None:
        with self._hub.changed:
            if self._ended is not None:
                raise self._ended
            self._hub.asked[self._me] = (step, copied(bundle))
            self._hub.changed.notify_all()

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        hub = self._hub
        with hub.changed:
            hub.changed.wait_for(lambda: self._ended or hub.ended or self._answered(step))
            if self._ended is not None:
                raise self._ended
            if hub.ended is not None:
                raise from_failure(to_failure(hub.ended), sender=hub.name, me=self._me)
            reply = copied(hub.replies[self._me][1])
        check(expect, reply, hub.name, step)
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
    """As the wire does: the receiver's memory is its own."""
    tensors = {
        name: Buffer(buffer.dtype, buffer.shape, memoryview(bytearray(buffer.data)))
        for name, buffer in bundle.tensors.items()
    }
    return Bundle(bundle.kind, tensors)
