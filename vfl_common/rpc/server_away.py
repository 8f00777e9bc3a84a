"""A party's half of the server being away: whether its generation goes on, who looks for the
server, and what the server must hear once it is back.

Nothing here reads a clock, sends or waits: the time is an argument. The session calls it under its
lock, and does what it decides.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from enum import Enum, auto

from vfl_common.pb.vfl.v1 import control_pb2

# For the first answer of a server that this party has found again; twice as long each time after.
ANSWER_S = 5.0


class Loss(Enum):
    """What the end of the connection means."""

    # The generation ends.
    ENDS = auto()
    # It goes on, and this party begins to look for the server.
    LOOKS = auto()
    # It goes on, and this party looks for the server already.
    KNOWN = auto()


class SearchStep(Enum):
    """What to do next for the server to come back."""

    # Nothing more: it is back, or the generation has ended.
    STOP = auto()
    # The generation ends: the server was away for too long.
    GIVE_UP = auto()
    CONNECT = auto()
    # The server has been asked, and has not answered yet.
    WAIT = auto()
    # It has not answered for too long: the connection is dropped, and another one opened.
    DROP = auto()


@dataclass
class ServerAway:
    """A generation that may go on without the server.

    Args:
        absent_s: for how long; 0: not at all.
        claim: with what this party joins again while the generation goes on; None: it does not go
            on without the server.
        said: {message: the last one} that the server must know of this generation, in order.
        away: the server is away, and the generation goes on.
    """

    absent_s: float
    claim: control_pb2.Join | None = None
    said: dict[str, bytes] = field(default_factory=dict)
    away: bool = False
    # Of all searches for the server. Only the last one goes on.
    search: int = 0
    _give_up_s: float = 0.0
    _asked_s: float = 0.0
    _patience_s: float = 0.0

    def begin(self) -> None:
        """Begins a generation; ``planned`` says whether it may go on without the server."""
        self.said.clear()

    def planned(self, claim: control_pb2.Join, *, averages: bool) -> None:
        """Notes this party's plan; ``averages``: the server averages weights."""
        if self.absent_s and not averages:
            self.claim = claim

    def says(self, body: str, data: bytes) -> bool:
        """Notes what the server must know. Returns whether to send it now; if not, ``back`` returns
        it.
        """
        self.said[body] = data
        return not self.away

    def interrupted(self) -> None:
        """Notes that the run resumes from a checkpoint: it needs another report."""
        self.said.pop("report", None)

    @property
    def reported(self) -> bool:
        """Whether this party has reported in this generation."""
        return "report" in self.said

    def lost(self, now_s: float) -> Loss:
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
        """Whether the search of this number goes on."""
        return self.away and self.claim is not None and search == self.search

    def step(self, search: int, now_s: float, *, connected: bool) -> SearchStep:
        """Decides the next step of a search.

        A connection can hang, and a server that stands still answers nobody. So one that says
        nothing is dropped: otherwise the party would never ask again.
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

    def left_s(self, now_s: float) -> float:
        """Returns how long the generation still goes on without the server."""
        return max(0.0, self._give_up_s - now_s)

    def asked(self, now_s: float) -> None:
        """Notes that this party has joined again, and that the server is to answer."""
        self._asked_s = now_s

    def back(self, run_id: str, generation: int) -> Collection[bytes] | None:
        """Takes the server back. Returns what to repeat; None if this party has given the
        generation up meanwhile.

        Raises:
            ValueError: the server speaks of another generation.
        """
        if self.claim is None or not self.away:
            return None
        if (run_id, generation) != (self.claim.run_id, self.claim.generation):
            raise ValueError(f"generation {generation} of run {run_id}")
        self.away = False
        return self.said.values()

    def over(self) -> None:
        """Has a loss of the server end the generation, or be no news if it has ended."""
        self.claim, self.away = None, False
