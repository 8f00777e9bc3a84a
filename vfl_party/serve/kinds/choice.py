"""Chooses the scorer and the answers by the kind of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from torch import Tensor

from vfl_common.rpc.serving.answered import ServingAnswer, Step
from vfl_common.rpc.serving.service import ServingService
from vfl_party.outbound.exchange import way_of
from vfl_party.predict.quality import Quality
from vfl_party.serve.answering import PHASE, Answers, Limit, SentBefore
from vfl_party.serve.asked import LooksUp, every_id
from vfl_party.serve.batching import Given
from vfl_party.serve.kinds.alone import AloneScorer
from vfl_party.serve.kinds.holder import HolderScorer
from vfl_party.serve.kinds.stepwise import StepAnswers, StepScorer, online_of
from vfl_party.serve.scored import ServedScores
from vfl_party.serve.scorer import OnlineScorer
from vfl_party.serve.store import FeatureLookup
from vfl_party.serve.stores.kept import KeptEmbeddings


class RowScorer(Protocol):
    """Scores rows by id at the active party; any thread may call it, several at once."""

    def score(
        self, ids: Sequence[str], min_quality: float | None = None, columns: Given | None = None
    ) -> ServedScores: ...


class Answerer(Protocol):
    """Answers questions at a passive party; see ``Answers``."""

    way: tuple[str, ...]

    def __call__(
        self, ids: Sequence[str], until_s: float, step: Step | None = None
    ) -> ServingAnswer: ...

    def close(self) -> None: ...


def in_steps(store: FeatureLookup) -> bool:
    """Whether the model's method has its own way to score ids."""
    return store.held.party.course.lone_phase is not None


def bytes_of_row(store: FeatureLookup) -> int:
    """Returns the most bytes that a message has about one row."""
    if in_steps(store):
        return online_of(store.held).bytes_of_row
    return 4 * max(store.held.widths.values(), default=1)


def scorer_of(
    store: FeatureLookup,
    service: ServingService,
    timeout_s: float,
    quality: Quality,
    stand_in: Mapping[str, Tensor],
    *,
    solo: bool,
    kept: KeptEmbeddings,
) -> RowScorer:
    """Makes the active party's scorer; see ``OnlineScorer``.

    ``solo``: it asks nobody, and scores with the run's student. ``kept``: asks for embeddings, if
    the model has some. Raises InputError if a policy refuses.
    """
    if solo:
        return AloneScorer(store, timeout_s, quality)
    if in_steps(store):
        return StepScorer(store, service.ask, timeout_s, quality)
    if store.held.party.recipe.own_rows:
        return HolderScorer(store, kept.ask, timeout_s, quality, {})
    return OnlineScorer(store, kept.ask, timeout_s, quality, stand_in)


def asking_way(store: FeatureLookup) -> tuple[str, ...]:
    """Returns what the record says of an active party's questions; see ``Recorder.leaves``."""
    if not in_steps(store):
        # An id, and no numbers: nothing that a chain could change.
        return "question", "down", "ids", "unchanged"
    exchange = online_of(store.held).exchange
    return way_of(exchange, store.held.party.chains(PHASE, exchange), 1, up=False)


def answers_of(
    store: FeatureLookup,
    sent: Callable[[], SentBefore],
    limit: Limit | None,
    asked: LooksUp = every_id,
) -> Answerer:
    """Makes a passive party's answers; see ``Answers``. Raises InputError if a policy refuses."""
    if in_steps(store):
        return StepAnswers(store, limit, asked)
    return Answers(store, sent, limit, asked)
