"""A passive party's answers: embeddings of the ids that it knows, through its chain and limits."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.errors import Code, PeerError
from vfl_common.rpc.serving.stream import ServingAnswer, Step, withhold_on_error
from vfl_party.base.kept import KeptFile
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.declared import Exchange
from vfl_party.outbound.exchange import way_of
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring
from vfl_serve.asked import SelectIds, select_all_ids
from vfl_serve.store import FeatureLookup, Held
from vfl_serve.stores.seam import LookupResult

PHASE = "serve"


def declare_embeddings(party: Party) -> Exchange:
    """Declares the exchange in which a passive party sends embeddings of ids.

    It has the noise that the training phases require.
    """
    course = party.course
    exchange = scoring(course.sent_noise, name="embedding", how=course.protected)
    return replace(exchange, when="when an id is asked for")


class SentBefore(KeptFile):
    """A file of the noisy embeddings that this party has sent.

    A repeated question about an id gets the same bytes, also after a restart. With fresh noise, the
    active party could average the noise away. ``run``: the id of the trained run.
    """

    def __init__(self, path: Path, run: str) -> None:
        columns = "run TEXT, id TEXT, clean BLOB, z BLOB, PRIMARY KEY (run, id)"
        super().__init__(path, f"sent ({columns}) WITHOUT ROWID")
        self._run = run

    def reuse_sent(
        self,
        ids: Sequence[str],
        clean_ND: npt.NDArray[np.float32],
        noisy_ND: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Returns the embeddings to send, float32 [N, D].

        An id gets the embedding that was sent before, if its embedding without noise
        (``clean_ND``) has not changed. Otherwise it gets its row of ``noisy_ND``, which is stored.
        """
        sent_ND = noisy_ND.copy()
        with self.begin_transaction() as file:
            for at, name in enumerate(ids):
                digest = hashlib.sha256(clean_ND[at].tobytes()).digest()
                earlier = file.execute(
                    "SELECT z FROM sent WHERE run = ? AND id = ? AND clean = ?",
                    (self._run, name, digest),
                ).fetchone()
                if earlier is not None:
                    sent_ND[at] = np.frombuffer(earlier[0], np.float32)
                    continue
                file.execute(
                    "INSERT OR REPLACE INTO sent VALUES (?, ?, ?, ?)",
                    (self._run, name, digest, noisy_ND[at].tobytes()),
                )
        return sent_ND


class DailyLimit(KeptFile):
    """Counts the answers about each id per day (UTC), in a file of this party.

    Args:
        path: The file, which is created if it is missing.
        max_answers: The maximum number of answers about an id per day.
    """

    def __init__(self, path: Path, max_answers: int) -> None:
        columns = "day TEXT, id TEXT, count INTEGER, PRIMARY KEY (day, id)"
        super().__init__(path, f"answers ({columns}) WITHOUT ROWID")
        self._max_answers = max_answers

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Counts an answer about each id; returns bool [N], the ids within the limit."""
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        allowed_N = np.zeros(len(ids), bool)
        with self.begin_transaction() as file:
            file.execute("DELETE FROM answers WHERE day <> ?", (day,))
            for at, name in enumerate(ids):
                (count,) = file.execute(
                    "INSERT INTO answers VALUES (?, ?, 1) "
                    "ON CONFLICT (day, id) DO UPDATE SET count = min(count, ?) + 1 "
                    "RETURNING count",
                    (day, name, self._max_answers),
                ).fetchone()
                allowed_N[at] = count <= self._max_answers
        return allowed_N


class Limit(Protocol):
    """Counts answers about ids before they are sent."""

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Counts an answer about each id; returns bool [N], the ids that may be answered."""
        ...


class CombinedLimits:
    """Applies several limits in order. Each counts only the ids that the limits before it allow."""

    def __init__(self, *limits: Limit | None) -> None:
        self._limits = [limit for limit in limits if limit is not None]

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """See ``Limit.take``."""
        allowed_N = np.ones(len(ids), bool)
        for limit in self._limits:
            at = np.flatnonzero(allowed_N)
            if at.size:
                allowed_N[at] = limit.take([ids[index] for index in at.tolist()])
        return allowed_N


class Answers:
    """Answers the active party's questions about ids with embeddings.

    Any thread may call it. Lookups run in parallel; a lock serialises the rest.

    Args:
        sent: Opens the file of sent embeddings. Called only if the embeddings have noise.
        limit: Limits the answers about ids that this party knows.
        asked: Selects the ids to look up.

    ``way``: the record's description of the embeddings; see ``Recorder.leaves``.
    """

    def __init__(
        self,
        store: FeatureLookup,
        sent: Callable[[], SentBefore],
        limit: Limit | None = None,
        asked: SelectIds = select_all_ids,
    ) -> None:
        self._store, self._limit, self._asked = store, limit, asked
        self._answering = threading.Lock()
        self._held: Held | None = None
        self._chains: Chains | None = None
        # Creates the chains now, so that a refusing policy is found before the first question.
        chains = self._chains_for(store.held)
        noisy = store.held.draws or any(filter_.draws for filter_ in chains.up.filters)
        self._sent = sent() if noisy else None
        self.way = way_of(declare_embeddings(store.held.party), chains, 1, up=True)

    def close(self) -> None:
        """Closes the file of sent embeddings."""
        if self._sent is not None:
            self._sent.close()

    def _chains_for(self, held: Held) -> Chains:
        if self._chains is None or held is not self._held:
            self._held = held
            self._chains = held.party.chains(PHASE, declare_embeddings(held.party))
        return self._chains

    def __call__(
        self, ids: Sequence[str], until_s: float, step: Step | None = None
    ) -> ServingAnswer:
        """Returns the embeddings of the ids for which this party answers.

        Raises VflError if the lookup fails, TimeoutError if it takes until ``until_s`` (monotonic),
        and UntoldError if a limit or the policy refuses the answer.
        """
        held = self._store.held
        if step is not None:
            peer = held.party.recipe.active.name
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: asked {held.party.name} for a step, but this model has embeddings",
                party=peer,
            )
        result = held.look_up(self._asked(ids), until_s)
        with self._answering, withhold_on_error:
            return self._answer(held, result, ids)

    @torch.no_grad()
    def _answer(self, held: Held, result: LookupResult, ids: Sequence[str]) -> ServingAnswer:
        chains = self._chains_for(held)
        answered_N = find_answered_rows(result, ids, self._limit)
        rows = result.rows[answered_N]
        z_ND = held.embed(result, rows)
        sent_ND = z_ND.numpy()
        embedded = [ids[at] for at in np.flatnonzero(answered_N).tolist()]
        if len(rows):
            sent_ND = chains.up.apply({"z": z_ND})["z"].cpu().numpy()
            if self._sent is not None:
                clean_ND = held.embed(result, rows, drawn=False) if held.draws else z_ND
                sent_ND = self._sent.reuse_sent(embedded, clean_ND.numpy(), sent_ND)
        sent = np.ascontiguousarray(sent_ND, dtype="<f4").tobytes()
        return ServingAnswer(encode_states(answered_N), sent, result.version, ids=embedded)


def find_answered_rows(
    result: LookupResult, ids: Sequence[str], limit: Limit | None
) -> npt.NDArray[np.bool_]:
    """Returns bool [N]: the ids for which this party answers.

    It knows them, it can use their features, and its limits allow an answer.
    """
    answered_N = result.rows >= 0
    if limit is not None and (known := np.flatnonzero(answered_N)).size:
        answered_N[known] = limit.take([ids[at] for at in known.tolist()])
    return answered_N


def encode_states(answered: npt.NDArray[np.bool_]) -> bytes:
    """Returns the states of ids for a message: ``EMBEDDED`` is 1, ``NOT_ANSWERED`` is 0."""
    return answered.tobytes()
