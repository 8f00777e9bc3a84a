"""A passive party's answers: embeddings of the ids that it knows, through its chain and within its
limits.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.errors import Code, InputError
from vfl_common.rpc.serving.answered import EMBEDDED, REFUSED, UNKNOWN, Answered
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.declared import Exchange
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring
from vfl_party.serve.store import Held, Store

PHASE = "serve"


def embeddings(party: Party) -> Exchange:
    """Declares what a passive party sends for an id, with the noise that the phases of training ask
    for.
    """
    course = party.course
    found = scoring(course.sent_noise, name="embedding", how=course.protected)
    return replace(found, when="when an id is asked for")


class DailyLimit:
    """Counts the answers about each id of a day (UTC), in a file of the party's own.

    Args:
        path: of the file, which is made if it is missing.
        most: answers about one id.
    """

    def __init__(self, path: Path, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        try:
            self._file = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
            path.chmod(0o600)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute(
                "CREATE TABLE IF NOT EXISTS answers "
                "(day TEXT, id TEXT, count INTEGER, PRIMARY KEY (day, id)) WITHOUT ROWID"
            )
        except (sqlite3.Error, OSError) as error:
            text = f"{path}: cannot be used to count answers ({error}); move it away"
            raise InputError(Code.FILE_INVALID, text) from None

    def take(self, ids: Sequence[str]) -> npt.NDArray[np.bool_]:
        """Counts an answer about each id, and returns which are within the limit, [N]."""
        day = datetime.now(UTC).strftime("%Y-%m-%d")
        found = np.zeros(len(ids), bool)
        with self._lock, self._transaction():
            self._file.execute("DELETE FROM answers WHERE day <> ?", (day,))
            for at, each in enumerate(ids):
                (count,) = self._file.execute(
                    "INSERT INTO answers VALUES (?, ?, 1) "
                    "ON CONFLICT (day, id) DO UPDATE SET count = min(count, ?) + 1 "
                    "RETURNING count",
                    (day, each, self._most),
                ).fetchone()
                found[at] = count <= self._most
        return found

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._file.execute("COMMIT")
        finally:
            # A disk that is full for a moment must not end all answers.
            if self._file.in_transaction:
                self._file.execute("ROLLBACK")

    def close(self) -> None:
        """Closes the file."""
        with self._lock:
            self._file.close()


class Answers:
    """Answers questions about ids; any thread may call it, one at a time."""

    def __init__(self, store: Store, limit: DailyLimit | None = None) -> None:
        self._store, self._limit = store, limit
        self._held: Held | None = None
        self._chains: Chains | None = None
        # So that a policy that refuses is found before anybody asks.
        self._current()

    def _current(self) -> tuple[Held, Chains]:
        held = self._store.held
        if self._chains is None or held is not self._held:
            self._held = held
            self._chains = held.party.chains(PHASE, embeddings(held.party))
        return held, self._chains

    @torch.no_grad()
    def __call__(self, ids: Sequence[str]) -> Answered:
        """Returns the embeddings of the ids that this party knows. Raises VflError if the chain
        refuses.
        """
        held, chains = self._current()
        rows = held.rows(ids)
        state = np.where(rows < 0, UNKNOWN, EMBEDDED).astype(np.uint8)
        if self._limit is not None and (known := np.flatnonzero(rows >= 0)).size:
            within = self._limit.take([ids[at] for at in known.tolist()])
            state[known[~within]] = REFUSED
        asked = rows[state == EMBEDDED]
        z_ND = held.embed(asked)
        if len(asked):
            z_ND = chains.up.apply({"z": z_ND})["z"]
        found = np.ascontiguousarray(z_ND.cpu().numpy(), dtype="<f4").tobytes()
        return Answered(state.tobytes(), found, held.version)
