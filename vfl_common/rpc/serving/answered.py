"""The questions to a passive party of a served model, the party's answers, and their messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

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
