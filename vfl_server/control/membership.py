"""Decides whether a run may begin, and at which checkpoint, and reports to waiting parties for whom
the run waits, and which parties were refused. The time is an argument.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from vfl_common.errors import Code, PeerError, VflError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.process.logs import Rate
from vfl_common.rpc.agreement import digest_of_compared
from vfl_common.rpc.messages import format_refusal, to_failure
from vfl_common.stages import AggregationPlan


@dataclass(frozen=True, slots=True)
class Begin:
    """Decision to start a generation from ``checkpoint``, because all needed parties have joined.
    An empty label means the beginning of the run.
    """

    checkpoint: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Decision to wait: the parties in ``missing`` have ``left_s`` seconds to join."""

    missing: tuple[str, ...]
    left_s: float


@dataclass(frozen=True, slots=True)
class Refuse:
    """Decision to refuse the parties in ``lacking``: most parties can resume at ``label``, and
    these parties cannot.
    """

    lacking: tuple[str, ...]
    label: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Decision to end the run: the parties in ``missing`` did not join in time."""

    missing: tuple[str, ...]
    reason: str


def decide(
    waited_s: float,
    deadline_s: float,
    roster: Sequence[str],
    ready: Mapping[str, Sequence[str]],
    left: Mapping[str, Collection[str]] = MappingProxyType({}),
    active: str = "",
    held: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> Begin | Wait | Refuse | GiveUp:
    """Decides whether the run may start.

    A party offers ``""``, the run's beginning, only if it has made at most the progress that a
    crash can lose. So a party that lost checkpoints cannot make the other parties start again: it
    is refused.

    Args:
        waited_s: The time since the server began to wait.
        deadline_s: The maximum time to wait.
        roster: All parties of the recipe.
        ready: {party: labels at which it can resume} for the joined parties; "" is the beginning.
        left: {party: labels from which the run does not need it} for the parties that have left.
        active: The party that decides between labels that equally many parties offer.
        held: {party: the labels at which it loses no work} for the parties that lose work at some
            of their labels.
    """
    missing = tuple(party for party in roster if party not in ready and party not in left)
    if not missing:
        checkpoint = find_newest_common(
            ready.values(), [held[party] for party in ready if party in held]
        )
        if checkpoint is None:
            label = find_majority_label(ready, active)
            return Refuse(
                tuple(party for party in roster if label not in ready.get(party, [label])), label
            )
        missing = tuple(
            party for party in roster if party not in ready and checkpoint not in left[party]
        )
        if not missing:
            return Begin(checkpoint)
    if waited_s < deadline_s:
        return Wait(missing, deadline_s - waited_s)
    return GiveUp(missing, f"{', '.join(missing)} did not come within {deadline_s:g} s")


def find_newest_common(
    offered: Collection[Sequence[str]], held: Collection[Sequence[str]] = ()
) -> str | None:
    """Returns the label to resume at. Every party offers this label. Returns None if the parties
    offer no common label.

    Of the common labels, the label at which most parties lose no work is chosen; of several, the
    newest. Labels sort by position in the run. ``held``: For each party that loses work at some
    label, the labels at which it loses no work.
    """
    common = set.intersection(*(set(labels) for labels in offered)) if offered else {""}
    label_sets = [set(labels) for labels in held]
    return max(
        common,
        key=lambda label: (sum(label in labels for labels in label_sets), label),
        default=None,
    )


def find_majority_label(offered: Mapping[str, Sequence[str]], active: str) -> str:
    """Returns the label that most parties offer. Of several such labels, prefers a label that
    ``active`` offers, then the newest.
    """
    votes = Counter(label for labels in offered.values() for label in set(labels))
    return max(
        votes, key=lambda label: (votes[label], label in offered.get(active, ()), label), default=""
    )


# The seconds between two reports of how long the run still waits.
_ANNOUNCE_S = 60.0
# After the first eight reports of who has joined, the minimum seconds between two reports.
_JOINED_S, _JOINED = 1.0, 8


class WaitingNews:
    """Decides when the waiting parties get a report, and remembers which parties were refused. Not
    thread-safe.

    While many parties join at once, each gets a report when it joins, and the other parties get a
    report later.

    ``refused``: {party: why it may not join} for parties that tried to join while others waited.
    """

    def __init__(self) -> None:
        self.refused: dict[str, Code] = {}
        # The refusals that the waiting parties already know.
        self._refusals: set[tuple[str, Code]] = set()
        # The time of the last report. The first tick makes a report.
        self._reported_s = -math.inf
        self._rate = Rate(_JOINED_S, _JOINED)
        # Whether parties have joined since the last report.
        self._has_unreported = False

    def note_refusal(self, name: str, code: Code) -> bool:
        """Records that a party was refused. Returns whether this refusal is new."""
        is_known = (name, code) in self._refusals
        self.refused[name] = code
        self._refusals.add((name, code))
        return not is_known

    def is_due(self, now_s: float) -> bool:
        """Returns whether all waiting parties are due to get a report."""
        return self._has_unreported or now_s - self._reported_s >= _ANNOUNCE_S

    def should_report_to_all(self, now_s: float) -> bool:
        """Returns whether all waiting parties get a report of a change now. If not, the report
        becomes due later.
        """
        self._has_unreported = self._rate.passes("", now_s) is None
        if not self._has_unreported:
            self._reported_s = now_s
        return not self._has_unreported

    def explain_refusals(self, missing: Collection[str]) -> list[str]:
        """Returns a sentence for each party in ``missing`` that was refused, with the reason."""
        return [
            format_refusal(name, self.refused[name]) for name in missing if name in self.refused
        ]

    def make_facts(self, decision: Wait) -> dict[str, Any]:
        """Returns the facts of the event ``waiting``: the missing parties, the seconds left, and
        the refused parties.
        """
        refused = "; ".join(self.explain_refusals(decision.missing))
        why = {"why": refused} if refused else {}
        return {"missing": list(decision.missing), "left_s": round(decision.left_s, 1), **why}

    def make_message(self, decision: Wait) -> control_pb2.ServerMessage:
        """Returns the message with which a waiting party gets the report."""
        refused = [
            to_failure(PeerError(self.refused[name], "", party=name))
            for name in decision.missing
            if name in self.refused
        ]
        return control_pb2.ServerMessage(
            waiting=control_pb2.Waiting(
                missing=decision.missing, deadline_s=decision.left_s, refused=refused
            )
        )


Outbox = queue.SimpleQueue["control_pb2.ServerMessage | None"]


@dataclass
class Member:
    """A party with an open session. The stream's thread sends the messages in the outbox."""

    name: str
    outbox: Outbox = field(default_factory=queue.SimpleQueue)
    join: control_pb2.Join = field(default_factory=control_pb2.Join)
    # Set once no more messages are read from the party.
    hung_up: threading.Event = field(default_factory=threading.Event)
    # The aggregations planned for this generation; None until the plan has arrived.
    plan: tuple[AggregationPlan, ...] | None = None
    # The party's last progress in this generation.
    progress: control_pb2.Progress | None = None
    report: control_pb2.Report | None = None
    # Why the party leaves the other run that it offered to resume; '' if it offered no other run.
    anew: str = ""

    # A Join message, and the digest of its compared fields.
    _join_and_digest: tuple[control_pb2.Join, bytes] | None = None

    @property
    def compared(self) -> bytes:
        """The digest of the fields of the Join message that all parties must agree on."""
        if self._join_and_digest is None or self._join_and_digest[0] is not self.join:
            self._join_and_digest = self.join, digest_of_compared(self.join)
        return self._join_and_digest[1]

    def send(self, message: control_pb2.ServerMessage) -> None:
        """Sends the party a message."""
        self.outbox.put(message)

    def start(self, **start: Any) -> None:
        """Sends the party a Start message. ``start``: The fields of the message."""
        self.send(control_pb2.ServerMessage(start=control_pb2.Start(**start)))

    def interrupt(
        self, generation: int, reason: str, lost: Collection[str] = (), leaving: bool = False
    ) -> None:
        """Ends a generation for the party."""
        interrupt = control_pb2.Interrupt(
            generation=generation, lost=lost, reason=reason, leaving=leaving
        )
        self.send(control_pb2.ServerMessage(interrupt=interrupt))

    def refuse(self, error: VflError) -> None:
        """Sends the party the error for which it may not join."""
        self.send(control_pb2.ServerMessage(stop=to_failure(error)))

    def end(self) -> None:
        """Ends the session once all messages are sent."""
        self.outbox.put(None)

    def stop(self, error: VflError) -> None:
        """Ends the run for the party, because of ``error``."""
        self.refuse(error)
        self.end()

    def complete(self, run_id: str = "", summary_json: str = "") -> None:
        """Dismisses the party: the run is complete, or does not need the party any more."""
        complete = control_pb2.Complete(run_id=run_id, summary_json=summary_json)
        self.send(control_pb2.ServerMessage(complete=complete))
        self.end()


def progress_of(
    members: Mapping[str, Member], roster: Iterable[str]
) -> dict[str, control_pb2.Progress]:
    """Returns {party: its last progress}, in roster order, for the parties that reported
    progress.
    """
    return {
        name: progress
        for name in roster
        if name in members and (progress := members[name].progress) is not None
    }
