"""Defines the server's record of a party with an open session."""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from vfl_common.errors import VflError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.agreement import digest_of_compared
from vfl_common.rpc.failures import to_failure
from vfl_common.stages import AggregationPlan

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
