"""Defines Link and Hub, the interfaces of the two sides of an exchange that methods use. ``rpc``
implements them over gRPC.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from vfl_common.bundle import Bundle, BundleSpec, StepKey

# The version of the protocol between parties and server. Increase it with any change that an older
# peer would misread, and declare it in the method or alignment that changed (``Method.protocol``).
PROTOCOL = 8
# The oldest protocol version that this release supports: that of the previous release.
OLDEST = PROTOCOL - 1


@dataclass(frozen=True)
class Lenience:
    """Lets a step go on without parties that are late or away.

    A party whose bundle has not arrived after ``deadline_s`` seconds is away, and later steps do
    not wait for it. When it sends a bundle for a past step, it is told the current step and takes
    part again. Steps then wait for it again, unless it is late too often: see ``Patience`` in
    ``vfl_common.rpc.exchange.hub``.

    ``at_least``: the minimum number of parties that a step needs. For these the deadline does not
    apply.
    """

    deadline_s: float
    at_least: int = 0


class StepPassed(Exception):  # noqa: N818 - an event of the run, not a fault
    """A step was computed without this party. ``now``: the current step."""

    def __init__(self, now: StepKey) -> None:
        super().__init__(f"the step has passed; {now} is under way")
        self.now = now


class Link(Protocol):
    """The asking side of an exchange: call ``swap``, or ``send`` and later ``receive`` to do other
    work meanwhile.

    Several bundles may be in flight, up to the hub's ``in_flight``: ``send`` may be called for
    later steps before ``receive`` is called for the first one. Replies come in the order in which
    the bundles were sent.
    """

    def swap(self, step: StepKey, bundle: Bundle, expect: BundleSpec) -> Bundle:
        """Calls ``send``, then ``receive``."""
        self.send(step, bundle)
        return self.receive(step, expect)

    def send(self, step: StepKey, bundle: Bundle) -> None:
        """Sends ``bundle``, which is encoded before this method returns. A step that is sent again
        is computed only once.

        Raises InterruptedRun if this generation has ended.
        """
        ...

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        """Waits for the reply to ``step``, the oldest step without a reply.

        Raises PeerError if the reply does not match ``expect``, InterruptedRun if this generation
        has ended, LostError if the peer takes longer than the recipe's ``run.step_timeout_s``,
        StepPassed if the peer has computed the step without this party (see ``Lenience``).
        """
        ...

    def unhurried(self) -> None:
        """Disables the timeout of the next reply: the peer may be training alone."""
        ...


class Hub(Protocol):
    """The computing side of an exchange. Steps follow one another strictly: collect, reply,
    collect, reply, …

    A hub accepts up to ``in_flight`` bundles of one party. Bundles of later steps wait until their
    step is collected.
    """

    def collect(
        self,
        step: StepKey,
        expect: BundleSpec | Mapping[str, BundleSpec],
        arrived: Callable[[str, Bundle], None] | None = None,
        deadline_s: float = math.inf,
        lenience: Lenience | None = None,
    ) -> dict[str, Bundle]:
        """Waits until every party has sent its bundle for ``step``. Returns {party: bundle}, in
        roster order.

        ``expect``: the spec of every party's bundle, or {party: spec}. A party without an entry
        sends nothing at this step, and may be at a later step already. ``arrived`` is called in
        this thread with each bundle as soon as it arrives. Bundles that are incomplete after
        ``deadline_s`` are left out; their parties get a reply when the bundle arrives. With
        ``lenience``, late parties get no reply but are told the current step.

        Raises PeerError if a bundle does not match ``expect``, InterruptedRun if this generation
        has ended, LostError if a party takes longer than the recipe's ``run.step_timeout_s``.
        """
        ...

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        """Sends every party its reply for ``step``, and returns at once. A late party gets its
        reply when its bundle arrives.

        With ``lenience`` only the parties whose bundle arrived in time get a reply.
        """
        ...

    def ask_again(self, step: StepKey) -> None:
        """Lets a returning party prove that its rows are unchanged: the party must repeat, at
        ``step``, its bundle of the current step.

        The party is then told the current step. If its bundle differs, the next ``collect`` raises
        PeerError.
        """
        ...

    def settle(self) -> None:
        """Ends a phase with ``lenience``: waits until each party that is away has returned and was
        told that the phase is over.

        Raises InterruptedRun if this generation has ended, LostError after ``run.step_timeout_s``.
        """
        ...

    def unhurried(self) -> None:
        """Disables the timeout of the next ``collect``: the parties may be training alone."""
        ...
