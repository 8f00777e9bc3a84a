"""Signed heads of records in the C2SP formats tlog-checkpoint, signed-note and tlog-cosignature.

A note has four lines (the name of the record, the number of lines, the root of their tree in
base64, and the time), a blank line, and a line for each signature. The keys are those of the
parties' certificates. ECDSA keys have the C2SP identifier 0x02. C2SP defines no identifier for
RSA-PSS, so RSA-PSS keys have a long identifier that begins with 0xff.

The owner of a record signs these four lines. The owner and all peers also sign a cosignature of
``cosignature/v1``, the time, and the four lines. C2SP defines no cosignature for these keys, so
their identifiers are also long. A cosignature of another party's head can therefore never be
mistaken for the signature of the record's owner. Earlier versions signed the four lines of any head
that a peer sent, so a signature without a cosignature is no evidence.

Evidence that a party changed its record is two contradictory heads of the record. Both heads must
have the party's own cosignature. They contradict each other if they have the same number of lines
but different roots, if the smaller head is later, or if the party signed an invalid proof between
them. Only this is evidence. A missing or damaged proof may be a transport error, and a second
record may be the result of a lost disk.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Self

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import is_signature_of, sign
from vfl_common.text import to_json
from vfl_party.record import tree
from vfl_party.record.tree import HASH_BYTES

_RSA = b"\xffvfl RSA-PSS SHA-256"
_COSIGNATURE = b"\xffvfl cosignature/v1 SHA-256"
_TIME_BYTES = 8
_ID_BYTES = 4
# The maximum number of characters in a note, and below it the largest number in a note, as in the
# messages between parties.
MAX_CHARACTERS = 16_384
_MAX_NUMBER = 2**63 - 1
MAX_SIGNATURES = 16
_SIGNATURE_PREFIX = "\N{EM DASH} "
_ORIGIN = re.compile(r"[!-~]{1,200}")


@dataclass(frozen=True)
class RecordHead:
    """The state of a record at one time.

    Args:
        origin: The name of the record.
        size: The number of lines.
        root: The root of the tree over the lines, 32 bytes.
        at: The time in seconds since 1970.
    """

    origin: str
    size: int
    root: bytes
    at: int = 0

    @property
    def owner(self) -> str:
        """The party that owns the record, or '' if the name of the record has another form."""
        prefix, _, rest = self.origin.partition("/")
        party, _, identity = rest.partition("/")
        return party if prefix == "vfl-record" and identity else ""

    @property
    def text(self) -> str:
        """The lines that the owner of the record signs."""
        root = base64.b64encode(self.root).decode()
        return f"{self.origin}\n{self.size}\n{root}\nat {self.at}\n"

    @classmethod
    def read(cls, text: str) -> Self:
        """Parses the text of a head. Raises ValueError if it is invalid."""
        origin, size, root, time_line, *remaining_lines = text.split("\n")
        time_s = int(time_line.removeprefix("at "))
        head = cls(origin, int(size), base64.b64decode(root, validate=True), time_s)
        has_valid_numbers = 0 <= head.size <= _MAX_NUMBER and abs(head.at) <= _MAX_NUMBER
        if (
            remaining_lines != [""]
            or head.text != text
            or not _ORIGIN.fullmatch(origin)
            or not has_valid_numbers
        ):
            raise ValueError("the text is not a valid head of a record")
        if len(head.root) != HASH_BYTES:
            raise ValueError(f"the root must have {HASH_BYTES} bytes (got {len(head.root)})")
        return head


@dataclass(frozen=True)
class SignedNote:
    """A head with signatures: {(signer's name, identifier of its key): signature}."""

    head: RecordHead
    signatures: tuple[tuple[str, bytes, bytes], ...] = ()

    def __str__(self) -> str:
        lines = [_format_signature(*signature) for signature in self.signatures]
        return f"{self.head.text}\n{''.join(lines)}"

    @classmethod
    def read(cls, text: str) -> Self:
        """Parses the text that ``str`` returns. Raises ValueError if it is invalid."""
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"a note has at most {MAX_CHARACTERS} characters (got {len(text)})")
        body, blank, signature_text = text.rpartition("\n\n")
        lines = signature_text.splitlines(keepends=True)
        if not blank or len(lines) > MAX_SIGNATURES:
            raise ValueError("a note needs a blank line, and at most 16 signatures after it")
        return cls(RecordHead.read(f"{body}\n"), tuple(_parse_signature(line) for line in lines))

    def sign(self, credentials: Credentials, *, older: bool = False) -> SignedNote:
        """Returns the note with a cosignature of the party that has these credentials.

        If the party owns the record, it also signs the head itself. ``older``: The receiver's
        version does not support cosignatures, so the head is signed in any case. Raises InputError
        if the party's key is neither ECDSA nor RSA.
        """
        name, certificate = credentials.name, credentials.certificate
        time_s, head = int(time.time()), self.head.text
        signature = time_s.to_bytes(_TIME_BYTES, "big") + sign(
            credentials, _cosignature_message(time_s, head)
        )
        new_signatures = [(name, cosigner_id(name, certificate), signature)]
        if older or self.head.owner == name:
            new_signatures.insert(
                0, (name, key_id(name, certificate), sign(credentials, head.encode()))
            )
        return SignedNote(
            self.head, (*(other for other in self.signatures if other[0] != name), *new_signatures)
        )

    def with_those_of(self, other: SignedNote) -> SignedNote:
        """Returns the note with the additional signatures of another copy of the note."""
        new = [signature for signature in other.signatures if signature not in self.signatures]
        return SignedNote(self.head, (*self.signatures, *new))

    def select_signatures(self, name: str, certificate: x509.Certificate) -> SignedNote:
        """Returns the note with only the valid signatures of one party.

        These are at most one signature of the head and one cosignature. ``name``: The party.
        ``certificate``: The certificate of its key.
        """
        valid_signatures: dict[bytes, tuple[str, bytes, bytes]] = {}
        for signer, key, signature in self.signatures:
            message = self._message_of(name, certificate, key, signature)
            if signer != name or key in valid_signatures or message is None:
                continue
            if is_signature_of(certificate, message[0], message[1]):
                valid_signatures[key] = signer, key, signature
        return SignedNote(self.head, tuple(valid_signatures.values()))

    def _message_of(
        self, name: str, certificate: x509.Certificate, key: bytes, signature: bytes
    ) -> tuple[bytes, bytes] | None:
        """Returns the signed message and the bytes of a signature, or None if the key differs."""
        if key == key_id(name, certificate):
            return self.head.text.encode(), signature
        if key != cosigner_id(name, certificate):
            return None
        time_s = int.from_bytes(signature[:_TIME_BYTES], "big")
        return _cosignature_message(time_s, self.head.text), signature[_TIME_BYTES:]

    def is_signed_by(self, name: str, certificate: x509.Certificate) -> bool:
        """Returns whether the party ``name`` with this certificate signed or cosigned the head."""
        return bool(self.select_signatures(name, certificate).signatures)

    def is_cosigned_by(self, name: str, certificate: x509.Certificate) -> bool:
        """Returns whether the party ``name`` with this certificate cosigned the head."""
        cosigner_key = cosigner_id(name, certificate)
        return any(
            key == cosigner_key
            for _, key, _ in self.select_signatures(name, certificate).signatures
        )


@dataclass(frozen=True)
class StoredHead:
    """A stored head of a record.

    Args:
        note: The head with its signatures.
        certificates: {signer: its certificate chain in PEM}.
        at: The time when it was stored, in seconds since 1970.
    """

    note: SignedNote
    certificates: dict[str, str]
    at: float = 0.0

    @property
    def line(self) -> str:
        """The stored head as one line of JSON."""
        fields = {"at": self.at, "note": str(self.note), "certificates": self.certificates}
        return to_json(fields)

    @classmethod
    def read(cls, text: str) -> StoredHead:
        """Parses the text of ``line``. Raises ValueError if it is invalid."""
        try:
            fields = json.loads(text)
            certificates, at = dict(fields["certificates"]), float(fields["at"])
            if not all(isinstance(certificate, str) for certificate in certificates.values()):
                raise ValueError("the certificates must be texts")
            return cls(SignedNote.read(fields["note"]), certificates, at)
        except (KeyError, TypeError, AttributeError, RecursionError):
            raise ValueError("the line is not a valid stored head") from None


def key_id(name: str, certificate: x509.Certificate) -> bytes:
    """Returns the identifier of a certificate's key in notes, 4 bytes."""
    spki = _encode_public_key(certificate)
    if isinstance(certificate.public_key(), rsa.RSAPublicKey):
        spki = name.encode() + b"\n" + _RSA + spki
    return sha256(spki).digest()[:_ID_BYTES]


def cosigner_id(name: str, certificate: x509.Certificate) -> bytes:
    """Returns the identifier of a certificate's key in cosignatures, 4 bytes."""
    message = name.encode() + b"\n" + _COSIGNATURE + _encode_public_key(certificate)
    return sha256(message).digest()[:_ID_BYTES]


def _encode_public_key(certificate: x509.Certificate) -> bytes:
    return certificate.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)


def _cosignature_message(at: int, head: str) -> bytes:
    """Returns the message of a cosignature (C2SP tlog-cosignature)."""
    return f"cosignature/v1\ntime {at}\n{head}".encode()


def _format_signature(name: str, key: bytes, signature: bytes) -> str:
    return f"{_SIGNATURE_PREFIX}{name} {base64.b64encode(key + signature).decode()}\n"


def _parse_signature(line: str) -> tuple[str, bytes, bytes]:
    name, _, encoded = line.removeprefix(_SIGNATURE_PREFIX).removesuffix("\n").partition(" ")
    try:
        data = base64.b64decode(encoded, validate=True)
    except binascii.Error:
        raise ValueError("the signature is not valid base64") from None
    signature = name, data[:_ID_BYTES], data[_ID_BYTES:]
    if _format_signature(*signature) != line or not signature[2]:
        raise ValueError("the line of a signature is invalid")
    return signature


# The maximum number of files of each kind about one peer, because a peer can send any number of
# heads.
MAX_FILES = 16


@dataclass(frozen=True)
class Proof:
    """A proof that a peer's record extends a head, and the peer's signature of the proof.

    The signature is b'' if the peer did not sign the proof.
    """

    hashes: tuple[bytes, ...] = ()
    signature: bytes = b""


def proof_text(old: int, new: RecordHead, hashes: Sequence[bytes]) -> bytes:
    """Returns the text that the owner of a record signs with a proof.

    The proof shows that the head ``new`` extends the record's first ``old`` lines.
    """
    lines = (base64.b64encode(digest).decode() for digest in (new.root, *hashes))
    return "\n".join(["vfl-record/proof/v1", new.origin, f"{old} {new.size}", *lines, ""]).encode()


def is_extension(old: RecordHead, new: RecordHead, proof: Proof) -> bool:
    """Returns whether a proof shows that the record of ``new`` begins with the lines of ``old``."""
    has_same_origin = old.origin == new.origin
    return has_same_origin and tree.is_consistent(
        old.size, new.size, old.root, new.root, proof.hashes
    )


def contradiction(one: StoredHead, other: StoredHead, peer: str, proof: Proof) -> str:
    """Describes the contradiction between two heads of a peer's record, or returns ''.

    It is a contradiction only if the peer signed both heads. The caller has checked the
    certificates of both heads.
    """
    small, large = sorted((one, other), key=lambda held: held.note.head.size)
    for held in (small, large):
        certificate = _read_certificate(held.certificates.get(peer, ""))
        owned = held.note.head.owner == peer
        if certificate is None or not owned or not held.note.is_cosigned_by(peer, certificate):
            return ""
    old, new = small.note.head, large.note.head
    if old.origin != new.origin:
        return ""
    if old.size == new.size:
        if old.root == new.root:
            return ""
        return (
            f"two heads of {old.size:,} lines with different roots, of {_format_time(old.at)} and "
            f"{_format_time(new.at)}"
        )
    if old.at > new.at:
        return (
            f"a head of {new.size:,} lines on {_format_time(new.at)}, and one of only {old.size:,} "
            f"lines on {_format_time(old.at)}"
        )
    if is_extension(old, new, proof) or not proof.signature:
        return ""
    message = proof_text(old.size, new, proof.hashes)
    if certificate is None or not is_signature_of(certificate, message, proof.signature):
        return ""
    return (
        f"a head of {old.size:,} lines on {_format_time(old.at)}, one of {new.size:,} lines on "
        f"{_format_time(new.at)}, and a proof from one to the other that does not hold"
    )


def keep_evidence(
    folder: Path, peer: str, held: StoredHead, newer: StoredHead, proof: Proof
) -> tuple[Path, str]:
    """Writes a file with two heads of a peer of which the newer one does not extend the older one.

    Returns the file, and the contradiction between the heads or ''. If there are ``MAX_FILES``
    files of the same kind, it writes none.
    """
    contradiction_text = contradiction(held, newer, peer, proof)
    kind = "broken" if contradiction_text else "not-shown"
    path = folder / f"{peer}.{kind}-{newer.note.head.root.hex()[:12]}.json"
    fields = {
        "held": json.loads(held.line),
        "shown": {"note": str(newer.note), "certificates": newer.certificates},
        "proof": [digest.hex() for digest in proof.hashes],
        "proof_signature": proof.signature.hex(),
        "at": newer.at,
    }
    # The caller raises an error about the heads even if the disk is full.
    with contextlib.suppress(InputError):
        if path.exists() or len([*folder.glob(f"{peer}.{kind}-*.json")]) < MAX_FILES:
            write_atomic(path, to_json(fields) + "\n")
    return path, contradiction_text


def verify_evidence(path: Path, peer: str, credentials: Credentials) -> str:
    """Returns the contradiction that a file of evidence proves, in one sentence.

    Raises InputError if the file proves no contradiction.
    """
    try:
        fields: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        held = StoredHead.read(json.dumps(fields["held"]))
        newer = StoredHead.read(json.dumps({"at": 0, **fields["shown"]}))
        hashes = tuple(bytes.fromhex(digest) for digest in fields["proof"])
        proof = Proof(hashes, bytes.fromhex(fields.get("proof_signature", "")))
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID, f"{path}: cannot be read ({error.strerror}). Restore it from a copy."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: not a file of evidence about a record. Pass a file that a party wrote when "
            "another party's record did not match.",
        ) from None
    for head in (held, newer):
        if head.note.head.owner != peer:
            raise _unproven_error(
                path,
                peer,
                f"one of its heads belongs to another party's record, {head.note.head.origin}",
            )
        if peer not in signers(head, credentials)[0]:
            raise _unproven_error(path, peer, f"one of its heads is not signed by {peer}")
    if why := contradiction(held, newer, peer, proof):
        return f"{peer} has signed {why}"
    raise _unproven_error(path, peer, _explain_unproven(held, newer, peer, proof))


def _explain_unproven(held: StoredHead, newer: StoredHead, peer: str, proof: Proof) -> str:
    """Explains why two heads that the peer signed do not prove a contradiction."""
    old, new = held.note.head, newer.note.head
    if old.origin != new.origin:
        return (
            f"{peer} signed heads of two records, {old.origin} and {new.origin}, which also "
            "happens after a folder was lost"
        )
    if is_extension(old, new, proof):
        return "its heads are consistent"
    for head in (held, newer):
        certificate = _read_certificate(head.certificates.get(peer, ""))
        if certificate is None or not head.note.is_cosigned_by(peer, certificate):
            return (
                "one of its heads has no cosignature, because an older version signed it, and that "
                "version signed any head"
            )
    return f"its proof is not signed by {peer}"


def _unproven_error(path: Path, peer: str, why: str) -> InputError:
    return InputError(
        Code.FILE_INVALID,
        f"{path}: does not prove that {peer} changed its record: {why}. Ask {peer} for its record.",
    )


def is_cosigned_by(held: StoredHead, peer: str, credentials: Credentials) -> bool:
    """Returns whether a peer cosigned a head with a certificate of the CA."""
    certificate = _read_trusted_certificate(held.certificates.get(peer, ""), credentials)
    if certificate is None or not credentials.members.stands_for(certificate, peer):
        return False
    return held.note.is_cosigned_by(peer, certificate)


def signers(held: StoredHead, credentials: Credentials) -> tuple[list[str], list[str]]:
    """Returns the signers of a head, and the problems of invalid signatures.

    Certificates may have expired since they signed the head.
    """
    valid_signers: list[str] = []
    problems: list[str] = []
    for name in dict.fromkeys(signer for signer, _, _ in held.note.signatures):
        certificate = _read_trusted_certificate(held.certificates.get(name, ""), credentials)
        if certificate is None:
            problems.append(f"the certificate of {name} is missing or not from this CA")
        elif not credentials.members.stands_for(certificate, name):
            problems.append(f"the certificate for the signature of {name} belongs to another party")
        elif held.note.is_signed_by(name, certificate):
            valid_signers.append(name)
        else:
            problems.append(f"the signature of {name} is invalid")
    return valid_signers, problems


def _read_trusted_certificate(chain: str, credentials: Credentials) -> x509.Certificate | None:
    authorities = pem.parse_certificates(credentials.ca_pem, Path(credentials.ca_file))
    try:
        certificate, *intermediates = x509.load_pem_x509_certificates(chain.encode())
        certificate.public_key()
        trusted = pem.build_chain(certificate, intermediates[: pem.MAX_INTERMEDIATES], authorities)
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return None
    return certificate if trusted else None


def _read_certificate(chain: str) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificates(chain.encode())[0]
    except (ValueError, x509.InvalidVersion):
        return None


def _format_time(at_s: float) -> str:
    return time.strftime("%Y-%m-%d at %H:%M:%S UTC", time.gmtime(at_s))
