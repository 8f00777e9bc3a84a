"""A party with an open session, as the server holds it."""

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
    """A party with an open session. The stream's thread sends what is put into the outbox."""

    name: str
    outbox: Outbox = field(default_factory=queue.SimpleQueue)
    join: control_pb2.Join = field(default_factory=control_pb2.Join)
    # Nothing more is read from the party.
    hung_up: threading.Event = field(default_factory=threading.Event)
    # For this generation; None: not received yet.
    plan: tuple[AggregationPlan, ...] | None = None
    # The last one of this generation.
    progress: control_pb2.Progress | None = None
    report: control_pb2.Report | None = None
    # Why it leaves the run that it has offered, if that is another one.
    anew: str = ""

    # What the party's Join message said.
    _compared: tuple[control_pb2.Join, bytes] | None = None

    @property
    def compared(self) -> bytes:
        """See ``vfl_common.rpc.agreement.digest_of_compared``."""
        if self._compared is None or self._compared[0] is not self.join:
            self._compared = self.join, digest_of_compared(self.join)
        return self._compared[1]

    def tell(self, message: control_pb2.ServerMessage) -> None:
        """Sends the party a message."""
        self.outbox.put(message)

    def start(self, **start: Any) -> None:
        """Tells the party that its generation begins, or is under way: the fields of a Start."""
        self.tell(control_pb2.ServerMessage(start=control_pb2.Start(**start)))

    def interrupt(
        self, generation: int, reason: str, lost: Collection[str] = (), leaving: bool = False
    ) -> None:
        """Ends a generation for the party."""
        interrupt = control_pb2.Interrupt(
            generation=generation, lost=lost, reason=reason, leaving=leaving
        )
        self.tell(control_pb2.ServerMessage(interrupt=interrupt))

    def refuse(self, error: VflError) -> None:
        """Tells the party why it may not join."""
        self.tell(control_pb2.ServerMessage(stop=to_failure(error)))

    def end(self) -> None:
        """Ends the session once all messages are sent."""
        self.outbox.put(None)

    def stop(self, error: VflError) -> None:
        """Ends the run for the party, because of ``error``."""
        self.refuse(error)
        self.end()

    def complete(self, run_id: str = "", summary_json: str = "") -> None:
        """Lets the party go: the run is complete, or does not need it any more."""
        complete = control_pb2.Complete(run_id=run_id, summary_json=summary_json)
        self.tell(control_pb2.ServerMessage(complete=complete))
        self.end()


def progress_of(
    members: Mapping[str, Member], roster: Iterable[str]
) -> dict[str, control_pb2.Progress]:
    """Returns {party: its last progress}, in the order of the roster, of those that told some."""
    return {
        name: progress
        for name in roster
        if name in members and (progress := members[name].progress) is not None
    }
