"""A passive party's stream at the active party, and the open questions on it."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.rpc.serving.answered import CachePolicy, OutgoingMessage, ServingAnswer, Step
from vfl_common.rpc.serving.patience import AnswerPatience

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
