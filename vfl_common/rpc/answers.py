"""Reads what the server answers in a session, and why a session has ended. The server is not
trusted.
"""

from __future__ import annotations

import contextlib

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import AbortedError, Code, InterruptedRun, LostError, PeerError, VflError
from vfl_common.files import PLAIN_NAME
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.rpc.channel import MAX_MESSAGE_BYTES, split_address
from vfl_common.rpc.failures import from_failure, refusal
from vfl_common.rpc.messages import Start
from vfl_common.text import clean

# Of missing parties.
_MOST_NAMES = 1_000
# Characters of a reason that the server gives.
MOST_WORDS = 300


def checked_start(
    start: control_pb2.Start, *, server: str, me: str, oldest: int, newest: int
) -> Start:
    """Checks a Start, because a run id becomes a folder's name here.

    Args:
        oldest: the oldest protocol that this party can run the recipe with.
        newest: the one that it has offered.

    Raises:
        PeerError: MALFORMED_MESSAGE.
        InputError: ADDRESS_INVALID, for an exchange address that is not host:port.
    """
    named = start.run_id, start.checkpoint or "none", *start.left, *start.shown
    if not all(PLAIN_NAME.fullmatch(name) for name in named):
        text = f"{server} named a run, a checkpoint or a party with characters that names may not"
        text = f"{text} have"
        raise PeerError(Code.MALFORMED_MESSAGE, text, party=server)
    if start.exchange_address:
        split_address(start.exchange_address)
    # A server of the release before knows only one.
    protocol = start.protocol or newest
    if not oldest <= protocol <= newest:
        text = f"{server} starts the run in protocol {protocol}, and {me} joined with {newest}"
        raise PeerError(Code.MALFORMED_MESSAGE, text, party=server)
    return Start(
        start.run_id,
        start.generation,
        start.checkpoint,
        start.exchange_address,
        tuple(start.left),
        returning=start.returning,
        protocol=protocol,
        anew=clean(start.anew, MOST_WORDS),
        shown=dict(start.shown),
    )


def missing_of(waiting: control_pb2.Waiting) -> list[str]:
    """Returns for whom the run waits."""
    return [clean(name, 64) for name in waiting.missing[:_MOST_NAMES]]


def refusals_of(waiting: control_pb2.Waiting) -> str:
    """Says why parties that the run waits for were refused; '' if it knows of no refusal. The words
    are this program's.
    """
    found = []
    for failure in waiting.refused[:_MOST_NAMES]:
        # A code of a later release.
        with contextlib.suppress(ValueError):
            found.append(refusal(clean(failure.party, 64), Code(failure.code)))
    return "; ".join(found)


def interruption(interrupt: control_pb2.Interrupt) -> InterruptedRun:
    """Returns the error with which the server ends a generation."""
    return InterruptedRun(clean(interrupt.reason or f"{', '.join(interrupt.lost)} was lost"))


def stopped(stop: failure_pb2.Failure, *, server: str, me: str) -> VflError:
    """Returns the error with which the server ends the run."""
    error = from_failure(stop, sender=server, me=me)
    # A stop ends the run, whatever its code is.
    return AbortedError(str(error)) if isinstance(error, InterruptedRun) else error


def why_broken(error: Exception, server: str) -> VflError | None:
    """Returns what broke a session, if opening it again does not help; else None."""
    if isinstance(error, PeerError):
        return error
    if isinstance(error, DecodeError):
        text = f"{server} sent bytes that are not a control message"
        return PeerError(Code.MALFORMED_MESSAGE, text)
    if not isinstance(error, grpc.Call):
        return None
    if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED):
        return LostError(Code.PARTY_LOST, f"{server} refused the session: {error.details()}")
    # The channel refuses it; so it would again.
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        text = f"{server} sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB"
        return PeerError(Code.MALFORMED_MESSAGE, text, party=server)
    return None
