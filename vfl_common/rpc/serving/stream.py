"""A passive party's stream at the active party, and the questions on it."""

from __future__ import annotations

import queue
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.rpc.serving.answered import Answered, Keeping, Outgoing, Step
from vfl_common.rpc.serving.patience import Patience

PHASE, QUESTION, ANSWER = "serve", "question", "answer"
# Questions to one party whose answers nobody has read.
_MOST_OPEN = 1_000
# Questions to one party that it does not take from the wire: further ones would fill the memory.
_MOST_UNSENT = 64

# Why a party has no part in an answer.
Absent = Literal["away", "late", "failed"]


@dataclass
class Question:
    """A question to parties. ``ids``: {party: those that it is asked for}. ``asked_s``: when.
    ``steps``: see ``ServingService.ask``. ``waiting``: those that have not answered yet.
    """

    ids: Mapping[str, Sequence[str]]
    asked_s: float
    steps: Mapping[str, Step] | None = None
    waiting: set[str] = field(default_factory=set)
    found: dict[str, Answered | Absent] = field(default_factory=dict)


@dataclass
class Stream:
    """A party's stream. ``program``: tells the programs of a party apart; '' with an older release.
    ``open``: its questions without an answer, by number.
    """

    party: str
    keeping: Keeping
    program: str = ""
    outbox: queue.SimpleQueue[bytes | None] = field(default_factory=queue.SimpleQueue)
    open: dict[int, Question] = field(default_factory=dict)
    patience: Patience = field(default_factory=Patience)

    @property
    def full(self) -> bool:
        return len(self.open) >= _MOST_OPEN or self.outbox.qsize() >= _MOST_UNSENT


def question_bytes(number: int, ids: Sequence[str], left_ms: int, step: Step | None) -> bytes:
    """Returns a question as it crosses the wire; only the first of a scoring has the ids."""
    asked = serving_pb2.Question(number=number, left_ms=left_ms)
    if step is None or not step.first:
        asked.ids.extend(ids)
    if step is not None:
        asked.step.first, asked.step.asked = step.first, step.asked
    return serving_pb2.FromActive(question=asked).SerializeToString()


def told_of(
    party: str, number: int, ids: Sequence[str], step: Step | None, message_bytes: int
) -> Outgoing:
    first = number if step is None else step.first or number
    asked = step.asked if step is not None else b""
    of = PHASE, QUESTION, first, number - first
    # An empty text is nobody's id.
    people = [each for each in ids if each]
    return Outgoing(party, *of, people, None, len(asked), asked, 0, message_bytes)
