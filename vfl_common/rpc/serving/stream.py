"""A passive party's stream at the active party, the questions on it, the answers to them, and their
messages.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.text import clean

# The two states of an id in an answer. A party gives no reason why it does not answer for an id,
# because a reason could reveal that it knows the id.
NOT_ANSWERED, EMBEDDED = 0, 1
# A party of an older release sends 0 for an unknown id, 2 for a refusal, 3 for unusable features.
_STATES = frozenset(range(4))
_NORMALISED_STATES = bytes(EMBEDDED if state == EMBEDDED else NOT_ANSWERED for state in range(256))
# Further states of an id that only the active party uses. They are never sent.
LATE, FAILED, UNKNOWN = 4, 5, 6
FLOAT_BYTES = 4
_MAX_VERSION_CHARS = 64
# The maximum time for which embeddings are cached, in seconds.
_MAX_CACHE_S = 100_000.0


@dataclass(frozen=True)
class Step:
    """One question of a method that needs several questions to score ids: see
    ``vfl_party.phases.online``.

    Args:
        asked: The method's question about each id, in the method's encoding.
        first: The number of the scoring's first question; 0 at the asking side if this is the first
            question.
        begins: Whether this is the first question.
        size: The size that the answer must have, in bytes. Only the asking side knows it.
    """

    asked: bytes
    first: int = 0
    begins: bool = True
    size: int = 0


@dataclass(frozen=True)
class ServingAnswer:
    """A passive party's answer to a question about ids.

    Args:
        state: One byte per id, which is one of the states above.
        embeddings: The embeddings of the ids with state EMBEDDED, [N, D] float32, little-endian.
        features: The version of the party's features.
        answered: The answer to a ``Step``, in the method's encoding, instead of embeddings.
        ids: The ids about which the answer has values, for the party's own record. They are not
            sent.
        times: The number of times that the answer is about each id; None for once.
    """

    state: bytes
    embeddings: bytes = b""
    features: str = ""
    answered: bytes = b""
    ids: Sequence[str] = ()
    times: Sequence[int] | None = None


@dataclass(frozen=True)
class OutgoingMessage:
    """A question or an answer that is about to be sent, for the party's own record.

    Args:
        to: The receiver.
        phase, kind: The phase and the kind in the ledger.
        scoring, place: The number of the scoring's first question, and the position of this
            question after it.
        ids: The ids that the message is about.
        times: The number of times that the message is about each id; None for once.
        numbers: The number of values in the message.
        content: The bytes of these values.
        payload_bytes, message_bytes: The sizes that the ledger counts.
        asked: For an answer, the number of ids in the question, answered or not; 0 for a question.
    """

    to: str
    phase: str
    kind: str
    scoring: int
    place: int
    ids: Sequence[str]
    times: Sequence[int] | None
    numbers: int
    content: bytes
    payload_bytes: int
    message_bytes: int
    asked: int = 0


class WithheldError(Exception):
    """An answer about ids may not be sent, or could not be computed. The party then answers as if
    it knew none of the ids, because a failure could reveal that it knows one of them.
    """


class _Withholding:
    """Turns any exception of its block into a WithheldError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            raise WithheldError(str(error)) from error


# All blocks share one object, because it is entered for each question and must be fast.
withhold_on_error = _Withholding()
# A function that records a message before it is sent. If it raises VflError, the message is not
# sent.
RecordMessage = Callable[[OutgoingMessage], None]


@dataclass(frozen=True)
class CachePolicy:
    """The permission to cache a passive party's embeddings at the active party.

    Args:
        seconds: The time for which an embedding may be used again; 0 for no caching.
        features: The version of the party's features, as in ``ServingAnswer``. Cached embeddings of
            other versions are not used.
    """

    seconds: float = 0.0
    features: str = ""


def read_cache_policy(present: serving_pb2.Present) -> CachePolicy:
    """Reads the permission to cache embeddings from a party's message."""
    keeping = present.keeping
    # NaN or a number out of range means no permission.
    seconds = keeping.seconds if 0.0 < keeping.seconds < _MAX_CACHE_S else 0.0
    return CachePolicy(seconds, clean(keeping.features, _MAX_VERSION_CHARS))


def read_answer(
    answer: serving_pb2.Answer, ids: Sequence[str], width: int, party: str, step: Step | None = None
) -> ServingAnswer:
    """Reads the answer of ``party`` to a question about ``ids``. Raises PeerError if it is invalid.

    ``width``: the width of the party's embeddings. ``step``: the method's question, if the question
    was not for embeddings.
    """
    state, embeddings = bytes(answer.state), bytes(answer.embeddings)
    answered = bytes(answer.answered)
    if len(state) != len(ids) or not _STATES.issuperset(state):
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{party} did not send a valid state for each of {len(ids)} ids",
            party=party,
        )
    expected = state.count(EMBEDDED) * width * FLOAT_BYTES if step is None else 0
    if len(embeddings) != expected:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{party} must send {expected:,} bytes of embeddings (got {len(embeddings):,})",
            party=party,
        )
    size = step.size if step is not None else 0
    if len(answered) != size:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{party} must send {size:,} bytes for a step (got {len(answered):,})",
            party=party,
        )
    features = clean(answer.features, _MAX_VERSION_CHARS)
    return ServingAnswer(state.translate(_NORMALISED_STATES), embeddings, features, answered)


# Decides whether requests wait for a party. A party that misses several questions is away until it
# answers a question in time. Without this rule, each request would wait for a suspended party until
# its timeout.

# The number of consecutive questions without an answer after which a party is away.
MAX_LATE = 3
# The maximum number of consecutive probes that a party must answer in time.
MAX_PROBES = 64


@dataclass
class AnswerPatience:
    """Tracks the patience with one stream of a party. One thread at a time may use it. Times are
    monotonic.

    A party that is away gets some questions as probes. Once it has answered enough probes in time,
    it is on probation: if it misses the next question, it must answer twice as many consecutive
    probes. So a party that answers only probes makes fewer and fewer requests wait.
    """

    _num_late: int = 0
    # The time of the last answer.
    _answered_s: float = 0.0
    # The number of the open probe (0 if there is none), and the time until which an answer to it
    # counts.
    _probe: int = 0
    _probe_until_s: float = 0.0
    # The number of consecutive probes that were answered in time, and the number that is needed.
    _num_good_probes: int = 0
    _num_needed_probes: int = 1

    @property
    def waits(self) -> bool:
        """Whether requests wait for the party's answers."""
        return self._num_late < MAX_LATE

    def note_late(self, asked_s: float, waiting: int) -> bool:
        """Counts a question, asked at ``asked_s``, that had no answer in time. Returns whether the
        party is away from now on.

        ``waiting``: the number of questions that still wait for an answer. If the party has
        answered no question since ``asked_s``, they also count as late.
        """
        was_present = self.waits
        if was_present and self._num_good_probes:
            # The party was on probation.
            self._num_late, self._num_good_probes = MAX_LATE - 1, 0
            self._num_needed_probes = min(2 * self._num_needed_probes, MAX_PROBES)
        self._num_late += 1
        if self._answered_s < asked_s and self._num_late + waiting >= MAX_LATE:
            self._num_late = MAX_LATE
        return was_present and not self.waits

    def probes(self, number: int, now_s: float, until_s: float) -> bool:
        """Returns whether to send the question ``number`` as a probe, which is the case if no other
        probe is open.
        """
        if self._probe and now_s < self._probe_until_s:
            return False
        # If there was a previous probe, it had no answer.
        self._num_good_probes = 0 if self._probe else self._num_good_probes
        self._probe, self._probe_until_s = number, until_s
        return True

    def note_answer(self, number: int, now_s: float, *, waited_for: bool) -> bool:
        """Counts an answer. Returns whether requests wait for the party again.

        ``waited_for``: whether the answer came in time and was not to a probe.
        """
        was_away, self._answered_s = not self.waits, now_s
        if waited_for:
            self._num_late, self._num_good_probes, self._num_needed_probes = 0, 0, 1
        elif number == self._probe and now_s < self._probe_until_s:
            self._num_good_probes += 1
            self._num_late = (
                0 if self._num_good_probes >= self._num_needed_probes else self._num_late
            )
        elif was_away:
            self._num_good_probes = 0
        # The party is alive, so the next question may be a probe again.
        self._probe = 0
        return was_away and self.waits


PHASE, QUESTION, ANSWER = "serve", "question", "answer"
# The maximum number of unanswered questions to one party.
_MAX_OPEN = 1_000
# The maximum number of questions to one party that wait to be sent. Without a limit they could fill
# the memory.
_MAX_UNSENT = 64

# The reason why there is no answer from a party.
Absent = Literal["away", "late", "failed"]


@dataclass
class Question:
    """A question to several parties. ``ids``: {party: the ids in its question}. ``asked_s``: the
    time of the question. ``steps``: see ``ServingService.ask``. ``waiting``: the parties that have
    not answered yet. ``results``: {party: its answer, or the reason why there is none}.
    """

    ids: Mapping[str, Sequence[str]]
    asked_s: float
    steps: Mapping[str, Step] | None = None
    waiting: set[str] = field(default_factory=set)
    results: dict[str, ServingAnswer | Absent] = field(default_factory=dict)


@dataclass
class Stream:
    """A party's stream. ``program``: the id of the party's program; '' with an older release.
    ``open``: {number: unanswered question}.
    """

    party: str
    keeping: CachePolicy
    program: str = ""
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    open: dict[int, Question] = field(default_factory=dict)
    patience: AnswerPatience = field(default_factory=AnswerPatience)

    @property
    def full(self) -> bool:
        """Whether the stream has too many open questions to take another."""
        return len(self.open) >= _MAX_OPEN or self.outbox.qsize() >= _MAX_UNSENT


def encode_question(number: int, ids: Sequence[str], left_ms: int, step: Step | None) -> bytes:
    """Returns the message of a question. Only the first question of a scoring contains the ids."""
    asked = serving_pb2.Question(number=number, left_ms=left_ms)
    if step is None or not step.first:
        asked.ids.extend(ids)
    if step is not None:
        asked.step.first, asked.step.asked = step.first, step.asked
    return serving_pb2.FromActive(question=asked).SerializeToString()


def describe_question(
    party: str, number: int, ids: Sequence[str], step: Step | None, message_bytes: int
) -> OutgoingMessage:
    """Describes a question for the party's own record."""
    first = number if step is None else step.first or number
    asked = step.asked if step is not None else b""
    return OutgoingMessage(
        to=party,
        phase=PHASE,
        kind=QUESTION,
        scoring=first,
        place=number - first,
        # An empty text is not an id.
        ids=[id_ for id_ in ids if id_],
        times=None,
        numbers=len(asked),
        content=asked,
        payload_bytes=0,
        message_bytes=message_bytes,
    )
