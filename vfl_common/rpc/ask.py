"""A question before a run: would the server, or the active party, take a party that says this when
it joins?
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import grpc
from google.protobuf.message import DecodeError

from vfl_common.errors import Code, InputError, PeerError, VflError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import control_pb2, failure_pb2
from vfl_common.rpc.channel import Context, Places, caller, connect
from vfl_common.rpc.failures import from_failure, to_failure
from vfl_common.rpc.messages import Joining, join_message

# Of each party at once.
MAX_QUESTIONS = 2


def answering(
    keyring: Keyring, place: Callable[[str], None], judge: Callable[[str, control_pb2.Join], None]
) -> Callable[[Iterator[bytes], Context], Iterator[bytes]]:
    """Makes the answering side: an empty failure, or the error that ``judge`` raises of the
    caller's name and words.

    ``place``: raises PeerError if the caller may not ask. Then nothing is read of it.
    """
    places = Places(MAX_QUESTIONS, "questions")

    def answer(questions: Iterator[bytes], context: Context) -> Iterator[bytes]:
        try:
            name = caller(context, keyring)
            place(name)
            with places.taken(name):
                judge(name, _question(next(questions, b""), name))
        except Exception as error:  # noqa: BLE001 - the peer gets only the public text
            yield to_failure(error).SerializeToString()
        else:
            yield b""

    return answer


def _question(data: bytes, name: str) -> control_pb2.Join:
    try:
        return control_pb2.Join.FromString(data)
    except DecodeError:
        raise PeerError(
            Code.MALFORMED_MESSAGE, f"{name} sent bytes that are no question", party=name
        ) from None


def ask(
    address: str,
    credentials: Credentials,
    peer: str,
    service: str,
    joining: Joining,
    timeout_s: float,
) -> bool:
    """Asks ``peer`` whether a party that says what ``joining`` does would be taken; the peer keeps
    nothing of it.

    Returns False if the peer does not answer such questions: it is of an older release.

    Raises InputError, PeerError: the peer cannot be reached, or would refuse the party.
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
            text = f"{peer} sent bytes that are no answer"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=peer) from None
        except grpc.RpcError as error:
            if isinstance(error, grpc.Call) and error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return False
            why = error.code().name if isinstance(error, grpc.Call) else type(error).__name__
            text = (
                f"{peer} at {address} does not say whether it would take {credentials.name} ({why})"
            )
            raise InputError(Code.UNREACHABLE, text) from None
    if failure.code:
        raise from_failure(failure, sender=peer, me=credentials.name)
    return True
