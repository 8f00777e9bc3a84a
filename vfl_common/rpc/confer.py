"""Shows the active party the head of a party's record, and takes the active party's: the messages,
and the answering side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Self

from google.protobuf.message import DecodeError

from vfl_common.errors import Code, PeerError
from vfl_common.identity.keyring import Keyring
from vfl_common.ledger import CONTROL, Ledger
from vfl_common.pb.vfl.v1 import exchange_pb2
from vfl_common.rpc.channel import Context, Places, caller
from vfl_common.rpc.failures import from_failure, to_failure

# Of each party at once.
MAX_CONFERRING = 1
# Of a message, in bytes: two notes, a chain of certificates, and a proof.
MOST_BYTES = 1 << 17
# A tree has no more levels.
MOST_PROOF = 2 * 64
# Of a message: heads that other parties hold, and proofs from them.
MOST_ALSO = 16


@dataclass(frozen=True)
class ShownHead:
    """What a party shows of its record, and says of the receiver's; see ``Heads`` in the schema."""

    note: str = ""
    certificates: bytes = b""
    held_origin: str = ""
    held_size: int = 0
    proof: tuple[bytes, ...] = ()
    cosigned: str = ""
    proof_signature: bytes = b""
    also: tuple[int, ...] = ()
    proofs: tuple[tuple[tuple[bytes, ...], bytes], ...] = ()

    def encoded(self) -> bytes:
        """Returns the message."""
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
    def decoded(cls, data: bytes, *, party: str, me: str) -> Self:
        """Reads a message of ``party``. Raises the error that it holds, PeerError if it is none."""
        try:
            if len(data) > MOST_BYTES:
                raise DecodeError
            found = exchange_pb2.Heads.FromString(data)
        except DecodeError:
            text = f"{party} sent bytes that are no head of a record"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=party) from None
        if found.HasField("failure"):
            raise from_failure(found.failure, sender=party, me=me)
        most = max(len(found.proof), *(len(each.hashes) for each in found.proofs), 0)
        if most > MOST_PROOF or max(len(found.also), len(found.proofs)) > MOST_ALSO:
            text = f"{party} sent {len(found.proofs)} proofs of up to {most} hashes"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=party)
        return cls(
            found.note,
            found.certificates,
            found.held_origin,
            found.held_size,
            tuple(found.proof),
            found.cosigned,
            found.proof_signature,
            tuple(found.also),
            tuple((tuple(each.hashes), each.signature) for each in found.proofs),
        )


Conferring = Callable[[str, ShownHead], ShownHead]


def conferring(
    keyring: Keyring, place: Callable[[str], None], ledger: Ledger, confer: Conferring
) -> Callable[[Iterator[bytes], Context], Iterator[bytes]]:
    """Makes the answering side: what ``confer`` returns for the caller's name and what it shows, or
    the error that it raises.

    ``place``: raises PeerError if the caller may not ask. Then nothing is read of it.
    """
    places = Places(MAX_CONFERRING, "calls about records")

    def answer(messages: Iterator[bytes], context: Context) -> Iterator[bytes]:
        name = ""
        try:
            name = caller(context, keyring)
            place(name)
            with places.taken(name):
                data = next(messages, b"")
                ledger.add(name, CONTROL, CONTROL, "received", 0, len(data))
                answered = confer(
                    name, ShownHead.decoded(data, party=name, me=keyring.name)
                ).encoded()
        except Exception as error:  # noqa: BLE001 - the peer gets only the public text
            answered = exchange_pb2.Heads(failure=to_failure(error)).SerializeToString()
        if name:
            ledger.add(name, CONTROL, CONTROL, "sent", 0, len(answered))
        yield answered

    return answer
