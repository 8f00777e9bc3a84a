"""Translates errors to failures and back. Only ``error.public`` crosses: the translator is a
privacy control.
"""

from __future__ import annotations

from vfl_common.errors import (
    CATALOGUE,
    AbortedError,
    Code,
    InterruptedRun,
    LostError,
    PeerError,
    VflError,
)
from vfl_common.pb.vfl.v1 import failure_pb2
from vfl_common.text import LINE, clean


def to_failure(error: BaseException) -> failure_pb2.Failure:
    """Returns what a peer may read about ``error``; an error that is not ours becomes INTERNAL,
    without its text.
    """
    if not isinstance(error, VflError):
        return failure_pb2.Failure(code=Code.INTERNAL, message=CATALOGUE[Code.INTERNAL].public)  # type: ignore[arg-type]
    # It may quote a peer, in characters that no message can hold.
    text = clean(error.public, LINE)
    return failure_pb2.Failure(code=int(error.code), message=text, party=error.party)  # type: ignore[arg-type]


def refusal(party: str, code: Code) -> str:
    """Says to the others why a party does not join: a sentence of this program's, without
    values.
    """
    meaning = CATALOGUE[code]
    reason = meaning.public.replace("a file of the party", "one of its files")
    reason = reason.replace("the party's", "its").replace("the party ", "it ")
    return f"{party} {'cannot take part' if meaning.own else 'was refused'}: {reason}"


def from_failure(failure: failure_pb2.Failure, *, sender: str, me: str) -> VflError:
    """Returns the error that a received failure means for this process, ``me``.

    A failure about this party keeps its code (and so its exit code), and so does one about all
    parties, which names none. One about another party becomes an AbortedError. If a failure with an
    ``own`` code names no party, it is about its sender.
    """
    try:
        code = Code(failure.code)
    except ValueError:
        code = Code.INTERNAL
    text = clean(failure.message) or CATALOGUE[code].public
    if code is Code.INTERRUPTED:
        return InterruptedRun(text)
    if code in (Code.PARTY_LOST, Code.STEP_TIMEOUT):
        return LostError(code, text, party=failure.party).privately(
            f"{sender} stopped the run: {text}"
        )
    party = failure.party or (sender if CATALOGUE[code].own else "")
    if party not in ("", me):
        about = f" because of {clean(party, 64)}" if party != sender else ""
        return AbortedError(f"{sender} stopped the run{about}: {text}", party=party)
    return PeerError(code, text, party=failure.party).privately(f"{sender} refused: {text}")
