"""The questions to a passive party of a served model, its answers, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.text import clean

# The two states of an id in an answer. A party that does not answer for an id gives no reason,
# because a reason reveals that it knows the id.
NOT_ANSWERED, EMBEDDED = 0, 1
# A party of an older release sends 0 for an unknown id, 2 for a refusal, 3 for unusable features.
_STATES = frozenset(range(4))
_READ = bytes(EMBEDDED if state == EMBEDDED else NOT_ANSWERED for state in range(256))
# States of an id that only the active party uses, and that are never sent.
LATE, FAILED, UNKNOWN = 4, 5, 6
FLOAT_BYTES = 4
_LONGEST_VERSION = 64
# The longest time, in seconds, for which embeddings are kept.
_LONGEST_S = 100_000.0


@dataclass(frozen=True)
class Step:
    """A question of a scoring that takes several questions: see ``vfl_party.phases.online``.

    Args:
        asked: the method's question about each id, in the method's encoding.
        first: the number of the scoring's first question; at the asking side 0 for the first.
        begins: whether this is the first question.
        size: the bytes that the answer must have; only the asking side knows it.
    """

    asked: bytes
    first: int = 0
    begins: bool = True
    size: int = 0


@dataclass(frozen=True)
class ServingAnswer:
    """A passive party's answer to a question about ids.

    Args:
        state: a byte per id, one of the states above.
        embeddings: those of the embedded ids, [N, D] float32, little-endian.
        features: identifies the version of the party's features.
        answered: the answer to a step, in the method's encoding, instead of embeddings.
        ids: those about which the answer has numbers, for the party's own record; not sent.
        times: how often the answer is about each id; None: once.
    """

    state: bytes
    embeddings: bytes = b""
    features: str = ""
    answered: bytes = b""
    ids: Sequence[str] = ()
    times: Sequence[int] | None = None


@dataclass(frozen=True)
class OutgoingMessage:
    """A question or an answer before it is sent, for the party's own record.

    Args:
        to: the receiver.
        phase, kind: those in the ledger.
        scoring, place: the number of the scoring's first question, and the count of questions from
            that one to this one.
        ids: those that the message is about.
        times: how often it is about each id; None: once.
        numbers: the count of numbers in it.
        content: these numbers, as bytes.
        payload_bytes, message_bytes: as the ledger counts them.
        asked: the number of ids in the question, answered or not; 0 for a question.
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
    """An answer about ids may not leave, or could not be computed. The party then answers as if it
    knew none of the ids, because a failure reveals that it knows one of them.
    """


class _Untold:
    """Turns any error of its block into an UntoldError."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            raise WithheldError(str(error)) from error


# One object of a class for all blocks, because it is entered for each question, and this is fast.
withholding = _Untold()


# Records a message before it is sent. If it raises VflError, the message is not sent.
RecordMessage = Callable[[OutgoingMessage], None]


@dataclass(frozen=True)
class CachePolicy:
    """How the active party may keep a passive party's embeddings.

    Args:
        seconds: how long it may use one again; 0: not at all.
        features: the version of the party's features, as in ``ServingAnswer``; embeddings of other
            versions are not used again.
    """

    seconds: float = 0.0
    features: str = ""


def read_keeping(present: serving_pb2.Present) -> CachePolicy:
    """Returns how a party allows its embeddings to be kept."""
    keeping = present.keeping
    # NaN or a number out of range allows nothing.
    seconds = keeping.seconds if 0.0 < keeping.seconds < _LONGEST_S else 0.0
    return CachePolicy(seconds, clean(keeping.features, _LONGEST_VERSION))


def read_answer(
    answer: serving_pb2.Answer, ids: Sequence[str], width: int, party: str, step: Step | None = None
) -> ServingAnswer:
    """Reads the answer of ``party`` to a question about ``ids``. Raises PeerError if it is invalid.

    ``width``: that of the party's embeddings. ``step``: the question instead of embeddings.
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
    features = clean(answer.features, _LONGEST_VERSION)
    return ServingAnswer(state.translate(_READ), embeddings, features, answered)
