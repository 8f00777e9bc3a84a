"""Converts errors to failure messages and back. Only ``error.public`` is sent, so that peers see no
private text.
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
    """Returns the failure message with the public part of ``error``. An exception that is not a
    VflError becomes INTERNAL, without its text.
    """
    if not isinstance(error, VflError):
        return failure_pb2.Failure(code=Code.INTERNAL, message=CATALOGUE[Code.INTERNAL].public)  # type: ignore[arg-type]
    # The text may quote a peer, with characters that a message cannot hold.
    text = clean(error.public, LINE)
    return failure_pb2.Failure(code=int(error.code), message=text, party=error.party)  # type: ignore[arg-type]


def format_refusal(party: str, code: Code) -> str:
    """Returns a sentence for the other parties that says why a party does not join, without private
    values.
    """
    meaning = CATALOGUE[code]
    reason = meaning.public.replace("a file of the party", "one of its files")
    reason = reason.replace("the party's", "its").replace("the party ", "it ")
    return f"{party} {'cannot take part' if meaning.own else 'was refused'}: {reason}"


def from_failure(failure: failure_pb2.Failure, *, sender: str, me: str) -> VflError:
    """Returns the error that a received failure raises in this process. ``me``: this party's name.

    A failure that names this party, or no party, keeps its code and so its exit code. A failure
    that names another party becomes an AbortedError. If a failure with an ``own`` code names no
    party, it is about its sender. An unknown code, from a later release, becomes INTERNAL with the
    same text.
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
