"""Makes and answers the single calls outside a session. A party asks, before a run, whether the
server or the active party would accept a party that joins with given facts; reports that it has
failed before it joined, so that the other parties are told why it is missing; and exchanges the
heads of evidence logs with a peer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

import grpc
from google.protobuf.message import DecodeError

from vfl_common.bundle import CONTROL, PROTOCOL, Ledger
from vfl_common.errors import Code, InputError, PeerError, VflError
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.keyring import Keyring
from vfl_common.pb.vfl.v1 import control_pb2, exchange_pb2, failure_pb2
from vfl_common.rpc.channel import CallLimit, Context, connect, get_caller_name
from vfl_common.rpc.messages import Joining, from_failure, join_message, to_failure
from vfl_common.rpc.uplink import SERVICE

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


# The maximum number of concurrent calls of one party.
MAX_CONFERRING = 1
# The maximum size of a message, in bytes: two notes, a certificate chain and a proof.
MAX_HEADS_BYTES = 1 << 17
# The maximum number of hashes of a proof: a tree has at most 64 levels.
_MAX_PROOF = 2 * 64
# The maximum number of other parties' heads, and of proofs from them, in a message.
MAX_OTHER_HEADS = 16


@dataclass(frozen=True)
class LogHeads:
    """The head of a party's evidence log, and the head of the receiver's log that the party knows.
    See ``Heads`` in the schema for the fields.
    """

    note: str = ""
    certificates: bytes = b""
    held_origin: str = ""
    held_size: int = 0
    proof: tuple[bytes, ...] = ()
    cosigned: str = ""
    proof_signature: bytes = b""
    also: tuple[int, ...] = ()
    proofs: tuple[tuple[tuple[bytes, ...], bytes], ...] = ()

    def encode(self) -> bytes:
        """Returns the serialised message."""
        return exchange_pb2.Heads(
            note=self.note,
            certificates=self.certificates,
            held_origin=self.held_origin,
            held_size=self.held_size,
            proof=self.proof,
            cosigned=self.cosigned,
            proof_signature=self.proof_signature,
            also=self.also,
            proofs=[
                exchange_pb2.HeadProof(hashes=hashes, signature=signature)
                for hashes, signature in self.proofs
            ],
        ).SerializeToString()

    @classmethod
    def decode(cls, data: bytes, *, party: str, me: str) -> Self:
        """Reads a message of ``party``. Raises the error that the message contains, and PeerError
        if it cannot be read.
        """
        try:
            if len(data) > MAX_HEADS_BYTES:
                raise DecodeError
            heads = exchange_pb2.Heads.FromString(data)
        except DecodeError:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} sent bytes that are not a head of a record",
                party=party,
            ) from None
        if heads.HasField("failure"):
            raise from_failure(heads.failure, sender=party, me=me)
        longest = max(len(heads.proof), *(len(proof.hashes) for proof in heads.proofs), 0)
        if longest > _MAX_PROOF or max(len(heads.also), len(heads.proofs)) > MAX_OTHER_HEADS:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{party} sent more than {MAX_OTHER_HEADS} proofs, or one of more than "
                f"{_MAX_PROOF} hashes (got {len(heads.proofs)}, {longest})",
                party=party,
            )
        return cls(
            heads.note,
            heads.certificates,
            heads.held_origin,
            heads.held_size,
            tuple(heads.proof),
            heads.cosigned,
            heads.proof_signature,
            tuple(heads.also),
            tuple((tuple(proof.hashes), proof.signature) for proof in heads.proofs),
        )


AnswerHeads = Callable[[str, LogHeads], LogHeads]


def make_confer_method(
    keyring: Keyring, place: Callable[[str], None], ledger: Ledger, confer: AnswerHeads
) -> Callable[[Iterator[bytes], Context], Iterator[bytes]]:
    """Returns the gRPC method that answers with the result of ``confer`` for the caller's name and
    head, or with the error that ``confer`` raises.

    ``place``: raises PeerError if the caller may not call. Then nothing is read from the caller.
    """
    places = CallLimit(MAX_CONFERRING, "calls about records")

    def serve(messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
        name = ""
        try:
            name = get_caller_name(context, keyring)
            place(name)
            with places.hold(name):
                data = next(messages, b"")
                ledger.add(name, CONTROL, CONTROL, "received", 0, len(data))
                answer = confer(name, LogHeads.decode(data, party=name, me=keyring.name)).encode()
        except Exception as error:  # noqa: BLE001 - the peer gets only the public text
            answer = exchange_pb2.Heads(failure=to_failure(error)).SerializeToString()
        if name:
            ledger.add(name, CONTROL, CONTROL, "sent", 0, len(answer))
        yield answer

    return serve


# The time limit of each of three answers of the server. It is short, because a person waits for the
# error meanwhile.
_PATIENCE_S = 1.0
log = logging.getLogger(__name__)


def report_failure(
    address: str, keyring: Keyring, server: str, joining: Joining, error: Exception
) -> None:
    """Reports to the server why a party does not join. Only the error's code and public text are
    sent.

    Nothing is sent to a server of an older release, because it would end the run on such a message.
    Errors of the connection are only logged.

    Args:
        address: The address of the server.
        server: The name of the server.
        joining: The facts with which the party would join.
    """
    try:
        _send_failure(address, keyring, server, replace(joining, oldest=PROTOCOL), error)
    except (VflError, grpc.RpcError) as why:
        log.info(
            "%s could not be told why this party fails: %s", server, why, extra={"event": "untold"}
        )


def _send_failure(
    address: str, keyring: Keyring, server: str, joining: Joining, error: Exception
) -> None:
    if not ask(address, keyring.current(), server, SERVICE, joining, _PATIENCE_S):
        return
    channel = connect(address, keyring.current(), server, _PATIENCE_S)
    if isinstance(channel, VflError):
        raise channel
    message = control_pb2.PartyMessage(abort=to_failure(error))
    with channel:
        session = channel.stream_stream(f"/{SERVICE}/Session")
        # The loop waits until the server has ended the session.
        for _ in session(iter([message.SerializeToString()]), timeout=_PATIENCE_S):
            pass
