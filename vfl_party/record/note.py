"""Heads of records as signed notes, in the formats of C2SP: tlog-checkpoint and signed-note.

A note is four lines (whose record it is, how many lines it has, the root of their tree in base64,
and when that was), a blank line, and a line for each signature. Keys are those of the parties'
certificates: ECDSA has the identifier that C2SP gives it (0x02); RSA-PSS, which has none there, a
long one of ours (0xff).
"""

from __future__ import annotations

import base64
import binascii
import itertools
import re
from dataclasses import dataclass
from hashlib import sha256
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import has_signed, sign
from vfl_party.record.tree import HASH_BYTES

_RSA = b"\xffvfl RSA-PSS SHA-256"
_ID_BYTES = 4
# Of a note, in characters; and of its numbers, as in the messages between parties.
MOST = 16_384
_MOST_NUMBER = 2**63 - 1
MOST_SIGNATURES = 16
_BEFORE = "\N{EM DASH} "
_ORIGIN = re.compile(r"[!-~]{1,200}")


@dataclass(frozen=True)
class Head:
    """The state of a record: its name, how many lines it has, the root of their tree, 32 bytes, and
    when that was, in seconds since 1970.
    """

    origin: str
    size: int
    root: bytes
    at: int = 0

    @property
    def text(self) -> str:
        """What is signed."""
        root = base64.b64encode(self.root).decode()
        return f"{self.origin}\n{self.size}\n{root}\nat {self.at}\n"

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads ``text``. Raises ValueError if it is no head."""
        origin, size, root, at, *rest = text.split("\n")
        when = int(at.removeprefix("at "))
        found = cls(origin, int(size), base64.b64decode(root, validate=True), when)
        numbers = 0 <= found.size <= _MOST_NUMBER and abs(found.at) <= _MOST_NUMBER
        if rest != [""] or found.text != text or not _ORIGIN.fullmatch(origin) or not numbers:
            raise ValueError(text)
        if len(found.root) != HASH_BYTES:
            raise ValueError(root)
        return found


@dataclass(frozen=True)
class SignedNote:
    """A head with signatures: {(signer's name, identifier of its key): signature}."""

    head: Head
    signatures: tuple[tuple[str, bytes, bytes], ...] = ()

    def __str__(self) -> str:
        lines = [_line(*each) for each in self.signatures]
        return f"{self.head.text}\n{''.join(lines)}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Reads what ``str`` gives. Raises ValueError if it is no note."""
        if len(text) > MOST:
            raise ValueError("too long")
        body, blank, rest = text.rpartition("\n\n")
        lines = rest.splitlines(keepends=True)
        if not blank or len(lines) > MOST_SIGNATURES:
            raise ValueError(text)
        return cls(Head.read(f"{body}\n"), tuple(_signature(line) for line in lines))

    def signed(self, credentials: Credentials) -> SignedNote:
        """Adds the signature of the party of ``credentials``. Raises InputError if its key is
        neither ECDSA nor RSA.
        """
        name, said = credentials.name, self.head.text.encode()
        own = (name, key_id(name, credentials.certificate), sign(credentials, said))
        return SignedNote(self.head, (*(each for each in self.signatures if each[0] != name), own))

    def with_those_of(self, other: SignedNote) -> SignedNote:
        """Adds the signatures of another copy of the note."""
        new = [each for each in other.signatures if each not in self.signatures]
        return SignedNote(self.head, (*self.signatures, *new))

    def signed_by(self, name: str, certificate: x509.Certificate) -> SignedNote:
        """Returns the note with one signature: that of the key of a certificate in this name; with
        none, if it has not signed the head.
        """
        wanted, said = (name, key_id(name, certificate)), self.head.text.encode()
        good = (
            each
            for each in self.signatures
            if each[:2] == wanted and has_signed(certificate, said, each[2])
        )
        return SignedNote(self.head, tuple(itertools.islice(good, 1)))

    def is_signed_by(self, name: str, certificate: x509.Certificate) -> bool:
        """Whether the key of a certificate has signed the head in this name."""
        return bool(self.signed_by(name, certificate).signatures)


def key_id(name: str, certificate: x509.Certificate) -> bytes:
    """Returns the identifier of a certificate's key in notes, 4 bytes."""
    key = certificate.public_key()
    spki = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    if isinstance(key, rsa.RSAPublicKey):
        spki = name.encode() + b"\n" + _RSA + spki
    return sha256(spki).digest()[:_ID_BYTES]


def _line(name: str, key: bytes, signature: bytes) -> str:
    return f"{_BEFORE}{name} {base64.b64encode(key + signature).decode()}\n"


def _signature(line: str) -> tuple[str, bytes, bytes]:
    name, _, encoded = line.removeprefix(_BEFORE).removesuffix("\n").partition(" ")
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ValueError(line) from None
    found = name, data[:_ID_BYTES], data[_ID_BYTES:]
    if _line(*found) != line or not found[2]:
        raise ValueError(line)
    return found
