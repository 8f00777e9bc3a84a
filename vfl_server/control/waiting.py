"""Reports to waiting parties for whom the run waits, for how long, and which parties were
refused.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.rpc.failures import format_refusal, to_failure
from vfl_common.rpc.guard.rate import Rate
from vfl_server.control.membership import Wait

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
