"""Decides what a party does while the server is away: whether its generation goes on, who looks for
the server, and what to repeat when the server is back.

Nothing here reads a clock, sends or waits: the time is an argument. The session calls it under its
lock, and carries out its decisions.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from vfl_common.pb.vfl.v1 import control_pb2

# The time for the first answer of a server that this party has found again; doubled each time.
ANSWER_S = 5.0


class Loss(Enum):
    """The meaning of the end of the connection."""

    # The generation ends.
    ENDS = auto()
    # The generation goes on, and this party begins to look for the server.
    LOOKS = auto()
    # The generation goes on, and this party looks for the server already.
    KNOWN = auto()


class SearchStep(Enum):
    """The next step of a search for the server."""

    # The search ends: the server is back, or the generation has ended.
    STOP = auto()
    # The generation ends: the server was away for too long.
    GIVE_UP = auto()
    CONNECT = auto()
    # Wait: the server has been asked, and has not answered yet.
    WAIT = auto()
    # The server has not answered for too long: drop the connection, and open another.
    DROP = auto()


@dataclass
class ServerAway:
    """A generation that may go on without the server.

    Args:
        absent_s: for how long it goes on; 0: not at all.
        claim: the message with which this party joins again while the generation goes on; None: the
            generation does not go on without the server.
        messages: {kind: the last message} that the server must get in this generation, in order.
        away: whether the server is away and the generation goes on.
    """

    absent_s: float
    claim: control_pb2.Join | None = None
    messages: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    # The number of the last search for the server; earlier searches end.
    search: int = 0
    _give_up_s: float = 0.0
    _asked_s: float = 0.0
    _patience_s: float = 0.0

    def begin(self) -> None:
        """Begins a generation; ``note_plan`` decides whether it may go on without the server."""
        self.messages.clear()

    def note_plan(self, claim: control_pb2.Join, *, averages: bool) -> None:
        """Notes this party's plan; ``averages``: the server averages weights."""
        if self.absent_s and not averages:
            self.claim = claim

    def says(self, body: str, data: bytes) -> bool:
        """Notes a message that the server must get. Returns whether to send it now; if not,
        ``back`` returns it later.
        """
        self.messages[body] = data
        return not self.away

    def note_interruption(self) -> None:
        """Notes that the run resumes from a checkpoint, and so needs another report."""
        self.messages.pop("report", None)

    @property
    def reported(self) -> bool:
        """Whether this party has reported in this generation."""
        return "report" in self.messages

    def note_loss(self, now_s: float) -> Loss:
        """Decides what the loss of the connection means."""
        if self.claim is None:
            return Loss.ENDS
        if self.away:
            return Loss.KNOWN
        self.away, self._patience_s = True, ANSWER_S
        self.search += 1
        self._give_up_s = now_s + self.absent_s
        return Loss.LOOKS

    def looks(self, search: int) -> bool:
        """Returns whether the search with this number goes on."""
        return self.away and self.claim is not None and search == self.search

    def step(self, search: int, now_s: float, *, connected: bool) -> SearchStep:
        """Decides the next step of a search.

        A connection can hang, and a server that is suspended does not answer. So a silent
        connection is dropped; otherwise the party never asks again.
        """
        if not self.looks(search):
            return SearchStep.STOP
        if now_s >= self._give_up_s:
            return SearchStep.GIVE_UP
        if not connected:
            return SearchStep.CONNECT
        if now_s - self._asked_s < self._patience_s:
            return SearchStep.WAIT
        self._patience_s *= 2
        return SearchStep.DROP

    def seconds_left(self, now_s: float) -> float:
        """Returns how long the generation still goes on without the server."""
        return max(0.0, self._give_up_s - now_s)

    def note_question(self, now_s: float) -> None:
        """Notes that this party has joined again, and waits for the server's answer."""
        self._asked_s = now_s

    def back(self, run_id: str, generation: int) -> Collection[bytes] | None:
        """Notes that the server is back. Returns the messages to repeat; None if this party has
        given up the generation meanwhile.

        Raises:
            ValueError: the server names another generation.
        """
        if self.claim is None or not self.away:
            return None
        if (run_id, generation) != (self.claim.run_id, self.claim.generation):
            raise ValueError(f"generation {generation} of run {run_id}")
        self.away = False
        return self.messages.values()

    def stop_looking(self) -> None:
        """Stops the search for the server: from now on its loss ends the generation."""
        self.claim, self.away = None, False
