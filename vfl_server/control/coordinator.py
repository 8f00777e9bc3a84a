"""The run as the server sees it: members join, are lost, report; generations start and end.

``presence`` decides, ``conduct`` does what follows; here are the lock and the clock. All methods
may be called from any thread. Messages to parties go into their outboxes; the streams' threads send
them.
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
from vfl_server.control.members import Member
from vfl_server.control.run import RunHooks, RunState, ServedRun, Status


class Coordinator:
    """Run state and membership of one run. ``clock``: monotonic, in seconds.

    ``finished``: the run has ended.
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
        """Holds the lock; yields the time of what happens under it, and wakes those who wait."""
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
        """The last generation that has started."""
        return self._conduct.generation

    @property
    def failure(self) -> VflError | None:
        """Why the run has failed."""
        return self._conduct.failure

    @property
    def set_aside(self) -> str:
        """Why the run is to be set aside; '' if it is not."""
        return self._conduct.set_aside

    @property
    def reports(self) -> dict[str, control_pb2.Report]:
        """{party: its report}, once the run is complete."""
        return self._conduct.reports

    def open(self, name: str) -> Member:
        """Opens a session for ``name``.

        Refuses a second session of a living party. Replaces the session of a party that has fallen
        silent. Once this server has been stopped, a session ends as soon as it is open: the party
        waits for the next server.

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
                    raise admission.second_session_error(name)
                if left_s <= 0.0:
                    how = "fell silent and was restarted"
                    conduct.lose(name, how, now_s, may_return=True)
                    continue
                # Several may wait for the same silent session.
                self._lock.wait_for(
                    lambda older=older, opened_s=opened_s: (  # type: ignore[misc]
                        conduct.members.get(name) is not older
                        or conduct.presence.has_spoken(name, opened_s)
                    ),
                    timeout=left_s,
                )

    def require_place(self, name: str) -> None:
        """Raises PeerError (NOT_IN_RECIPE) if ``name`` has no part in this run."""
        admission.require_place(name, self.recipe)

    def ask(self, name: str, join: control_pb2.Join) -> None:
        """Returns if a party that joined with ``join`` would be admitted; keeps nothing, and
        changes nothing.

        The answer is for any job and any run, and also for a party that has joined already.

        Raises:
            PeerError: NOT_IN_RECIPE, and those of ``admit``.
        """
        self.require_place(name)
        with self._lock:
            others = self._conduct.others(name)
        join.job, join.run_id = self.job, next((other.run_id for other in others.values()), "")
        admission.admit(name, join, self.recipe, self.job, others, self._conduct.run.oldest)

    def note_refusal(self, name: str, error: VflError) -> None:
        """Tells those who wait for a party that it came and was refused: at once, but each reason
        only once.
        """
        with self._hold_lock() as now_s:
            self._conduct.note_refusal(name, error, now_s)

    def end_session(self, member: Member) -> None:
        """Handles the end of a session's stream."""
        with self._hold_lock() as now_s:
            if self._conduct.members.get(member.name) is member:
                self._conduct.lose(member.name, "was lost", now_s, may_return=True)
            # Also to one that another session has replaced: its thread waits for the end.
            member.end()

    def handle(self, member: Member, message: control_pb2.PartyMessage) -> None:
        """Handles one message of a party. Raises PeerError if the party must be refused."""
        with self._hold_lock() as now_s:
            if self._conduct.members.get(member.name) is member:
                self._conduct.handle(member, message, now_s)

    def tick(self) -> None:
        """Finds silent parties and deadlines that have passed; called regularly."""
        with self._hold_lock() as now_s:
            self._conduct.tick(now_s)

    def stop(self) -> None:
        """Ends all sessions because this server was stopped: the parties wait for it, as for one
        that was lost.

        A generation that goes on without this server is not interrupted.
        """
        with self._hold_lock() as now_s:
            self._conduct.stop(now_s)

    def fail(self, error: VflError) -> None:
        """Ends the run and sends ``error`` to every party, unless it has ended."""
        with self._hold_lock():
            self._conduct.fail(error)

    def status(self) -> Status:
        """Returns the run at this moment."""
        with self._hold_lock() as now_s:
            return self._conduct.status(now_s)

    def parties(self) -> list[PartySummary]:
        """Returns the parties, in roster order, with the facts that they reported."""
        with self._lock:
            return self._conduct.parties()

    def complete(self, summary_json: str) -> None:
        """Tells every party that is here, or comes again, that the run is complete; the active one
        gets the summary.
        """
        with self._hold_lock():
            self._conduct.complete(summary_json)

    def wait_until_empty(self, timeout_s: float) -> None:
        """Waits, at most ``timeout_s``, until every session has ended."""
        with self._lock:
            self._lock.wait_for(lambda: not self._conduct.members, timeout_s)

    def wait_until_told(self, timeout_s: float) -> None:
        """Waits, at most ``timeout_s``, until every party has heard that the run is complete."""
        with self._lock:
            self._lock.wait_for(lambda: self._conduct.all_told, timeout_s)
