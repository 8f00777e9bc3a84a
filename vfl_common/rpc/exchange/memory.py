"""A pipe and a link in memory, for parties that run as threads of one process.

They fulfil the contract of every transport (``tests/contract``), and count the bytes that the same
bundles would have on the wire. A bundle is copied when it is sent, so that the receiver has its own
memory.
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

from vfl_common.bundle import (
    Buffer,
    Bundle,
    BundleSpec,
    Direction,
    Ledger,
    Link,
    StepKey,
    StepPassed,
)
from vfl_common.errors import Code, LostError, PeerError, VflError
from vfl_common.frames import BundleSizes, measure_bundle
from vfl_common.rpc.exchange.hub import BundlePipe, Delivery
from vfl_common.rpc.messages import from_failure, to_failure

T = TypeVar("T")


class Turns:
    """The lock that pipes and their links share. A waiting thread releases it, so that another
    thread can run.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def condition(self) -> threading.Condition:
        """Returns a new condition of the shared lock."""
        return threading.Condition(self.lock)

    def wait_for(
        self, condition: threading.Condition, is_so: Callable[[], object], timeout_s: float
    ) -> bool:
        """Waits until ``is_so`` returns true, at most ``timeout_s`` (``inf`` for ever). Returns
        whether it returned true.
        """
        return bool(condition.wait_for(is_so, None if math.isinf(timeout_s) else timeout_s))


class TurnQueue(Generic[T]):
    """A ``Mailbox`` in which a waiting thread releases the shared lock."""

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
    """A copy of a bundle in the receiver's own memory. ``size``: the bundle's size on the wire."""

    step: StepKey
    bundle: Bundle
    size: BundleSizes

    @classmethod
    def of(cls, step: StepKey, bundle: Bundle, size: BundleSizes) -> Carried:
        """Returns a copy of ``bundle``."""
        tensors = {
            name: Buffer(buffer.dtype, buffer.shape, memoryview(bytearray(buffer.data)))
            for name, buffer in bundle.tensors.items()
        }
        return cls(step, Bundle(bundle.kind, tensors), size)

    def feed(self, part: Carried) -> Bundle:
        """Returns the bundle, which has only this part."""
        return part.bundle

    def check(self, expect: BundleSpec, party: str) -> None:
        """Raises PeerError if the bundle does not match ``expect``."""
        bundle = self.bundle
        expect.check(bundle.kind, bundle.spec().tensors, party=party, step=self.step)

    def count(self, ledger: Ledger, peer: str, direction: Direction) -> None:
        """Adds the bundle, with its size on the wire, to a ledger."""
        ledger.add(peer, self.step.phase, self.bundle.kind.label, direction, *self.size)


# The reply to a bundle: another bundle, or the current step.
_Reply: TypeAlias = Carried | StepKey


class MemoryPipe(BundlePipe[Carried, _Reply]):
    """The bundles of one generation, without serialisation; see ``BundlePipe``.

    Args:
        name: The name of the party that answers.
        roster: The parties that ask.
        ledger: The ledger of the party that answers.
        turns: The lock. Pass the same lock to all pipes if only one party may run at a time.
        in_flight: The maximum number of bundles of one party in flight.
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
            max_unread=math.inf,
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
            size = sizes[id(bundle)] = sizes.get(id(bundle)) or measure_bundle(step, bundle)
            carried = Carried.of(step, bundle, size)
            carried.count(self.ledger, party, "sent")
            yield party, carried

    def answer_passed(self, now: StepKey) -> _Reply:
        return now


class MemoryLink(Link):
    """A ``Link`` from the party ``me`` to the hub of ``pipe``. ``ledger``: the ledger of ``me``."""

    def __init__(
        self, pipe: MemoryPipe, me: str, *, timeout_s: float, ledger: Ledger | None = None
    ) -> None:
        self._pipe, self._me, self._timeout_s = pipe, me, timeout_s
        self._ledger = ledger if ledger is not None else Ledger()
        self._stream = pipe.open(me)
        self._ended: VflError | None = None
        self._has_timeout = True

    def unhurried(self) -> None:
        self._has_timeout = False

    def send(self, step: StepKey, bundle: Bundle) -> None:
        if self._ended is not None:
            raise self._ended
        pipe, carried = self._pipe, Carried.of(step, bundle, measure_bundle(step, bundle))
        carried.count(self._ledger, pipe.name, "sent")
        carried.count(pipe.ledger, self._me, "received")
        pipe.note_begin(self._stream, step, bundle.kind.label)
        pipe.put(self._stream, carried, begins=True, ends=True)

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        peer = self._pipe.name
        try:
            reply = self._stream.outbox.get(
                timeout=self._timeout_s if self._has_timeout else math.inf
            )
        except queue.Empty:
            self.end(
                LostError(
                    Code.STEP_TIMEOUT,
                    f"{peer} took longer than {self._timeout_s:g} s for {step} "
                    "(run.step_timeout_s)",
                    party=peer,
                )
            )
            reply = None
        if isinstance(reply, VflError):
            self.end(from_failure(to_failure(reply), sender=peer, me=self._me))
        if self._ended is not None:
            raise self._ended
        if isinstance(reply, StepKey):
            raise StepPassed(reply)
        if not isinstance(reply, Carried) or reply.step != step:
            raise PeerError(
                Code.STEP_OUT_OF_ORDER,
                f"{peer} answered {reply.step if isinstance(reply, Carried) else 'nothing'} "
                f"instead of {step}",
                party=peer,
            )
        reply.check(expect, peer)
        reply.count(self._ledger, peer, "received")
        self._has_timeout = True
        return reply.bundle

    def end(self, error: VflError) -> None:
        """Ends the generation for this party: its calls raise ``error``. Any thread may call
        this.
        """
        if self._ended is None:
            self._ended = error
        self._stream.close()
