"""A passive party's stream at the active party, and the open questions on it."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.rpc.serving.answered import CachePolicy, OutgoingMessage, ServingAnswer, Step

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
