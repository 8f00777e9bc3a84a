"""Link and Hub: the two sides of an exchange, as a method sees them. ``rpc`` implements them over gRPC."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Protocol

from vfl_common.bundle import Bundle, BundleSpec, StepKey


class Link(Protocol):
    """The asking side: ``swap``, or ``send`` and later ``receive`` if there is work to do meanwhile."""

    def swap(self, step: StepKey, bundle: Bundle, expect: BundleSpec) -> Bundle:
        """Calls ``send``, then ``receive``."""
        ...

    def send(self, step: StepKey, bundle: Bundle) -> None:
        """Sends ``bundle``, encoded before this returns. A step that is sent again is computed only once.

        Raises InterruptedRun if this generation has ended.
        """
        ...

    def receive(self, step: StepKey, expect: BundleSpec) -> Bundle:
        """Waits for the reply to the bundle that was sent last.

        Raises PeerError if the reply does not match ``expect``, InterruptedRun if this generation has ended,
        LostError if the peer takes longer than the recipe's ``run.step_timeout_s``.
        """
        ...

    def unhurried(self) -> None:
        """Disables the timeout of the next reply: the peer may be training alone."""
        ...


class Hub(Protocol):
    """The computing side. Steps strictly follow one another: collect, reply, collect, reply, …"""

    def collect(
        self,
        step: StepKey,
        expect: BundleSpec,
        arrived: Callable[[str, Bundle], None] | None = None,
        deadline_s: float = math.inf,
    ) -> dict[str, Bundle]:
        """Waits until every party has sent its bundle of ``step``; returns {party: bundle}, in roster order.

        ``arrived`` is called, in this thread, with each bundle when it has come, before the others have. Bundles that
        are incomplete after ``deadline_s`` are late and left out.

        Raises PeerError if a bundle does not match ``expect``, InterruptedRun if this generation has ended,
        LostError if a party takes longer than the recipe's ``run.step_timeout_s``.
        """
        ...

    def reply(self, step: StepKey, replies: Mapping[str, Bundle]) -> None:
        """Answers every party's bundle of ``step``; returns at once. A late party gets its reply when it comes."""
        ...

    def unhurried(self) -> None:
        """Disables the timeout of the next ``collect``: the parties may be training alone."""
        ...
