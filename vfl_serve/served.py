"""A served run as the HTTP and gRPC ports use it: access control, limits and scoring."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from vfl_common.errors import Code, InputError
from vfl_common.text import LINE, clean
from vfl_party.predict.run import Quality
from vfl_serve.models import Lineage, LoadedRun
from vfl_serve.scored import Counts, ServedScores
from vfl_serve.scorer import Batcher, BatcherClosed, Busy, RequestColumns
from vfl_serve.store import LONGEST_ID
from vfl_serve.telling import get_current_request
from vfl_serve.tokens import Denied, Token, Tokens

BUSY = "too many requests are waiting. Try again later."


@dataclass(frozen=True)
class Served:
    """A served run of a model.

    Args:
        name: The recipe's name.
        run_id: The id of the run.
        columns: {result column: numpy dtype}.
        parties: All parties, in the recipe's order.
        max_rows: The maximum number of rows of a request.
        max_at_once: The maximum number of rows that are scored at once.
        present: Returns the passive parties that are connected for the run.
        id_columns: The names of the id columns.
        inexact: Why scores may differ from those of ``predict`` in their last bits; '' if they do
            not. See ``Held.inexact``.
        instead: Returns the run that answers once this run is closed; None: only this run may
            answer.
    """

    name: str
    run_id: str
    columns: Mapping[str, np.dtype[Any]]
    parties: tuple[str, ...]
    batcher: Batcher
    tokens: Tokens
    quality: Quality
    counts: Counts
    max_rows: int
    max_at_once: int
    present: Callable[[], Sequence[str]] = field(repr=False)
    id_columns: tuple[str, ...] = ("id",)
    inexact: str = ""
    instead: Callable[[], Served] | None = field(default=None, repr=False)

    @property
    def exactness(self) -> dict[str, Any]:
        """Returns the fields of answers that describe ``inexact``."""
        return {"exact": not self.inexact, "why_inexact": self.inexact or None}

    @property
    def names(self) -> tuple[str, str]:
        """Returns the names by which a token may allow this run."""
        return self.name, self.run_id

    def allow(self, header: str | None) -> Token | None:
        """Returns the caller's token for this run. Raises Denied.

        ``header``: the value of ``Authorization``.
        """
        return self.tokens.check(read_bearer(header), self.names)

    async def score(
        self,
        ids: Sequence[str],
        token: Token | None,
        min_quality: float | None = None,
        columns: RequestColumns | None = None,
    ) -> ServedScores:
        """Scores rows by id. ``columns``: the active party's columns of the rows. Raises Denied."""
        if not 0 < len(ids) <= self.max_rows:
            raise Denied(
                413 if ids else 422,
                f"ids: must be 1 to {self.max_rows:,} ids (got {len(ids):,})",
            )
        if any(len(name) > LONGEST_ID for name in ids):
            raise Denied(422, f"an id must have at most {LONGEST_ID} characters")
        # JSON can contain half of a surrogate pair, which would make the whole batch fail.
        if not all(map(_is_text, ids)):
            raise Denied(422, "an id must be valid Unicode text")
        if columns is not None and any(len(values) != len(ids) for values in columns.values()):
            raise Denied(422, "columns: must have one value per id")
        if (request := get_current_request()) is not None:
            request.set_subject(
                self.name, self.run_id, token.name if token is not None else "", len(ids)
            )
        with self.tokens.spending(token, len(ids)):
            return await self.answer(ids, min_quality, columns)

    def submit(
        self, ids: Sequence[str], min_quality: float | None, columns: RequestColumns | None
    ) -> list[Future[ServedScores]]:
        """Queues rows in parts of ``max_at_once`` rows. Raises Busy."""
        size, waiting = self.max_at_once, list[Future[ServedScores]]()
        try:
            for start in range(0, len(ids), size):
                part = ids[start : start + size]
                waiting.append(
                    self.batcher.submit(part, min_quality, _slice_columns(columns, start, size))
                )
        except Busy:
            # No caller waits for the parts that were queued before.
            for future in waiting:
                future.cancel()
            raise
        return waiting

    async def answer(
        self, ids: Sequence[str], min_quality: float | None, columns: RequestColumns | None
    ) -> ServedScores:
        """Scores rows with this run, and counts them. Raises Denied."""
        began_s = time.perf_counter()
        try:
            waiting = self.submit(ids, min_quality, columns)
        except Busy as error:
            # The run may have been closed since the request arrived, after two promotions.
            other = self.instead() if self.instead and isinstance(error, BatcherClosed) else self
            if other.run_id != self.run_id:
                return await other.answer(ids, min_quality, columns)
            raise Denied(503, BUSY) from None
        try:
            scores = join_scores([await asyncio.wrap_future(future) for future in waiting])
        except InputError as error:
            if error.code is Code.FILE_INVALID:
                # The full text has a local path, so only the log contains it.
                raise Denied(503, error.public) from None
            # The caller's columns are invalid, or the party does not allow that many rows.
            status = 403 if error.code is Code.REFUSED else 422
            raise Denied(status, clean(str(error), LINE)) from None
        self.counts.count_scored(scores, time.perf_counter() - began_s)
        return scores


def read_bearer(header: str | None) -> str | None:
    """Returns the bearer token of an ``Authorization`` header; None if there is none."""
    scheme, _, secret = (header or "").partition(" ")
    return secret.strip() if scheme.lower() == "bearer" else None


def _is_text(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _slice_columns(columns: RequestColumns | None, start: int, size: int) -> RequestColumns | None:
    if columns is None:
        return None
    return {name: values[start : start + size] for name, values in columns.items()}


def join_scores(parts: Sequence[ServedScores]) -> ServedScores:
    """Concatenates the scores of a request's parts."""
    if len(parts) == 1:
        return parts[0]
    offsets = np.cumsum([0, *(len(part.parts) for part in parts)])
    return ServedScores(
        {name: np.concatenate([part.columns[name] for part in parts]) for name in parts[0].columns},
        [state for part in parts for state in part.state],
        [part for scored in parts for part in scored.parts],
        np.concatenate(
            [part.part_numbers + offset for part, offset in zip(parts, offsets, strict=False)]
        ),
    )


# The served models by name and run, and the access to them by tokens.
class ServedAnswering(LoadedRun, Protocol):
    """A run that answers requests."""

    @property
    def served(self) -> Served: ...


A = TypeVar("A", bound=ServedAnswering)


@dataclass(frozen=True)
class ServedModel(Generic[A]):
    """The runs of one model."""

    line: Lineage[A]

    @property
    def served(self) -> Served:
        """Returns the run that answers requests without a version."""
        return replace(self.line.now.served, instead=lambda: self.served)

    def version(self, run_id: str) -> Served | None:
        """Returns a loaded run of the model; None if it is not loaded."""
        run = self.line.find(run_id)
        return run.served if run is not None else None

    def describe(self) -> dict[str, Any]:
        """Returns the public facts about the model."""
        line, next_run = self.line, self.line.next
        return {
            "name": line.name,
            "run": line.now.run_id,
            "waits": next_run.run_id if next_run is not None else None,
            "versions": [
                {
                    "run": run.run_id,
                    "present": list(run.present()),
                    **run.served.exactness,
                }
                for run in line.runs
            ],
        }


class Catalog(Generic[A]):
    """All served models.

    Args:
        models: {name: model}, at least one.
        counts: Counts requests by status.
        ready: Returns whether requests can be answered.
    """

    def __init__(
        self,
        models: Mapping[str, ServedModel[A]],
        tokens: Tokens,
        counts: Counts,
        ready: Callable[[], bool] = lambda: True,
    ) -> None:
        self.models, self._tokens, self.counts = dict(models), tokens, counts
        self.ready = ready

    @property
    def first(self) -> Served:
        """Returns the current run of the first model on the command line."""
        return next(iter(self.models.values())).served

    def allow(self, header: str) -> None:
        """Raises Denied if a caller may use none of the models.

        ``header``: the value of ``Authorization``.
        """
        names = [
            name
            for model in self.models.values()
            for name in (model.line.name, *(run.run_id for run in model.line.runs))
        ]
        self._tokens.check(read_bearer(header), names)

    def open(
        self, header: str | None, name: str | None = None, version: str | None = None
    ) -> tuple[Served, Token | None]:
        """Returns a run of a model and the caller's token for it. Raises Denied.

        Args:
            name: The name of the model, or the id of a run; None: the only model.
            version: The id of a run; None: the run that answers now.
        """
        if name is None and len(self.models) > 1:
            raise Denied(
                422, "model: must be given if several are served. Choose one that /v1/models lists."
            )
        served = self._find(name, version)
        if served is None:
            # A caller without access must not learn whether the model is served.
            self._tokens.check(read_bearer(header), [text for text in (name, version) if text])
            raise Denied(404, "no such model is served")
        token = served.allow(header)
        if token is not None and not {"*", served.name} & set(token.models):
            # The token is for this run, and not for the run that takes its place.
            served = replace(served, instead=None)
        return served, token

    def _find(self, name: str | None, version: str | None) -> Served | None:
        if name is None:
            model = next(iter(self.models.values()))
        elif (known := self.models.get(name)) is not None:
            model = known
        else:
            served = next(
                filter(None, (entry.version(name) for entry in self.models.values())), None
            )
            return served if version in (None, name) else None
        return model.served if version is None else model.version(version)

    def versions(self, served: Served) -> list[str]:
        """Returns the ids of a model's runs; the run that answers is the first."""
        model = self.models.get(served.name)
        return [run.run_id for run in model.line.runs] if model is not None else [served.run_id]

    def list_models(self, header: str | None) -> list[dict[str, Any]]:
        """Returns the facts about the models that the caller's token allows. Raises Denied."""
        self.allow(header or "")
        result = []
        for model in self.models.values():
            try:
                model.served.allow(header)
            except Denied:
                continue
            result.append(model.describe())
        return result
