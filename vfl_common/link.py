"""Link and Hub: the two sides of an exchange, as a method sees them. ``rpc`` has them over gRPC."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from vfl_common.bundle import Bundle, BundleSpec, StepKey


class Link(Protocol):
    """The asking side: ``swap``, or ``send`` and later ``receive`` where there is work to do meanwhile."""

    def swap(self, step: StepKey, bundle: Bundle, expect: BundleSpec) -> Bundle:
        """``send`` and ``receive``."""
        ...

    def send(self, step: StepKey, bundle: Bundle) -> None:
        """Sends ``bundle``; it is encoded before this returns. The same step may be sent again; it is computed once.

        Raises InterruptedRun where this generation has ended.
        """
        ...

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        """Waits for the reply to the bundle that was sent last.

        Raises PeerError where the reply is not what ``expect`` says, InterruptedRun where this generation has ended,
        LostError where the peer takes longer than the recipe's ``run.step_timeout_s``.
        """
        ...

    def unhurried(self) -> None:
        """The next reply may take as long as the peer lives: it may be at work on its own."""
        ...


class Hub(Protocol):
    """The computing side. Steps are strictly one after the other: collect, reply, collect, reply, …"""

    def collect(
        self,
        step: StepKey,
        expect: BundleSpec,
        arrived: Callable[[str, Bundle], None] | None = None,
        deadline_s: float = math.inf,
    ) -> dict[str, Bundle]:
        """Waits until every party of the roster has sent its bundle of ``step``: {party: bundle}, in roster order.

        ``arrived`` is called with each bundle as it comes, in this thread, while others are still on their way. After
        ``deadline_s`` those that have not arrived whole are left out: they are late.

        Raises PeerError where a bundle is not what ``expect`` says, InterruptedRun where this generation has ended,
        LostError where a party takes longer than the recipe's ``run.step_timeout_s``.
        """
        ...

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        """Answers every party's bundle of ``step``; returns at once. The late get theirs whenever they come."""
        ...

    def unhurried(self) -> None:
        """The next ``collect`` waits as long as the parties live: they may be at work on their own."""
        ...
