"""A cache of the passive parties' embeddings at the active party, as far as these parties allow it.

It contains embeddings as the passive parties sent them, after their policy and noise. Ids that a
party does not know or refuses are not cached. Cached embeddings of absent parties are not used.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from vfl_common.rpc.serving.service import Pending
from vfl_common.rpc.serving.stream import EMBEDDED, FAILED, LATE, Absent, CachePolicy, ServingAnswer

_STATES: Mapping[Absent, int] = {"late": LATE, "failed": FAILED}
# Bytes of an entry, without the id and the embedding.
_OVERHEAD_BYTES = 400


class EmbeddingService(Protocol):
    """Asks passive parties; see ``vfl_common.rpc.serving.service.ServingService``."""

    def keeping(self) -> Mapping[str, CachePolicy]: ...

    def ask(
        self,
        ids: Sequence[str],
        timeout_s: float,
        *,
        ids_of: Mapping[str, Sequence[str]] | None = None,
    ) -> Pending: ...


class _Key(NamedTuple):
    party: str
    features: str
    id: str


class _Entry(NamedTuple):
    embedding: bytes
    since_s: float


class KeptEmbeddings:
    """Asks the passive parties of a run only for embeddings that are not cached.

    Any thread may call it.

    Args:
        mib: The maximum memory, in MiB. The least recently used entries are removed first.
        used: Called with a party and the number of rows that used its cached embeddings.
    """

    def __init__(
        self, service: EmbeddingService, mib: int, used: Callable[[str, int], None]
    ) -> None:
        self._service, self._max_bytes, self._used = service, mib << 20, used
        self._entries: OrderedDict[_Key, _Entry] = OrderedDict()
        self._bytes = 0
        self._changing = threading.Lock()

    def ask(self, ids: Sequence[str], timeout_s: float) -> Pending | _PartlyKept:
        """See ``EmbeddingService.ask``."""
        allowed = {
            party: keeping
            for party, keeping in self._service.keeping().items()
            if keeping.seconds and self._max_bytes
        }
        if not allowed:
            return self._service.ask(ids, timeout_s)
        embeddings = {
            party: self._find_kept(party, keeping, ids) for party, keeping in allowed.items()
        }
        unknown = {
            party: [name for name in ids if name not in known]
            for party, known in embeddings.items()
        }
        pending = self._service.ask(ids, timeout_s, ids_of=unknown)
        return _PartlyKept(self, pending, ids, embeddings, unknown)

    def _find_kept(self, party: str, keeping: CachePolicy, ids: Sequence[str]) -> dict[str, bytes]:
        """Returns {id: embedding} of the cached ids."""
        embeddings, oldest_s = dict[str, bytes](), time.monotonic() - keeping.seconds
        with self._changing:
            for name in ids:
                key = _Key(party, keeping.features, name)
                entry = self._entries.get(key)
                if entry is not None and entry.since_s > oldest_s:
                    embeddings[name] = entry.embedding
                    self._entries.move_to_end(key)
        return embeddings

    def keep(self, party: str, ids: Sequence[str], answer: ServingAnswer, since_s: float) -> None:
        """Caches a party's answer about ``ids``. ``since_s``: when it was asked (monotonic)."""
        count = answer.state.count(EMBEDDED)
        values = np.frombuffer(answer.embeddings, "<f4")
        # Such an answer fails later and must not be cached.
        if not count or not np.isfinite(values).all():
            return
        width, start = len(answer.embeddings) // count, 0
        with self._changing:
            for name, state in zip(ids, answer.state, strict=True):
                if state != EMBEDDED:
                    continue
                embedding = answer.embeddings[start : start + width]
                start += width
                self._put(_Key(party, answer.features, name), _Entry(embedding, since_s))

    def count_used(self, party: str, rows: int) -> None:
        """Counts rows that used a party's cached embeddings."""
        if rows:
            self._used(party, rows)

    def _put(self, key: _Key, entry: _Entry) -> None:
        previous = self._entries.pop(key, None)
        self._bytes -= 0 if previous is None else _size(key, previous)
        self._entries[key] = entry
        self._bytes += _size(key, entry)
        while self._bytes > self._max_bytes:
            self._bytes -= _size(*self._entries.popitem(last=False))


def _size(key: _Key, entry: _Entry) -> int:
    return _OVERHEAD_BYTES + 4 * len(key.id) + len(entry.embedding)


class _PartlyKept:
    """A pending question, part of whose answers are cached.

    ``known``: {party: {id: cached embedding}}. ``unknown``: {party: the ids in the question}.
    """

    def __init__(
        self,
        kept: KeptEmbeddings,
        pending: Pending,
        ids: Sequence[str],
        known: Mapping[str, Mapping[str, bytes]],
        unknown: Mapping[str, Sequence[str]],
    ) -> None:
        self._kept, self._pending, self._ids = kept, pending, ids
        self._known, self._unknown = known, unknown
        self._since_s = time.monotonic()

    def wait(self) -> dict[str, ServingAnswer | Absent]:
        """See ``Pending.wait``."""
        answers = self._pending.wait()
        for party, known in self._known.items():
            answer, asked = answers[party], self._unknown[party]
            if isinstance(answer, ServingAnswer):
                self._kept.keep(party, asked, answer, self._since_s)
            if known and answer != "away":
                self._kept.count_used(party, sum(name in known for name in self._ids))
                answers[party] = self._merge(known, answer, asked)
        return answers

    def _merge(
        self, known: Mapping[str, bytes], answer: ServingAnswer | Absent, asked: Sequence[str]
    ) -> ServingAnswer:
        """Returns an answer about all ids from cached embeddings and a party's answer."""
        received = _split_answer(answer, len(asked))
        rows = [(EMBEDDED, known[name]) if name in known else next(received) for name in self._ids]
        state, parts = bytes(state for state, _ in rows), [embedding for _, embedding in rows]
        return ServingAnswer(state, b"".join(parts))


def _split_answer(answer: ServingAnswer | Absent, n: int) -> Iterator[tuple[int, bytes]]:
    """Yields the state and the embedding of each of ``n`` ids; b'' if there is no embedding."""
    if not isinstance(answer, ServingAnswer):
        yield from [(_STATES[answer], b"")] * n
        return
    count, start = answer.state.count(EMBEDDED), 0
    width = len(answer.embeddings) // count if count else 0
    for state in answer.state:
        end = start + width if state == EMBEDDED else start
        yield state, answer.embeddings[start:end]
        start = end
