"""Grants, account and policy of a party that serves: rows are counted before anything about them
leaves, and a program whose grants have ended stops within seconds.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError, VflError
from vfl_party.account.limits import AccountGuard
from vfl_party.grants.approval import Approval

_LOOK_S = 1.0


class GrantedRows:
    """How many rows a grant still allows to answer about, as a ``Limit``.

    ``run``: the run that is served.
    """

    def __init__(self, approval: Approval, run: str) -> None:
        self._approval, self._run = approval, run

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Counts an answer about each id, as far as the grant allows; returns which it allows,
        [N].
        """
        return np.arange(len(ids)) < self._approval.take(self._run, len(ids))


class MinimumRows:
    """The least people of a question that is answered, as a ``Limit``."""

    def __init__(self, min_ids: int) -> None:
        self._min_rows = min_ids

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns all or none, [N]: somebody who is asked about twice is one."""
        return np.full(len(ids), len(set(ids)) >= self._min_rows)


class PredictionsLeft:
    """Which answers the party's account still allows, as a ``Limit``. They count when they are
    written into the record.

    ``peer``: who asks; ``run``: the run that is served.
    """

    def __init__(self, account: AccountGuard, peer: str, run: str) -> None:
        self._account, self._peer, self._run = account, peer, run

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Returns about which ids it allows an answer, [N]."""
        return self._account.may_predict(ids, self._peer, self._run)


class GrantWatch:
    """Looks every second whether grants have ended; ends the program if all have.

    Args:
        approvals: returns those of the runs that are served.
        failed: gets the error that ends the program.
        say: reports an event.
    """

    def __init__(
        self,
        approvals: Callable[[], Collection[Approval]],
        failed: queue.SimpleQueue[BaseException],
        say: Callable[..., None],
    ) -> None:
        self._approvals, self._failed, self._say = approvals, failed, say
        self._reported = set[str]()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="grants", daemon=True)

    def watch(self) -> None:
        """Looks from now on, in a separate thread."""
        self._thread.start()

    def close(self) -> None:
        """Looks no longer."""
        self._ended.set()

    def _watch(self) -> None:
        while not self._ended.wait(_LOOK_S):
            try:
                self.look()
            except VflError as error:
                self._failed.put(error)
                return

    def look(self) -> None:
        """Says which grants have ended. Raises InputError (REFUSED) if there are some, and all of
        them have.
        """
        served = [approval for approval in self._approvals() if not approval.closed]
        over = [why for approval in served if (why := approval.why_over())]
        if over and len(over) == len(served):
            raise InputError(Code.REFUSED, over[0])
        for why in over:
            if why not in self._reported:
                self._reported.add(why)
                self._say("advice", said=why)
