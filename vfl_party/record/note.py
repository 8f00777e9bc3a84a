"""Heads of records as signed notes, in the formats of C2SP: tlog-checkpoint, signed-note and
tlog-cosignature.

A note is four lines (whose record it is, how many lines it has, the root of their tree in base64,
and when that was), a blank line, and a line for each signature. Keys are those of the parties'
certificates: ECDSA has the identifier that C2SP gives it (0x02); RSA-PSS, which has none there, a
long one of ours (0xff).

The owner of a record signs these four lines, and everybody, the owner too, signs a cosignature:
``cosignature/v1``, the time, and the four lines. C2SP defines no cosignature for these keys, so
their identifiers are long ones of ours. A cosignature under a head of another party's record is
therefore never the signature of a record's owner. Versions before this one signed the four lines of
whatever head a peer showed them, so a signature without a cosignature is no evidence.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import time
from dataclasses import dataclass
from hashlib import sha256
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import is_signature_of, sign
from vfl_common.text import to_json
from vfl_party.record.tree import HASH_BYTES

_RSA = b"\xffvfl RSA-PSS SHA-256"
_COSIGNATURE = b"\xffvfl cosignature/v1 SHA-256"
_TIME_BYTES = 8
_ID_BYTES = 4
# The most characters of a note; and its largest number, as in the messages between parties.
MAX_CHARACTERS = 16_384
_MAX_NUMBER = 2**63 - 1
MAX_SIGNATURES = 16
_BEFORE = "\N{EM DASH} "
_ORIGIN = re.compile(r"[!-~]{1,200}")


@dataclass(frozen=True)
class RecordHead:
    """The state of a record: its name, how many lines it has, the root of their tree, 32 bytes, and
    when that was, in seconds since 1970.
    """

    origin: str
    size: int
    root: bytes
    at: int = 0

    @property
    def owner(self) -> str:
        """The party whose record this is; '' if the name of the record is not of our form."""
        begin, _, rest = self.origin.partition("/")
        party, _, identity = rest.partition("/")
        return party if begin == "vfl-record" and identity else ""

    @property
    def text(self) -> str:
        """The lines that the owner of the record signs."""
        root = base64.b64encode(self.root).decode()
        return f"{self.origin}\n{self.size}\n{root}\nat {self.at}\n"

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads ``text``. Raises ValueError if it is not a head."""
        origin, size, root, at, *rest = text.split("\n")
        when = int(at.removeprefix("at "))
        head = cls(origin, int(size), base64.b64decode(root, validate=True), when)
        numbers = 0 <= head.size <= _MAX_NUMBER and abs(head.at) <= _MAX_NUMBER
        if rest != [""] or head.text != text or not _ORIGIN.fullmatch(origin) or not numbers:
            raise ValueError(text)
        if len(head.root) != HASH_BYTES:
            raise ValueError(root)
        return head


@dataclass(frozen=True)
class SignedNote:
    """A head with signatures: {(signer's name, identifier of its key): signature}."""

    head: RecordHead
    signatures: tuple[tuple[str, bytes, bytes], ...] = ()

    def __str__(self) -> str:
        lines = [_line(*signature) for signature in self.signatures]
        return f"{self.head.text}\n{''.join(lines)}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads what ``str`` returns. Raises ValueError if it is not a note."""
        if len(text) > MAX_CHARACTERS:
            raise ValueError("too long")
        body, blank, rest = text.rpartition("\n\n")
        lines = rest.splitlines(keepends=True)
        if not blank or len(lines) > MAX_SIGNATURES:
            raise ValueError(text)
        return cls(RecordHead.read(f"{body}\n"), tuple(_signature(line) for line in lines))

    def sign(self, credentials: Credentials, *, older: bool = False) -> SignedNote:
        """Adds the cosignature of the party of ``credentials``, and its signature as the owner to a
        head of its own record. Raises InputError if its key is neither ECDSA nor RSA.

        ``older``: the reader's version knows no cosignatures, so the head itself is signed too.
        """
        name, certificate = credentials.name, credentials.certificate
        at, head = int(time.time()), self.head.text
        signature = at.to_bytes(_TIME_BYTES, "big") + sign(
            credentials, _cosignature_message(at, head)
        )
        own = [(name, cosigner_id(name, certificate), signature)]
        if older or self.head.owner == name:
            own.insert(0, (name, key_id(name, certificate), sign(credentials, head.encode())))
        return SignedNote(
            self.head, (*(other for other in self.signatures if other[0] != name), *own)
        )

    def with_those_of(self, other: SignedNote) -> SignedNote:
        """Adds the signatures of another copy of the note."""
        new = [signature for signature in other.signatures if signature not in self.signatures]
        return SignedNote(self.head, (*self.signatures, *new))

    def select_signatures(self, name: str, certificate: x509.Certificate) -> SignedNote:
        """Returns the note with the signatures of the key of a certificate in this name: one over
        the head and one cosignature at most; with none, if it has signed neither.
        """
        good: dict[bytes, tuple[str, bytes, bytes]] = {}
        for signer, key, signature in self.signatures:
            message = self._message_of(name, certificate, key, signature)
            if signer != name or key in good or message is None:
                continue
            if is_signature_of(certificate, message[0], message[1]):
                good[key] = signer, key, signature
        return SignedNote(self.head, tuple(good.values()))

    def _message_of(
        self, name: str, certificate: x509.Certificate, key: bytes, signature: bytes
    ) -> tuple[bytes, bytes] | None:
        """Returns what a signature is over, and its bytes; None if it has another key."""
        if key == key_id(name, certificate):
            return self.head.text.encode(), signature
        if key != cosigner_id(name, certificate):
            return None
        at = int.from_bytes(signature[:_TIME_BYTES], "big")
        return _cosignature_message(at, self.head.text), signature[_TIME_BYTES:]

    def is_signed_by(self, name: str, certificate: x509.Certificate) -> bool:
        """Whether the key of a certificate has signed or cosigned the head in this name."""
        return bool(self.select_signatures(name, certificate).signatures)

    def is_cosigned_by(self, name: str, certificate: x509.Certificate) -> bool:
        """Whether the key of a certificate has cosigned the head in this name."""
        wanted = cosigner_id(name, certificate)
        return any(
            key == wanted for _, key, _ in self.select_signatures(name, certificate).signatures
        )


@dataclass(frozen=True)
class StoredHead:
    """A head of a record as it is kept: the note with its signatures, {signer: its certificates},
    and when.
    """

    note: SignedNote
    certificates: dict[str, str]
    at: float = 0.0

    @property
    def line(self) -> str:
        """The head on one line of JSON."""
        fields = {"at": self.at, "note": str(self.note), "certificates": self.certificates}
        return to_json(fields)

    @classmethod
    def read(cls, text: str) -> StoredHead:
        """Reads ``line``. Raises ValueError if it is none."""
        try:
            fields = json.loads(text)
            certificates, at = dict(fields["certificates"]), float(fields["at"])
            if not all(isinstance(certificate, str) for certificate in certificates.values()):
                raise ValueError(text)
            return cls(SignedNote.read(fields["note"]), certificates, at)
        except (KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError(text) from None


def key_id(name: str, certificate: x509.Certificate) -> bytes:
    """Returns the identifier of a certificate's key in notes, 4 bytes."""
    spki = _spki(certificate)
    if isinstance(certificate.public_key(), rsa.RSAPublicKey):
        spki = name.encode() + b"\n" + _RSA + spki
    return sha256(spki).digest()[:_ID_BYTES]


def cosigner_id(name: str, certificate: x509.Certificate) -> bytes:
    """Returns the identifier of a certificate's key in cosignatures, 4 bytes."""
    message = name.encode() + b"\n" + _COSIGNATURE + _spki(certificate)
    return sha256(message).digest()[:_ID_BYTES]


def _spki(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _cosignature_message(at: int, head: str) -> bytes:
    """Returns the message of a cosignature (C2SP tlog-cosignature)."""
    return f"cosignature/v1\ntime {at}\n{head}".encode()


def _line(name: str, key: bytes, signature: bytes) -> str:
    return f"{_BEFORE}{name} {base64.b64encode(key + signature).decode()}\n"


def _signature(line: str) -> tuple[str, bytes, bytes]:
    name, _, encoded = line.removeprefix(_BEFORE).removesuffix("\n").partition(" ")
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ValueError(line) from None
    signature = name, data[:_ID_BYTES], data[_ID_BYTES:]
    if _line(*signature) != line or not signature[2]:
        raise ValueError(line)
    return signature
