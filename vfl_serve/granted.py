"""Limits by grants, account and policy while a party serves. Rows are counted before answers are
sent, and the program stops within seconds after its grants have ended.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError, VflError
from vfl_party.policy.guards import ServingApproval, ServingGuard

_CHECK_S = 1.0


class GrantedRows:
    """Limits answers to the rows that a grant allows; a ``Limit``.

    ``run``: the id of the served run.
    """

    def __init__(self, approval: ServingApproval, run: str) -> None:
        self._approval, self._run = approval, run

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Counts answers as far as the grant allows; returns bool [N], the allowed ids."""
        return np.arange(len(ids)) < self._approval.take(self._run, len(ids))


class MinimumRows:
    """Refuses questions about fewer than ``min_ids`` different people; a ``Limit``."""

    def __init__(self, min_ids: int) -> None:
        self._min_rows = min_ids

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns bool [N]: all ids, or none. A repeated id counts once."""
        return np.full(len(ids), len(set(ids)) >= self._min_rows)


class PredictionsLeft:
    """Limits answers to those that a guard allows, such as the account; a ``Limit``.

    Answers count when they are written into the record. ``peer``: the party that asks. ``run``: the
    id of the served run.
    """

    def __init__(self, guard: ServingGuard, peer: str, run: str) -> None:
        self._guard, self._peer, self._run = guard, peer, run

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns bool [N]: the ids about which the guard allows an answer."""
        return self._guard.may_predict(ids, self._peer, self._run)


class GrantWatch:
    """Checks every second whether grants have ended; ends the program if all have.

    Args:
        approvals: Returns the grants of the served runs.
        failed: Receives the error that ends the program.
        say: Reports an event.
    """

    def __init__(
        self,
        approvals: Callable[[], Collection[ServingApproval]],
        failed: queue.SimpleQueue[BaseException],
        say: Callable[..., None],
    ) -> None:
        self._approvals, self._failed, self._say = approvals, failed, say
        self._reported = set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="grants", daemon=True)

    def watch(self) -> None:
        """Starts the thread that checks the grants."""
        self._thread.start()

    def close(self) -> None:
        """Stops the thread."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_CHECK_S):
            try:
                self.look()
            except VflError as error:
                self._failed.put(error)
                return

    def look(self) -> None:
        """Reports ended grants. Raises InputError (REFUSED) if all grants have ended."""
        served = [approval for approval in self._approvals() if not approval.closed]
        reasons = [why for approval in served if (why := approval.why_over())]
        if reasons and len(reasons) == len(served):
            raise InputError(Code.REFUSED, reasons[0])
        for why in reasons:
            if why not in self._reported:
                self._reported.add(why)
                self._say("advice", said=why)
