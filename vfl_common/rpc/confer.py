"""Exchanges the heads of two parties' evidence logs: the messages and the answering side."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from google.protobuf.message import DecodeError

from vfl_common.errors import Code, PeerError
from vfl_common.identity.keyring import Keyring
from vfl_common.ledger import CONTROL, Ledger
from vfl_common.pb.vfl.v1 import exchange_pb2
from vfl_common.rpc.channel import CallLimit, Context, get_caller_name
from vfl_common.rpc.failures import from_failure, to_failure

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
