"""Runs that a party serves: the active party scores ids, and a passive party answers its
questions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vfl_common.process.logs import Console
from vfl_common.rpc.serving.service import ServingService, SeveralRuns
from vfl_party.phases import stand_in
from vfl_party.predict.run import better_alone, read_quality
from vfl_serve.kinds import describe_questions, make_scorer
from vfl_serve.opening import OpenedRun, Opener, ServingStanding
from vfl_serve.scored import ServedScores
from vfl_serve.scorer import Batcher, RequestColumns, make_result_columns
from vfl_serve.stores.kept import KeptEmbeddings
from vfl_serve.tokens import Tokens

if TYPE_CHECKING:
    from vfl_serve.served import Served


import queue
import threading
from functools import partial
from pathlib import Path

from vfl_common.config.policy import PolicySettings
from vfl_common.errors import Code, InputError
from vfl_common.rpc.serving.attendance import AttendanceHooks, AttendedRun, ServingClient
from vfl_common.rpc.serving.stream import CachePolicy
from vfl_party.record.book import folder_of
from vfl_serve.answering import (
    CombinedLimits,
    DailyIdCounter,
    DailyLimit,
    IdFilter,
    Limit,
    SentBefore,
    daily_limit,
    read_aligned_ids,
    read_table_digests,
)
from vfl_serve.kinds import Answerer, make_answers
from vfl_serve.opening import GrantedRows, MinimumRows

# Minimum limit of ids per question: the active party's ``max_batch`` may be larger than this one's.
_MIN_IDS_LIMIT = 1024
_END_S = 0.5


class PassiveRun:
    """A run that a passive party serves, with a stream in a separate thread."""

    def __init__(self, opened: OpenedRun, answers: Answerer, attendance: ServingClient) -> None:
        self._opened, self._answers, self._attendance = opened, answers, attendance
        self._thread: threading.Thread | None = None

    @property
    def run_id(self) -> str:
        """Returns the id of the run."""
        return self._opened.run_id

    def present(self) -> Sequence[str]:
        """Returns no party: a passive party does not see other passive parties."""
        return ()

    def start(self, failed: queue.SimpleQueue[BaseException]) -> None:
        """Starts the stream. ``failed``: receives the error that ends it for good."""

        def run() -> None:
            try:
                self._attendance.run()
            except BaseException as error:  # noqa: BLE001 - the program's main thread raises it
                failed.put(error)

        self._thread = threading.Thread(target=run, name=f"attend-{self.run_id}", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the stream and closes the run."""
        self._attendance.close()
        if self._thread is not None:
            # The thread may still wait for an absent active party.
            self._thread.join(_END_S)
        self._answers.close()
        self._opened.close()


class Passive:
    """Starts to serve runs at a passive party.

    Args:
        first: One of the runs; gives the party's settings and table.
        failed: Receives the error that ends a run's stream for good.
        patient: Whether to wait if the active party does not serve a run yet.

    Raises InputError if the party file has no address of the active party.
    """

    def __init__(
        self,
        opener: Opener,
        first: OpenedRun,
        console: Console,
        failed: queue.SimpleQueue[BaseException],
        *,
        patient: bool,
    ) -> None:
        file = first.files.file
        self._opener, self._console, self._failed = opener, console, failed
        self._patient, self.name = patient, file.name
        address = file.serve.active or file.active
        if address is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"party {self.name}: has no address of the active party {opener.active}. Set "
                "serve.active.",
            )
        self.address = address
        self._path = Path(file.out) / f"answers-{self.name}.sqlite"
        # All runs share this file, since the limits apply to all runs together.
        self._out = Path(file.out)
        self._record = folder_of(Path(file.record.folder or file.out), file.name)
        held = first.store.held
        _, trained = read_table_digests(self._record).get(first.run_id, ("", 0))
        rows = len(held.places) if held.asks is None else trained
        self._asked = DailyIdCounter(self._path, daily_limit(file.serve.asked_a_day, rows))
        max_answers = file.serve.answers_a_day
        self._limit = DailyLimit(self._path, max_answers) if max_answers is not None else None
        min_ids = file.policy.least_rows if isinstance(file.policy, PolicySettings) else 1
        self._min_rows = MinimumRows(min_ids) if min_ids > 1 else None

    def open(self, opened: OpenedRun) -> PassiveRun:
        """Starts to answer the active party's questions about a run."""
        peer, run_id = self._opener.active, opened.run_id
        sent = partial(SentBefore, self._path, run_id)
        granted = [GrantedRows(approval, run_id) for approval in opened.approvals]
        # The account only checks here: an answer counts when it is recorded.
        per_person = [self._limit, *self._opener.make_limits(run_id)]
        limit = combine_limits(self._min_rows, per_person, granted)
        answers = make_answers(opened.store, sent, limit, self._id_filter(opened))
        last_reason, connected = [""], [False]
        opened.tally.standing = lambda: ServingStanding({peer: connected[0]})

        def attends(here: bool) -> None:
            last_reason[0], connected[0] = "", here
            self._console.emit("attending" if here else "away", peer=peer, run=run_id)

        def report_refusal(why: str) -> None:
            if why != last_reason[0]:
                last_reason[0] = why
                text = f"run {run_id} waits until {peer} serves it"
                self._console.emit("advice", said=text)

        def keeping() -> CachePolicy:
            return CachePolicy(opened.settings.cache_s, opened.store.held.features_version)

        attendance = ServingClient(
            self.address,
            peer,
            self._opener.keyring,
            opened.tally.ledger,
            run=AttendedRun(
                run_id,
                opened.trained.recipe.digest(),
                max_ids=max(opened.max_at_once, _MIN_IDS_LIMIT),
                at_once=opened.store.at_once,
            ),
            answer=answers,
            hooks=AttendanceHooks(
                attends=attends,
                refused=report_refusal if self._patient else None,
                writes=self._opener.make_record_writer(opened, answers.way),
                keeping=keeping,
            ),
        )
        opened.store.when_renewed(attendance.renew)
        run = PassiveRun(opened, answers, attendance)
        run.start(self._failed)
        return run

    def _id_filter(self, opened: OpenedRun) -> IdFilter:
        """Returns the filter of ids for a run. Raises InputError if the aligned ids are unknown."""
        run, ids = opened.trained.path, opened.settings.ids
        if ids is None:
            ids = "aligned" if opened.trained.recipe.rows.align == "psi" else "all"
        aligned = read_aligned_ids(run, self._out, self._record) if ids == "aligned" else None
        return IdFilter(self._asked, aligned, lambda text: self._console.emit("advice", said=text))


def combine_limits(
    min_rows: MinimumRows | None,
    per_person: Sequence[Limit | None],
    per_question: Sequence[Limit | None],
) -> CombinedLimits | None:
    """Combines limits into one; None if there are no limits.

    Args:
        min_rows: The minimum number of people in a question. It applies again at the end, because
            other limits may have refused some people.
        per_person: Limits on single people. They apply first, so that an id that they refuse does
            not count against the other limits.
        per_question: Limits on all people of a question together.
    """
    limits = [
        limit for limit in (*per_person, min_rows, *per_question, min_rows) if limit is not None
    ]
    return CombinedLimits(*limits) if limits else None


# it asks the passive parties and answers requests.
class ActiveRun:
    """A run that an active party serves. ``served``: the interface for the HTTP port."""

    def __init__(
        self, opened: OpenedRun, runs: SeveralRuns, service: ServingService, served: Served
    ) -> None:
        self.opened, self._runs, self._service, self.served = opened, runs, service, served

    @property
    def run_id(self) -> str:
        """Returns the id of the run."""
        return self.opened.run_id

    def present(self) -> Sequence[str]:
        """Returns the passive parties that are connected for this run."""
        return self._service.present

    def close(self) -> None:
        """Answers the requests under way, then closes the passive parties' streams."""
        self.served.batcher.close()
        self._runs.remove(self.run_id)
        self._service.close()
        self.opened.close()


class Active:
    """Starts to serve runs at an active party.

    ``runs``: accepts the passive parties' streams. ``make``: creates a ``Served``.
    """

    def __init__(
        self,
        opener: Opener,
        runs: SeveralRuns,
        console: Console,
        tokens: Tokens,
        make: Callable[..., Served],
    ) -> None:
        self._opener, self._runs, self._console = opener, runs, console
        self._tokens, self._make = tokens, make

    def open(self, opened: OpenedRun) -> ActiveRun:
        """Starts to serve a run. Raises InputError."""
        trained, store, settings = opened.trained, opened.store, opened.settings
        recipe, run_id = trained.recipe, trained.run_id

        def attends(name: str, here: bool) -> None:
            self._console.emit("attending" if here else "away", party=name, run=run_id)

        service = ServingService(
            store.held.widths,
            self._opener.keyring,
            opened.tally.ledger,
            run_id=run_id,
            digest=recipe.digest(),
            attends=attends,
            writes=self._opener.make_record_writer(opened, describe_questions(store)),
        )
        quality = read_quality(trained.path.parent, recipe)
        solo = self._opener.solo
        alone = quality.of([recipe.active.name]) if quality.student is None else quality.student
        if text := better_alone(alone, quality, recipe, trained.path.parent.parent):
            self._console.emit("advice", said=text)
        scorer = make_scorer(
            store,
            service,
            settings.party_timeout_ms / 1000,
            quality,
            stand_in.read_means(trained.path),
            solo=solo,
            kept=KeptEmbeddings(service, settings.cache_mib, opened.tally.counts.count_reused),
        )
        parties = recipe.parties if not solo else (recipe.active,)

        def score(
            ids: Sequence[str], min_quality: float | None, columns: RequestColumns | None
        ) -> ServedScores:
            for approval in opened.approvals:
                # A grant counts rows before a passive party is asked.
                approval.takes_all(run_id, len(ids))
            return scorer.score(ids, min_quality, columns).with_run(run_id)

        example_columns = make_result_columns(store.held, torch.zeros(1, recipe.task.outputs))
        served = self._make(
            name=recipe.name,
            run_id=run_id,
            columns={name: values.dtype for name, values in example_columns.items()},
            parties=tuple(party.name for party in parties),
            batcher=Batcher(score, opened.max_at_once, settings.max_wait_ms / 1000),
            tokens=self._tokens,
            quality=quality,
            counts=opened.tally.counts,
            max_rows=settings.most_rows,
            max_at_once=opened.max_at_once,
            present=lambda: service.present,
            id_columns=store.held.columns,
            inexact=store.held.inexact,
        )
        opened.tally.standing = lambda: ServingStanding(
            {party.name: party.name in service.present for party in recipe.passives},
            served.batcher.waiting,
        )
        self._runs.add(run_id, service)
        return ActiveRun(opened, self._runs, service, served)
