"""Asks, before a run, whether the server or the active party would accept a party that joins with
given facts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import Code, InputError, PeerError, VflError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.rpc.channel import CallLimit, Context, connect, get_caller_name
from vfl_common.rpc.failures import from_failure, to_failure
from vfl_common.rpc.messages import Joining, join_message

# The maximum number of concurrent questions of one party.
MAX_QUESTIONS = 2


def make_ask_method(
    keyring: Keyring, place: Callable[[str], None], judge: Callable[[str, control_pb2.Join], None]
) -> Callable[[Iterator[bytes], Context], Iterator[bytes]]:
    """Returns the gRPC method that answers such questions: with an empty failure, or with the error
    that ``judge`` raises for the caller's name and facts.

    ``place``: raises PeerError if the caller may not ask. Then nothing is read from the caller.
    """
    places = CallLimit(MAX_QUESTIONS, "questions")

    def answer(questions: Iterator[bytes], context: Context) -> Iterator[bytes]:
        try:
            name = get_caller_name(context, keyring)
            place(name)
            with places.hold(name):
                judge(name, _parse_question(next(questions, b""), name))
        except Exception as error:  # noqa: BLE001 - the peer gets only the public text
            yield to_failure(error).SerializeToString()
        else:
            yield b""

    return answer


def _parse_question(data: bytes, name: str) -> control_pb2.Join:
    try:
        return control_pb2.Join.FromString(data)
    except DecodeError:
        raise PeerError(
            Code.MALFORMED_MESSAGE, f"{name} sent bytes that are not a question", party=name
        ) from None


def ask(
    address: str,
    credentials: Credentials,
    peer: str,
    service: str,
    joining: Joining,
    timeout_s: float,
) -> bool:
    """Asks ``peer`` whether it accepts a party with the facts ``joining``; the peer stores nothing.

    Returns False if the peer is of an older release that does not answer such questions.

    Raises InputError if the peer cannot be reached, and PeerError if it refuses the party.
    """
    channel = connect(address, credentials, peer, timeout_s)
    if isinstance(channel, VflError):
        raise channel
    with channel:
        question = join_message(joining).join.SerializeToString()
        try:
            data = channel.unary_unary(f"/{service}/Ask")(question, timeout=timeout_s)
            failure = failure_pb2.Failure.FromString(data)
        except DecodeError:
            raise PeerError(
                Code.MALFORMED_MESSAGE, f"{peer} sent bytes that are not an answer", party=peer
            ) from None
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            reason = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            raise InputError(
                Code.UNREACHABLE,
                f"{peer} at {address} does not say whether it accepts {credentials.name} "
                f"({reason}). Check that it runs, and try again.",
            ) from None
    if failure.code:
        raise from_failure(failure, sender=peer, me=credentials.name)
    return True
