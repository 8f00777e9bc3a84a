"""Coordinates a run at the server: parties join, are lost and report; generations start and end.

``presence`` decides, ``conduct`` carries out the decisions, and this module adds the lock and the
clock. All methods may be called from any thread. Messages to parties go into their outboxes, from
which the streams' threads send them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vfl_common.errors import VflError
from vfl_common.pb.vfl.v1 import control_pb2
from vfl_common.summary import PartySummary
from vfl_server.control import admission
from vfl_server.control.conduct import Conduct
from vfl_server.control.membership import Member
from vfl_server.control.run import RunHooks, RunState, ServedRun, Status


class Coordinator:
    """Holds the state and the membership of one run. ``clock``: Returns a monotonic time in
    seconds.

    ``finished``: Set once the run has ended.
    """

    def __init__(
        self, run: ServedRun, hooks: RunHooks, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.recipe, self.job, self.run_id = run.recipe, run.job, run.run_id
        self._clock, self._lock = clock, threading.Condition()
        with self._hold_lock() as now_s:
            self._conduct = Conduct(run, hooks, now_s)
        self.finished = self._conduct.finished

    @contextmanager
    def _hold_lock(self) -> Iterator[float]:
        """Holds the lock and yields the current time. Wakes all threads that wait for the lock at
        the end.
        """
        with self._lock:
            try:
                yield self._clock()
            finally:
                self._lock.notify_all()

    @property
    def state(self) -> RunState:
        """The state of the run."""
        return self._conduct.presence.state

    @property
    def generation(self) -> int:
        """The number of the last generation that has started."""
        return self._conduct.generation

    @property
    def failure(self) -> VflError | None:
        """The error with which the run has failed; None if it has not failed."""
        return self._conduct.failure

    @property
    def set_aside(self) -> str:
        """The reason why the run is to be set aside; '' if it is not to be set aside."""
        return self._conduct.set_aside

    @property
    def reports(self) -> dict[str, control_pb2.Report]:
        """{party: its report}, once the run is complete."""
        return self._conduct.reports

    def open(self, name: str) -> Member:
        """Opens a session for ``name``.

        Refuses a second session of a party whose first session is alive. Replaces the session of a
        party that has fallen silent. Once this server has been stopped, a session ends as soon as
        it is open. The party then waits for the next server.

        Raises:
            PeerError: NOT_IN_RECIPE, NAME_TAKEN.
        """
        self.require_place(name)
        conduct, opened_s = self._conduct, None
        while True:
            with self._hold_lock() as now_s:
                opened_s = now_s if opened_s is None else opened_s
                older = conduct.members.get(name)
                if older is None or conduct.stopped:
                    return conduct.open(name, now_s)
                left_s = conduct.presence.replacement_wait_s(name, opened_s, now_s)
                if left_s is None:
                    raise admission.make_second_session_error(name)
                if left_s <= 0.0:
                    how = "fell silent and was restarted"
                    conduct.lose(name, how, now_s, may_return=True)
                    continue
                # Several threads may wait to replace the same silent session.
                self._lock.wait_for(
                    lambda older=older, opened_s=opened_s: (  # type: ignore[misc]
                        conduct.members.get(name) is not older
                        or conduct.presence.has_spoken(name, opened_s)
                    ),
                    timeout=left_s,
                )

    def require_place(self, name: str) -> None:
        """Raises PeerError (NOT_IN_RECIPE) if ``name`` is not a party of this run's recipe."""
        admission.require_place(name, self.recipe)

    def ask(self, name: str, join: control_pb2.Join) -> None:
        """Checks whether a party that joined with ``join`` would be admitted. Changes no state.

        The job and the run id of ``join`` are ignored. The party may have joined already.

        Raises:
            PeerError: With code NOT_IN_RECIPE, or as ``admit`` raises it.
        """
        self.require_place(name)
        with self._lock:
            joins = self._conduct.get_joins_of_others(name)
        join.job, join.run_id = self.job, next((other.run_id for other in joins.values()), "")
        admission.admit(name, join, self.recipe, self.job, joins, self._conduct.run.oldest)

    def note_refusal(self, name: str, error: VflError) -> None:
        """Reports to the waiting parties at once that party ``name`` was refused. Each reason is
        reported only once.
        """
        with self._hold_lock() as now_s:
            self._conduct.note_refusal(name, error, now_s)

    def end_session(self, member: Member) -> None:
        """Handles the end of a session's stream."""
        with self._hold_lock() as now_s:
            if self._conduct.members.get(member.name) is member:
                self._conduct.lose(member.name, "was lost", now_s, may_return=True)
            # A replaced session also needs this message, because its thread waits for the end.
            member.end()

    def handle(self, member: Member, message: control_pb2.PartyMessage) -> None:
        """Handles one message of a party. Raises PeerError if the party must be refused."""
        with self._hold_lock() as now_s:
            if self._conduct.members.get(member.name) is member:
                self._conduct.handle(member, message, now_s)

    def tick(self) -> None:
        """Handles silent parties and deadlines that have passed. Must be called regularly."""
        with self._hold_lock() as now_s:
            self._conduct.tick(now_s)

    def stop(self) -> None:
        """Ends all sessions because this server was stopped. The parties wait until a server starts
        again.

        A generation that can continue without this server is not interrupted.
        """
        with self._hold_lock() as now_s:
            self._conduct.stop(now_s)

    def fail(self, error: VflError) -> None:
        """Ends the run and sends ``error`` to every party, unless it has ended."""
        with self._hold_lock():
            self._conduct.fail(error)

    def status(self) -> Status:
        """Returns the current state and progress of the run."""
        with self._hold_lock() as now_s:
            return self._conduct.status(now_s)

    def parties(self) -> list[PartySummary]:
        """Returns the parties, in roster order, with the facts that they reported."""
        with self._lock:
            return self._conduct.parties()

    def complete(self, summary_json: str) -> None:
        """Reports to every party that the run is complete, also to parties that connect later. The
        active party gets the summary.
        """
        with self._hold_lock():
            self._conduct.complete(summary_json)

    def wait_until_empty(self, timeout_s: float) -> None:
        """Waits, at most ``timeout_s``, until every session has ended."""
        with self._lock:
            self._lock.wait_for(lambda: not self._conduct.members, timeout_s)

    def wait_until_informed(self, timeout_s: float) -> None:
        """Waits, at most ``timeout_s``, until every party knows that the run is complete."""
        with self._lock:
            self._lock.wait_for(lambda: self._conduct.all_informed, timeout_s)
