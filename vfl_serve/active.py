"""Runs that an active party serves: it asks the passive parties and answers requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from vfl_common.process.logs import Console
from vfl_common.rpc.serving.service import ServingService, SeveralRuns
from vfl_party.phases import stand_in
from vfl_party.predict.run import better_alone, read_quality
from vfl_serve.batching import Batcher, RequestColumns
from vfl_serve.kinds.choice import describe_questions, make_scorer
from vfl_serve.opening import OpenedRun, Opener, ServingStanding
from vfl_serve.scored import ServedScores
from vfl_serve.scorer import make_result_columns
from vfl_serve.stores.kept import KeptEmbeddings
from vfl_serve.tokens import Tokens

if TYPE_CHECKING:
    from vfl_serve.http.served import Served


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
