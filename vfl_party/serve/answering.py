"""A passive party's answers: embeddings of the ids that it knows, through its chain and within its
limits.
"""

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
from vfl_common.rpc.serving.answered import ServingAnswer, Step, withhold_on_error
from vfl_party.base.kept import KeptFile
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.declared import Exchange
from vfl_party.outbound.exchange import way_of
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring
from vfl_party.serve.asked import LooksUp, every_id
from vfl_party.serve.store import FeatureLookup, Held
from vfl_party.serve.stores.seam import LookupResult

PHASE = "serve"


def embeddings(party: Party) -> Exchange:
    """Declares what a passive party sends for an id, with the noise that the phases of training ask
    for.
    """
    course = party.course
    exchange = scoring(course.sent_noise, name="embedding", how=course.protected)
    return replace(exchange, when="when an id is asked for")


class SentBefore(KeptFile):
    """Noisy embeddings that have left: an id that is asked for again gets the same bytes, whatever
    ids come with it, also after a restart. Fresh noise on the same row could be averaged away.

    ``run``: the trained run, whose embeddings these are.
    """

    def __init__(self, path: Path, run: str) -> None:
        columns = "run TEXT, id TEXT, clean BLOB, z BLOB, PRIMARY KEY (run, id)"
        super().__init__(path, f"sent ({columns}) WITHOUT ROWID")
        self._run = run

    def same(
        self,
        ids: Sequence[str],
        clean_ND: npt.NDArray[np.float32],
        noisy_ND: npt.NDArray[np.float32],
    ) -> npt.NDArray[np.float32]:
        """Returns what leaves for each id, [N, D]: what has left before, if the embedding without
        noise is the same as then; else the row of ``noisy_ND``, which is kept.
        """
        sent_ND = noisy_ND.copy()
        with self.changing() as file:
            for at, name in enumerate(ids):
                digest = hashlib.sha256(clean_ND[at].tobytes()).digest()
                before = file.execute(
                    "SELECT z FROM sent WHERE run = ? AND id = ? AND clean = ?",
                    (self._run, name, digest),
                ).fetchone()
                if before is not None:
                    sent_ND[at] = np.frombuffer(before[0], np.float32)
                    continue
                file.execute(
                    "INSERT OR REPLACE INTO sent VALUES (?, ?, ?, ?)",
                    (self._run, name, digest, noisy_ND[at].tobytes()),
                )
        return sent_ND


class DailyLimit(KeptFile):
    """Counts the answers about each id of a day (UTC), in a file of the party's own.

    Args:
        path: of the file, which is made if it is missing.
        max_answers: limit of the answers about one id.
    """

    def __init__(self, path: Path, max_answers: int) -> None:
        columns = "day TEXT, id TEXT, count INTEGER, PRIMARY KEY (day, id)"
        super().__init__(path, f"answers ({columns}) WITHOUT ROWID")
        self._max_answers = max_answers

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Counts an answer about each id, and returns which are within the limit, [N]."""
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        allowed_N = np.zeros(len(ids), bool)
        with self.changing() as file:
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
    """Counts answers about ids before they leave."""

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Counts an answer about each id, and returns which may be answered, [N]."""
        ...


class CombinedLimits:
    """Several limits: each counts only what those before it let pass."""

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
    """Answers questions about ids; any thread may call it. Features are looked up at the same time,
    what leaves is made by one after the other.

    Args:
        sent: makes the memory of what has left, if the embeddings have noise.
        limit: of the ids that this party knows.
        asked: which ids are looked up.

    ``way``: what the record says of the embeddings.
    """

    def __init__(
        self,
        store: FeatureLookup,
        sent: Callable[[], SentBefore],
        limit: Limit | None = None,
        asked: LooksUp = every_id,
    ) -> None:
        self._store, self._limit, self._asked = store, limit, asked
        self._leaving = threading.Lock()
        self._held: Held | None = None
        self._chains: Chains | None = None
        # So that a policy that refuses is found before anybody asks.
        chains = self._current(store.held)
        noisy = store.held.draws or any(filter_.draws for filter_ in chains.up.filters)
        self._sent = sent() if noisy else None
        self.way = way_of(embeddings(store.held.party), chains, 1, up=True)

    def close(self) -> None:
        """Closes the memory of what has left."""
        if self._sent is not None:
            self._sent.close()

    def _current(self, held: Held) -> Chains:
        if self._chains is None or held is not self._held:
            self._held = held
            self._chains = held.party.chains(PHASE, embeddings(held.party))
        return self._chains

    def __call__(
        self, ids: Sequence[str], until_s: float, step: Step | None = None
    ) -> ServingAnswer:
        """Returns the embeddings of the ids for which this party answers.

        Raises VflError if the store cannot be asked, TimeoutError if it has nothing at ``until_s``
        (monotonic), and UntoldError if what it has may not leave.
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
        with self._leaving, withhold_on_error:
            return self._answer(held, result, ids)

    @torch.no_grad()
    def _answer(self, held: Held, result: LookupResult, ids: Sequence[str]) -> ServingAnswer:
        chains = self._current(held)
        answered_N = find_answered_rows(result, ids, self._limit)
        asked = result.rows[answered_N]
        z_ND = held.embed(result, asked)
        leaves_ND = z_ND.numpy()
        embedded = [ids[at] for at in np.flatnonzero(answered_N).tolist()]
        if len(asked):
            leaves_ND = chains.up.apply({"z": z_ND})["z"].cpu().numpy()
            if self._sent is not None:
                clean_ND = held.embed(result, asked, drawn=False) if held.draws else z_ND
                leaves_ND = self._sent.same(embedded, clean_ND.numpy(), leaves_ND)
        sent = np.ascontiguousarray(leaves_ND, dtype="<f4").tobytes()
        return ServingAnswer(state_bytes(answered_N), sent, result.version, ids=embedded)


def find_answered_rows(
    result: LookupResult, ids: Sequence[str], limit: Limit | None
) -> npt.NDArray[np.bool_]:
    """Returns for which ids this party answers: it knows them, can use their features, and its
    limits allow it, [N].
    """
    answered_N = result.rows >= 0
    if limit is not None and (known := np.flatnonzero(answered_N)).size:
        answered_N[known] = limit.take([ids[at] for at in known.tolist()])
    return answered_N


def state_bytes(answered: npt.NDArray[np.bool_]) -> bytes:
    """Returns the states of ids as they cross the wire: ``EMBEDDED`` or ``NOT_ANSWERED``, which are
    1 and 0.
    """
    return answered.tobytes()
