"""Reads the server's answers in a session and the reason for its end. The server is not trusted."""

from __future__ import annotations

import contextlib

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import AbortedError, Code, InterruptedRun, LostError, PeerError, VflError
from vfl_common.files import PLAIN_NAME
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.rpc.channel import MAX_MESSAGE_BYTES, split_address
from vfl_common.rpc.failures import format_refusal, from_failure
from vfl_common.rpc.messages import Start
from vfl_common.text import clean

# The maximum number of names of missing parties that are read.
_MAX_NAMES = 1_000
# The maximum length of a reason that the server gives.
MAX_REASON_CHARS = 300


def check_start(
    start: control_pb2.Start, *, server: str, me: str, oldest: int, newest: int
) -> Start:
    """Checks the server's message Start. For example, the run id must be safe as the name of a
    folder.

    Args:
        oldest: The oldest protocol with which this party can run the recipe.
        newest: The protocol that this party has offered.

    Raises:
        PeerError: MALFORMED_MESSAGE, if the message is not valid.
        InputError: ADDRESS_INVALID, if the exchange address is not host:port.
    """
    names = start.run_id, start.checkpoint or "none", *start.left, *start.shown
    if not all(PLAIN_NAME.fullmatch(name) for name in names):
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{server} sent the name of a run, a checkpoint or a party with invalid characters",
            party=server,
        )
    if start.exchange_address:
        split_address(start.exchange_address)
    # A server of the previous release does not send a protocol.
    protocol = start.protocol or newest
    if not oldest <= protocol <= newest:
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{server} starts the run with protocol {protocol}, and {me} joined with {newest}",
            party=server,
        )
    return Start(
        start.run_id,
        start.generation,
        start.checkpoint,
        start.exchange_address,
        tuple(start.left),
        returning=start.returning,
        protocol=protocol,
        anew=clean(start.anew, MAX_REASON_CHARS),
        shown=dict(start.shown),
    )


def read_missing(waiting: control_pb2.Waiting) -> list[str]:
    """Returns the names of the parties for which the run waits."""
    return [clean(name, 64) for name in waiting.missing[:_MAX_NAMES]]


def format_refusals(waiting: control_pb2.Waiting) -> str:
    """Returns the reasons why missing parties were refused, in this program's words; '' if the
    server reports no refusal.
    """
    reasons = []
    for failure in waiting.refused[:_MAX_NAMES]:
        # A code of a later release is ignored.
        with contextlib.suppress(ValueError):
            reasons.append(format_refusal(clean(failure.party, 64), Code(failure.code)))
    return "; ".join(reasons)


def make_interruption(interrupt: control_pb2.Interrupt) -> InterruptedRun:
    """Returns the error with which the server ends a generation."""
    return InterruptedRun(clean(interrupt.reason or f"{', '.join(interrupt.lost)} was lost"))


def make_stop_error(stop: failure_pb2.Failure, *, server: str, me: str) -> VflError:
    """Returns the error with which the server ends the run."""
    error = from_failure(stop, sender=server, me=me)
    # A stop ends the run, even if its code is that of an interruption.
    return AbortedError(str(error)) if isinstance(error, InterruptedRun) else error


def explain_end(error: Exception, server: str) -> VflError | None:
    """Returns the error for a session that ended and cannot be reopened; None if the session may be
    opened again.
    """
    if isinstance(error, PeerError):
        return error
    if isinstance(error, DecodeError):
        return PeerError(
            Code.MALFORMED_MESSAGE, f"{server} sent bytes that are not a control message"
        )
    if not isinstance(error, grpc.Call):
        return None
    if error.code() in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.PERMISSION_DENIED):
        return LostError(Code.PARTY_LOST, f"{server} refused the session: {error.details()}")
    # The channel refuses too large messages, so it would refuse this message again.
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return PeerError(
            Code.MALFORMED_MESSAGE,
            f"{server} sent a message of more than {MAX_MESSAGE_BYTES >> 20} MiB",
            party=server,
        )
    return None
