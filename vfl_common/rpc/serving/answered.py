"""What a passive party is asked, its answer, and their way over the wire."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.text import clean

# The two states of an id in an answer. A party that does not answer for an id does not tell the
# reason: a reason would tell the active party that the id is known.
NOT_ANSWERED, EMBEDDED = 0, 1
# A party of an older release sends 0 for an unknown id, 2 for a refusal, 3 for unusable features.
_STATES = frozenset(range(4))
_READ = bytes(EMBEDDED if each == EMBEDDED else NOT_ANSWERED for each in range(256))
# States of an id that exist at the active party alone, and never cross the wire.
LATE, FAILED, UNKNOWN = 4, 5, 6
FLOAT_BYTES = 4
_LONGEST_VERSION = 64
# Embeddings are kept no longer.
_LONGEST_S = 100_000.0


@dataclass(frozen=True)
class Step:
    """A question of a scoring that takes several: see ``vfl_party.phases.online``.

    Args:
        asked: what the method asks about each id, in its own form.
        first: the number of the scoring's first question; 0, for the asking side: this is the
            first.
        begins: whether this is the first.
        size: bytes that the answer must have; the asking side alone knows it.
    """

    asked: bytes
    first: int = 0
    begins: bool = True
    size: int = 0


@dataclass(frozen=True)
class Answered:
    """A passive party's answer to a question about ids.

    Args:
        state: a byte for each id: one of those above.
        embeddings: float32, little-endian, of the embedded ids, one after the other, [N, D].
        features: names the state of the party's features.
        answered: to a step, in the method's own form; there are no embeddings then.
        ids: those of which it tells numbers, for the party's own record; they are not sent.
        times: how often it tells of each; None: once.
    """

    state: bytes
    embeddings: bytes = b""
    features: str = ""
    answered: bytes = b""
    ids: Sequence[str] = ()
    times: Sequence[int] | None = None


@dataclass(frozen=True)
class Outgoing:
    """A question or an answer that is about to leave, for the party's own record.

    Args:
        to: the receiver.
        phase, kind: as the ledger counts it.
        scoring, place: the number of the scoring's first question, and how many questions come
            between it and this one.
        ids: those of which it tells.
        times: how often it tells of each; None: once.
        numbers: of which it consists.
        content: these numbers.
        payload_bytes, message_bytes: as the ledger counts them.
        asked: of an answer, the number of ids in the question, answered or not.
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


class UntoldError(Exception):
    """What a party has about ids may not leave, or could not be made. The party then answers as if
    it knew none of the ids: a failure would tell the active party that one of them is known.
    """


class _Untold:
    """Raises UntoldError in place of any other error of its block."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, Exception):
            raise UntoldError(str(error)) from error


# A class, and one object for all, because it is entered for each question.
untold = _Untold()


# Writes what is about to leave. It may raise VflError; nothing leaves then.
Writes = Callable[[Outgoing], None]


@dataclass(frozen=True)
class Keeping:
    """What the active party may do with a passive party's embeddings.

    Args:
        seconds: for how long it may use one again; 0: not at all.
        features: the state of the party's features, as in ``Answered``; others are not used again.
    """

    seconds: float = 0.0
    features: str = ""


def read_keeping(present: serving_pb2.Present) -> Keeping:
    """Returns what a party that is present allows."""
    said = present.keeping
    # A number that is none allows nothing.
    seconds = said.seconds if 0.0 < said.seconds < _LONGEST_S else 0.0
    return Keeping(seconds, clean(said.features, _LONGEST_VERSION))


def read_answer(
    answer: serving_pb2.Answer, ids: Sequence[str], width: int, party: str, step: Step | None = None
) -> Answered:
    """Returns an answer, if it is one to a question about ``ids``. Raises PeerError.

    ``width``: of the party's embeddings. ``step``: what was asked instead of embeddings.
    """
    state, found, answered = (bytes(x) for x in (answer.state, answer.embeddings, answer.answered))
    if len(state) != len(ids) or not _STATES.issuperset(state):
        raise _wrong(party, f"says something else than a state for each of {len(ids)} ids")
    wanted = state.count(EMBEDDED) * width * FLOAT_BYTES if step is None else 0
    if len(found) != wanted:
        text = f"sends {len(found):,} bytes of embeddings, and {wanted:,} are wanted"
        raise _wrong(party, text)
    size = step.size if step is not None else 0
    if len(answered) != size:
        text = f"sends {len(answered):,} bytes for a step, and {size:,} are wanted"
        raise _wrong(party, text)
    read = state.translate(_READ)
    return Answered(read, found, clean(answer.features, _LONGEST_VERSION), answered)


def _wrong(party: str, what: str) -> PeerError:
    return PeerError(Code.MALFORMED_MESSAGE, f"{party} {what}", party=party)
