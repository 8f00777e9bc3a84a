"""The server for a run whose parties are all in this process. It decides as the real server does,
without a network.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from vfl_common.bundle import Ledger
from vfl_common.config.recipe import Recipe
from vfl_common.errors import InternalError, InterruptedRun, PeerError, VflError
from vfl_common.files import write_atomic
from vfl_common.rpc.counters import TcpMeter
from vfl_common.rpc.exchange.hub import ExchangeHub
from vfl_common.rpc.exchange.memory import MemoryPipe, Turns
from vfl_common.rpc.messages import (
    Done,
    Joining,
    PartyReport,
    ProgressUpdate,
    Start,
    alone_message,
    from_failure,
    join_message,
    lenient_message,
    make_plan_message,
    progress_message,
)
from vfl_common.run_folder import RunFolder
from vfl_common.stages import AggregationPlan, Job
from vfl_common.summary import Summary
from vfl_server.aggregation import AggregatedRun, Aggregator
from vfl_server.control.coordinator import Coordinator
from vfl_server.control.run import Emit, RunHooks, ServedRun
from vfl_server.intersection import alignment_service
from vfl_server.results import summarise


class LocalServer:
    """Serves one run. A party's message is handled in the party's own thread, and so are its
    effects on the other parties.

    The run has one generation. An error of one party ends the run for all, even if the recipe lets
    a run continue without a lost party.

    Args:
        folder: The server's folder for the run.
        hub: The hub over which the parties send weights to be averaged.
        turns: Lets one thread run at a time, and lets the parties wait.
        emit: Reports events to the person or program that started the run.
        start: Called with a name and a function; it runs the aggregation in turns with the parties.
    """

    def __init__(
        self,
        recipe: Recipe,
        job: Job,
        folder: RunFolder,
        hub: ExchangeHub[MemoryPipe],
        turns: Turns,
        emit: Emit,
        start: Callable[[str, Callable[[], None]], None],
    ) -> None:
        self.recipe, self.job, self.folder, self.turns = recipe, job, folder, turns
        self.changed = turns.condition()
        # The summary, once the run is complete.
        self.summary: Summary | None = None
        # The first error of a party.
        self.failure: BaseException | None = None
        self._hub = hub
        self._ledger = hub.pipe.ledger
        self._sessions: dict[str, LocalSession] = {}
        roster = [party.name for party in recipe.parties]
        self._aggregator = Aggregator(
            self,
            AggregatedRun(
                folder.run_id,
                roster,
                passives=[party.name for party in recipe.passives],
                phases=[phase.name for phase in recipe.phases],
            ),
            timeout_s=recipe.run.step_timeout_s,
            fail=self._fail,
            align=alignment_service(recipe, folder.path, trains=job == "train"),
            make_hub=lambda _generation: hub,
            start=start,
        )
        hooks = RunHooks(
            emit,
            on_start=lambda generation, _checkpoint: self._aggregator.open(generation),
            on_plan=self._aggregator.begin,
            on_end=self._aggregator.end,
        )
        self.coordinator = Coordinator(ServedRun(recipe, job, folder.run_id), hooks)

    def use(self, hub: Any) -> None:
        """Does nothing: in one process, no service has to pass bundles on to the hub."""

    def session(self, name: str, ledger: Ledger) -> LocalSession:
        """Opens the session of party ``name``. ``ledger``: The party's ledger."""
        self._sessions[name] = LocalSession(self, name, ledger)
        return self._sessions[name]

    def close(self) -> None:
        """Ends the aggregation if it has not ended."""
        self._hub.end(InterruptedRun("the run has ended"))

    def fail(self, name: str, error: BaseException) -> None:
        """Ends the run for all because of an error of party ``name``. Only the first error is
        kept.
        """
        with self.turns.lock:
            if self.failure is None:
                self.failure = error
                public_error = (
                    error
                    if isinstance(error, VflError)
                    else InternalError(f"{type(error).__name__}: {error}")
                )
                self._fail(PeerError(public_error.code, str(public_error), party=name))

    def _fail(self, error: VflError) -> None:
        with self.turns.lock:
            if self.failure is None:
                self.failure = error
            self.coordinator.fail(error)
            self.deliver()

    def deliver(self) -> None:
        """Delivers the coordinator's messages to every party. The caller holds the lock."""
        coordinator = self.coordinator
        if coordinator.finished.is_set() and coordinator.failure is None and self.summary is None:
            self.summary = summarise(
                self.recipe, self.job, coordinator, self.folder, self._ledger, TcpMeter()
            )
            text = self.summary.model_dump_json(indent=1) + "\n"
            write_atomic(self.folder.path.parent / "summary.json", text)
            coordinator.complete(text)
        for session in self._sessions.values():
            session.read_outbox()
        self.changed.notify_all()


class LocalSession:
    """A party's session with a ``LocalServer``. Implements
    ``vfl_common.rpc.messages.Membership``.
    """

    def __init__(self, server: LocalServer, name: str, ledger: Ledger) -> None:
        self.me, self.server, self.ledger, self.meter = (
            name,
            server.recipe.server,
            ledger,
            TcpMeter(),
        )
        self._server = server
        self._member = server.coordinator.open(name)
        self._inbox: deque[Any] = deque()
        self._ended: VflError | None = None
        self._watcher: Callable[[VflError], None] | None = None

    def join(self, joining: Joining) -> Start | Done:
        """Joins the run. Returns when a generation starts, or the run is complete."""
        self._say(join_message(joining))
        while True:
            answer = self._wait_for_answer()
            if answer.HasField("start"):
                start = answer.start
                return Start(
                    start.run_id,
                    start.generation,
                    start.checkpoint,
                    start.exchange_address,
                    shown=dict(start.shown),
                )
            if answer.HasField("complete"):
                return Done(answer.complete.run_id, answer.complete.summary_json)

    def watch(self, watcher: Callable[[VflError], None] | None) -> None:
        """Calls ``watcher`` when the generation ends."""
        self._watcher = watcher
        if watcher is not None and self._ended is not None:
            watcher(self._ended)

    def check(self) -> None:
        """Raises the error with which the generation has ended, if it has."""
        if self._ended is not None:
            raise self._ended

    def plan(self, aggregations: Sequence[AggregationPlan]) -> None:
        """Sends the party's plan."""
        self._say(make_plan_message(aggregations))

    def progress(self, progress: ProgressUpdate) -> None:
        """Sends the party's progress."""
        self._say(progress_message(progress))

    def report(self, report: PartyReport) -> str:
        """Sends the party's report. Returns the summary once the run is complete."""
        self._say(report.message(self.ledger, self.meter))
        while True:
            answer = self._wait_for_answer()
            if answer.HasField("complete"):
                return str(answer.complete.summary_json)

    def lenient(self, on: bool) -> None:
        """Reports whether the active party continues without lost parties."""
        self._say(lenient_message(on))

    def alone(self) -> None:
        """Reports that the active party needs no other party any more."""
        self._say(alone_message())

    def stopping(self) -> None:
        """Does nothing: the code that runs the party reports to the server why the party ends."""

    def abort(self, error: BaseException) -> None:
        """Does nothing: the code that runs the party reports the error to the server."""

    def close(self) -> None:
        """Closes the session."""
        # If the run fails, the caller of the party reports the reason.
        if self._server.summary is not None:
            self._server.coordinator.end_session(self._member)

    def read_outbox(self) -> None:
        """Reads the coordinator's messages for this party. The caller holds the lock."""
        while not self._member.outbox.empty():
            message = self._member.outbox.get()
            if message is None:
                continue
            if message.HasField("stop"):
                self._end(from_failure(message.stop, sender=self.server, me=self.me))
            elif message.HasField("interrupt"):
                self._end(InterruptedRun(message.interrupt.reason))
            else:
                self._inbox.append(message)

    def _say(self, message: Any) -> None:
        with self._server.turns.lock:
            self.check()
            self._server.coordinator.handle(self._member, message)
            self._server.deliver()

    def _wait_for_answer(self) -> Any:
        with self._server.turns.lock:
            self._server.turns.wait_for(
                self._server.changed, lambda: self._ended or self._inbox, float("inf")
            )
            self.check()
            return self._inbox.popleft()

    def _end(self, error: VflError) -> None:
        if self._ended is None:
            self._ended = error
            if self._watcher is not None:
                self._watcher(error)
