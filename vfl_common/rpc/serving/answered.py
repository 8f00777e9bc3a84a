"""A passive party's answer to a question, and its way over the wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vfl_common.errors import Code, PeerError
from vfl_common.pb.vfl.v1 import serving_pb2
from vfl_common.text import clean

# Of one id.
UNKNOWN, EMBEDDED, REFUSED = 0, 1, 2
_STATES = frozenset((UNKNOWN, EMBEDDED, REFUSED))
_FLOAT = 4
_LONGEST_VERSION = 64


@dataclass(frozen=True)
class Answered:
    """What a passive party knows of the ids of a question.

    Args:
        state: a byte for each id: ``UNKNOWN``, ``EMBEDDED`` or ``REFUSED``.
        embeddings: float32, little-endian, of the embedded ids, one after the other, [N, D].
        features: names the state of the party's features.
    """

    state: bytes
    embeddings: bytes = b""
    features: str = ""


def read_answer(answer: serving_pb2.Answer, ids: Sequence[str], width: int, party: str) -> Answered:
    """Returns an answer, if it is one to a question about ``ids``. Raises PeerError.

    ``width``: of the party's embeddings.
    """
    state, found = bytes(answer.state), bytes(answer.embeddings)
    if len(state) != len(ids) or not _STATES.issuperset(state):
        raise _wrong(party, f"says something else than a state for each of {len(ids)} ids")
    wanted = state.count(EMBEDDED) * width * _FLOAT
    if len(found) != wanted:
        text = f"sends {len(found):,} bytes of embeddings, and {wanted:,} are wanted"
        raise _wrong(party, text)
    return Answered(state, found, clean(answer.features, _LONGEST_VERSION))


def _wrong(party: str, what: str) -> PeerError:
    return PeerError(Code.MALFORMED_MESSAGE, f"{party} {what}", party=party)
