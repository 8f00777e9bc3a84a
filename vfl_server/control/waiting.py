"""What those who wait are told: for whom, for how long, and who was refused."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.failures import refusal, to_failure
from vfl_common.rpc.guard.rate import Rate
from vfl_server.control.membership import Wait

# Between two counts of how long the run still waits.
_ANNOUNCE_S = 60.0
# So often those who wait are told who has joined, after the first times.
_JOINED_S, _JOINED = 1.0, 8


class WaitingNews:
    """Decides when all who wait are told, and remembers who was refused. Not thread-safe.

    While many join at once, each hears it on joining, and the others later.

    ``refused``: {party: why it may not join}, of those that came while others waited for them.
    """

    def __init__(self) -> None:
        self.refused: dict[str, Code] = {}
        # That the others have heard of at once.
        self._refusals: set[tuple[str, Code]] = set()
        # The first tick says for whom the run waits.
        self._told_s = -math.inf
        self._rate = Rate(_JOINED_S, _JOINED)
        # Parties have joined since.
        self._untold = False

    def refuse(self, name: str, code: Code) -> bool:
        """Notes that a party was refused. Returns whether that is news."""
        known = (name, code) in self._refusals
        self.refused[name] = code
        self._refusals.add((name, code))
        return not known

    def due(self, now_s: float) -> bool:
        """Whether all are to be told again."""
        return self._untold or now_s - self._told_s >= _ANNOUNCE_S

    def tells_all(self, now_s: float) -> bool:
        """Returns whether all are told of a change now; if not, ``due`` says when."""
        self._untold = self._rate.passes("", now_s) is None
        if not self._untold:
            self._told_s = now_s
        return not self._untold

    def why(self, missing: Collection[str]) -> list[str]:
        """Says, of those of ``missing`` that were refused, why."""
        return [refusal(name, self.refused[name]) for name in missing if name in self.refused]

    def facts(self, decision: Wait) -> dict[str, Any]:
        """Returns what people are told: the missing, the seconds left, and who was refused."""
        refused = "; ".join(self.why(decision.missing))
        why = {"why": refused} if refused else {}
        return {"missing": list(decision.missing), "left_s": round(decision.left_s, 1), **why}

    def message(self, decision: Wait) -> control_pb2.ServerMessage:
        """Returns what a party that waits is told."""
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
