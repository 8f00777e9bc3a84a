"""A pipe and a link without a wire, for parties that are threads of one process.

They keep the contract of every transport (``tests/contract``), and count what the same bundles
would be on the wire. A bundle is copied when it is sent, because the receiver of a wire has its own
memory, too.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeAlias, TypeVar

from vfl_common.bundle import Buffer, Bundle, BundleSpec, StepKey
from vfl_common.errors import Code, LostError, PeerError, VflError
from vfl_common.ledger import Direction, Ledger
from vfl_common.link import Link, StepPassed
from vfl_common.rpc.exchange.pipe import BundlePipe, Delivery
from vfl_common.rpc.failures import from_failure, to_failure
from vfl_common.wire.frames import BundleSizes, measure

T = TypeVar("T")


class Turns:
    """The one lock of pipes and their links. A thread that waits gives it up, and others take their
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


class TurnQueue(Generic[T]):
    """A ``Mailbox``; whoever waits for something in it gives its turn up."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._filled = turns, turns.condition()
        self._items: deque[T] = deque()

    def put(self, item: T) -> None:
        with self._turns.lock:
            self._items.append(item)
            self._filled.notify()

    def get(self, *, timeout: float | None = None) -> T:
        timeout_s = math.inf if timeout is None else timeout
        with self._turns.lock:
            if not self._turns.wait_for(self._filled, lambda: self._items, timeout_s):
                raise queue.Empty
            return self._items.popleft()

    def empty(self) -> bool:
        return not self._items

    def qsize(self) -> int:
        return len(self._items)


@dataclass(frozen=True, slots=True)
class Carried:
    """A copy of a bundle, so that the receiver has its own memory; ``size``: what it would be on
    the wire.
    """

    step: StepKey
    bundle: Bundle
    size: BundleSizes

    @classmethod
    def of(cls, step: StepKey, bundle: Bundle, size: BundleSizes) -> Carried:
        tensors = {
            name: Buffer(buffer.dtype, buffer.shape, memoryview(bytearray(buffer.data)))
            for name, buffer in bundle.tensors.items()
        }
        return cls(step, Bundle(bundle.kind, tensors), size)

    def feed(self, part: Carried) -> Bundle:
        """Returns the bundle: it is its own only part."""
        return part.bundle

    def check(self, expect: BundleSpec, party: str) -> None:
        """Raises PeerError if the bundle is not what ``expect`` says."""
        bundle = self.bundle
        expect.check(bundle.kind, bundle.spec().tensors, party=party, step=self.step)

    def count(self, ledger: Ledger, peer: str, direction: Direction) -> None:
        """Counts the bundle as the frames that it would be on the wire."""
        ledger.add(peer, self.step.phase, self.bundle.kind.label, direction, *self.size)


# A bundle, or the step that is under way.
_Reply: TypeAlias = Carried | StepKey


class MemoryPipe(BundlePipe[Carried, _Reply]):
    """The bundles of one generation as they are; see ``BundlePipe``.

    Args:
        name: of the party that answers.
        roster: the parties that ask.
        ledger: of the party that answers.
        turns: the lock; one that others share, if only one of them is to run at a time.
        in_flight: the most bundles of one party that may be under way.
    """

    def __init__(
        self,
        name: str,
        roster: Sequence[str],
        *,
        ledger: Ledger | None = None,
        turns: Turns | None = None,
        in_flight: int = 1,
    ) -> None:
        self.name = name
        self.turns = turns if turns is not None else Turns()
        self.ledger = ledger if ledger is not None else Ledger()
        super().__init__(
            roster,
            in_flight=in_flight,
            most_unread=math.inf,
            lock=self.turns.condition(),
            mailbox=partial(TurnQueue, self.turns),
        )

    def begin(self, delivery: Delivery, expect: BundleSpec) -> Carried:
        carried: Carried = delivery.part
        carried.check(expect, delivery.party)
        return carried

    def pack(self, step: StepKey, replies: Mapping[str, Bundle]) -> Iterator[tuple[str, _Reply]]:
        sizes: dict[int, BundleSizes] = {}
        for party, bundle in replies.items():
            size = sizes[id(bundle)] = sizes.get(id(bundle)) or measure(step, bundle)
            carried = Carried.of(step, bundle, size)
            carried.count(self.ledger, party, "sent")
            yield party, carried

    def passed(self, now: StepKey) -> _Reply:
        return now


class MemoryLink(Link):
    """A ``Link`` of the party ``me`` to the hub behind ``pipe``. ``ledger``: the party's."""

    def __init__(
        self, pipe: MemoryPipe, me: str, *, timeout_s: float, ledger: Ledger | None = None
    ) -> None:
        self._pipe, self._me, self._timeout_s = pipe, me, timeout_s
        self._ledger = ledger if ledger is not None else Ledger()
        self._stream = pipe.open(me)
        self._ended: VflError | None = None
        self._hurried = True

    def unhurried(self) -> None:
        self._hurried = False

    def send(self, step: StepKey, bundle: Bundle) -> None:
        if self._ended is not None:
            raise self._ended
        pipe, carried = self._pipe, Carried.of(step, bundle, measure(step, bundle))
        carried.count(self._ledger, pipe.name, "sent")
        carried.count(pipe.ledger, self._me, "received")
        pipe.begun(self._stream, step, bundle.kind.label)
        pipe.put(self._stream, carried, begins=True, ends=True)

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        peer = self._pipe.name
        try:
            reply = self._stream.outbox.get(timeout=self._timeout_s if self._hurried else math.inf)
        except queue.Empty:
            text = f"{peer} took longer than {self._timeout_s:g} s for {step}"
            self.end(LostError(Code.STEP_TIMEOUT, text, party=peer))
            reply = None
        if isinstance(reply, VflError):
            self.end(from_failure(to_failure(reply), sender=peer, me=self._me))
        if self._ended is not None:
            raise self._ended
        if isinstance(reply, StepKey):
            raise StepPassed(reply)
        if not isinstance(reply, Carried) or reply.step != step:
            answered = reply.step if isinstance(reply, Carried) else "nothing"
            text = f"{peer} answered {answered} instead of {step}"
            raise PeerError(Code.STEP_OUT_OF_ORDER, text, party=peer)
        reply.check(expect, peer)
        reply.count(self._ledger, peer, "received")
        self._hurried = True
        return reply.bundle

    def end(self, error: VflError) -> None:
        """Ends the generation for this party; see ``BundlePipe.end``. Any thread may call this."""
        if self._ended is None:
            self._ended = error
        self._stream.close()
