"""A passive party's answers: embeddings of the ids that it knows, through its chain and limits."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.rpc.serving.stream import ServingAnswer, Step, withhold_on_error
from vfl_common.run_folder import RunFolder
from vfl_party.align.state import read_common_rows
from vfl_party.base.kept import KeptFile
from vfl_party.outbound.chain import Chains
from vfl_party.outbound.declared import Exchange
from vfl_party.outbound.exchange import way_of
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring
from vfl_party.record import lines
from vfl_party.record.book import LINES, secret_of
from vfl_party.record.lines import TAG
from vfl_serve.store import FeatureLookup, Held
from vfl_serve.stores.seam import LookupResult

# Minimum for the default daily limit, so that a party with a small table can serve.
_MIN_ASKED = 10_000


# The default daily limit in tables: each row may be scored once in bulk and once by single ids.
_TABLES_A_DAY = 2


# The counter reserves this fraction (1/100) of the daily limit at once.
_SHARES = 100


# Returns the ids of a question, in order, with None in place of ids that must not be looked up.
SelectIds: TypeAlias = Callable[[Sequence[str]], Sequence[str | None]]


select_all_ids: SelectIds = list


# The daily limit counts all ids, and the active party learns nothing about ids that are not looked
# up.
class DailyIdCounter(KeptFile):
    """Counts the requested ids per day (UTC), known or unknown, in a file of this party.

    It reserves a hundredth of the limit in the file at once, because most questions must not wait
    for the disk. Ids that are reserved when the program ends count as requested.

    Args:
        path: The file, which is created if it is missing.
        max_ids: The maximum number of ids per day.
    """

    def __init__(self, path: Path, max_ids: int) -> None:
        super().__init__(path, "asked (day INTEGER PRIMARY KEY, count INTEGER)")
        self.max_ids, self._reserve_size = max_ids, -(-max_ids // _SHARES)
        self._counting = threading.Lock()
        self._day, self._spent = 0, False
        self._left: int = 0

    def take(self, ids: int) -> int:
        """Counts ``ids`` requested ids; returns how many of them are allowed the limit."""
        with self._counting:
            day = _day()
            if day != self._day:
                self._day, self._left, self._spent = day, 0, False
            if self._left < ids and not self._spent:
                self._left += self._count(max(ids - self._left, self._reserve_size))
            allowed = min(ids, self._left)
            self._left -= allowed
            return allowed

    def _count(self, wanted: int) -> int:
        """Reserves up to ``wanted`` ids in the file, allowed the limit; returns how many."""
        with self.begin_transaction() as file:
            file.execute("DELETE FROM asked WHERE day <> ?", (self._day,))
            (count_before,) = file.execute("SELECT coalesce(sum(count), 0) FROM asked").fetchone()
            granted: int = max(0, min(wanted, self.max_ids - count_before))
            file.execute("REPLACE INTO asked VALUES (?, ?)", (self._day, count_before + granted))
        self._spent = granted < wanted
        return granted


class AlignedIds:
    """The ids that the alignments of a run have found in common. Takes about 110 bytes per id.

    ``tags``: the ids' tags in the record. ``secret``: the record's secret, which makes tags of ids.
    """

    def __init__(self, tags: Iterable[bytes], secret: bytes) -> None:
        self._tags, self._secret = frozenset(tags), secret
        # A cache of requested ids that are aligned: computing a tag is slow.
        self._known_aligned = set[str]()

    def __contains__(self, person: str) -> bool:
        if person in self._known_aligned:
            return True
        aligned = lines.tag_person(self._secret, person) in self._tags
        if aligned:
            self._known_aligned.add(person)
        return aligned


class IdFilter:
    """Selects the ids of a question to look up; a ``SelectIds``.

    Args:
        counter: Counts all requested ids.
        aligned: The ids that may be looked up; None: all ids.
        advise: Shows a sentence to this party's operator.
    """

    def __init__(
        self, counter: DailyIdCounter, aligned: AlignedIds | None, advise: Callable[[str], None]
    ) -> None:
        self._counter, self._aligned, self._advise = counter, aligned, advise
        self._day_of_advice = 0

    def __call__(self, ids: Sequence[str]) -> Sequence[str | None]:
        """Returns the ids to look up, in order, with None in place of other ids."""
        # Empty texts are not ids, so they do not count.
        count = len(ids) - ids.count("")
        allowed = self._counter.take(count)
        if allowed < count:
            self._report_limit()
        elif self._aligned is None:
            return ids
        places = [at for at, name in enumerate(ids) if name][:allowed]
        result: list[str | None] = [None] * len(ids)
        aligned = self._aligned
        for at in places:
            if aligned is None or ids[at] in aligned:
                result[at] = ids[at]
        return result

    def _report_limit(self) -> None:
        day = _day()
        if day != self._day_of_advice:
            self._day_of_advice = day
            self._advise(
                f"serve.asked_a_day: {self._counter.max_ids:,} ids were asked for today (UTC), the "
                "limit; no other id is answered before tomorrow"
            )


def _day() -> int:
    """Returns the number of days (UTC) since 1970."""
    return int(time.time()) // 86_400


def daily_limit(setting: int | None, rows: int) -> int:
    """Returns the maximum number of requested ids per day.

    ``setting``: the value in the party file. ``rows``: the number of rows of the party's table.
    """
    return setting if setting is not None else max(_MIN_ASKED, _TABLES_A_DAY * rows)


def read_aligned_ids(run: Path, out: Path, record: Path) -> AlignedIds:
    """Returns the ids that private set intersection found in a run's training and predictions.

    Args:
        run: This party's folder in the run.
        out: The folder of all runs and predictions of this party.
        record: The folder of this party's record.

    Raises InputError if no aligned id is known.
    """
    name, run_id = run.name, run.resolve().parent.name
    tags = set[bytes]()
    for other, (digest, rows) in read_table_digests(record).items():
        folder = run if other == run_id else out / other / name
        if other != run_id and not _predicts_with(folder, run_id):
            continue
        common = read_common_rows(folder, rows)
        if common is not None:
            path = record / lines.PEOPLE_FOLDER / digest
            tags.update(np.frombuffer(lines.read_tags(path, digest), TAG)[common].tolist())
    if not tags:
        raise InputError(
            Code.FILE_INVALID,
            f'serve.ids = "aligned": {record} and {run} do not say which ids were aligned. Restore '
            'both folders, or set serve.ids = "all" to answer for every id of the table.',
        )
    return AlignedIds(tags, secret_of(record))


def read_table_digests(record: Path) -> dict[str, tuple[str, int]]:
    """Returns {run id: (the digest of the tags of its table's ids, the number of ids)}."""
    result = {}
    for line in _people_lines(record / LINES):
        if line.get("what") == "table":
            result[str(line["run"])] = str(line["people"]), int(line["rows"])
    return result


def _people_lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open("rb") as file:
            for line in file:
                # Most lines record a sent message and need not be parsed.
                if line.startswith(b'{"people":'):
                    yield json.loads(line)
    except FileNotFoundError:
        return


def _predicts_with(folder: Path, run_id: str) -> bool:
    """Returns whether ``folder`` is a joint prediction with the run."""
    return RunFolder(folder, folder.parent.name).facts().get("trained_run") == run_id


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
            self._chains = held.party.exchanges.make_chains(PHASE, declare_embeddings(held.party))
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
