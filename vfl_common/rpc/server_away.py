"""Decides what a party does while the server is away: whether its generation goes on, which thread
looks for the server, and which messages to repeat when the server is back.

The code here does not read a clock, send or wait; the time is an argument. The session calls it
under its lock and carries out its decisions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from vfl_common.pb.vfl.v1 import control_pb2

# The time limit for the first answer of a server to which this party has reconnected. It doubles
# with each attempt.
ANSWER_S = 5.0


class Loss(Enum):
    """The consequence of a lost connection to the server."""

    # The generation ends.
    ENDS = auto()
    # The generation goes on, and the calling thread must look for the server.
    LOOKS = auto()
    # The generation goes on, and another thread looks for the server already.
    KNOWN = auto()


class SearchStep(Enum):
    """The next step of a search for the server."""

    # The search ends: the server is back, or the generation has ended.
    STOP = auto()
    # The generation ends: the server was away for too long.
    GIVE_UP = auto()
    # Try to connect to the server.
    CONNECT = auto()
    # Wait: this party has joined again, and the server has not answered yet.
    WAIT = auto()
    # The server has not answered for too long: drop the connection, and connect again.
    DROP = auto()


@dataclass
class ServerAway:
    """The state of a generation that may go on without the server.

    Args:
        absent_s: The time for which the generation goes on without the server; 0 if it does not.
        claim: The message with which this party joins again while the generation goes on; None if
            the generation does not go on without the server.
        messages: {kind: last message of this kind}, in order, of the messages that the server must
            get in this generation.
        away: Whether the server is away and the generation goes on.
    """

    absent_s: float
    claim: control_pb2.Join | None = None
    messages: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    # The number of the last search for the server; earlier searches end.
    search: int = 0
    _give_up_s: float = 0.0
    _joined_again_s: float = 0.0
    _answer_timeout_s: float = 0.0

    def begin(self) -> None:
        """Begins a generation. ``note_plan`` decides later whether it may go on without the
        server.
        """
        self.messages.clear()

    def note_plan(self, claim: control_pb2.Join, *, averages: bool) -> None:
        """Decides, with this party's plan, whether the generation may go on without the server.
        ``averages``: whether the server averages weights.
        """
        if self.absent_s and not averages:
            self.claim = claim

    def says(self, body: str, data: bytes) -> bool:
        """Stores a message that the server must get. Returns whether to send it now; otherwise
        ``back`` returns it later.
        """
        self.messages[body] = data
        return not self.away

    def note_interruption(self) -> None:
        """Removes this party's report, because the run resumes from a checkpoint and needs a new
        report.
        """
        self.messages.pop("report", None)

    @property
    def reported(self) -> bool:
        """Whether this party has reported in this generation."""
        return "report" in self.messages

    def note_loss(self, now_s: float) -> Loss:
        """Decides the consequence of a lost connection."""
        if self.claim is None:
            return Loss.ENDS
        if self.away:
            return Loss.KNOWN
        self.away, self._answer_timeout_s = True, ANSWER_S
        self.search += 1
        self._give_up_s = now_s + self.absent_s
        return Loss.LOOKS

    def looks(self, search: int) -> bool:
        """Returns whether the search with the number ``search`` goes on."""
        return self.away and self.claim is not None and search == self.search

    def step(self, search: int, now_s: float, *, connected: bool) -> SearchStep:
        """Decides the next step of a search.

        A connection can hang, and a suspended server does not answer. So a silent connection is
        dropped; otherwise the party would wait for ever.
        """
        if not self.looks(search):
            return SearchStep.STOP
        if now_s >= self._give_up_s:
            return SearchStep.GIVE_UP
        if not connected:
            return SearchStep.CONNECT
        if now_s - self._joined_again_s < self._answer_timeout_s:
            return SearchStep.WAIT
        self._answer_timeout_s *= 2
        return SearchStep.DROP

    def seconds_left(self, now_s: float) -> float:
        """Returns the number of seconds for which the generation still goes on without the
        server.
        """
        return max(0.0, self._give_up_s - now_s)

    def note_question(self, now_s: float) -> None:
        """Records the time at which this party has joined again, from which it waits for the
        server's answer.
        """
        self._joined_again_s = now_s

    def back(self, run_id: str, generation: int) -> Collection[bytes] | None:
        """Ends the server's absence. Returns the messages to repeat; None if this party has given
        up the generation meanwhile.

        Raises:
            ValueError: The server names another generation.
        """
        if self.claim is None or not self.away:
            return None
        if (run_id, generation) != (self.claim.run_id, self.claim.generation):
            raise ValueError(f"the server names generation {generation} of run {run_id}")
        self.away = False
        return self.messages.values()

    def stop_looking(self) -> None:
        """Stops the search for the server: from now on its loss ends the generation."""
        self.claim, self.away = None, False
