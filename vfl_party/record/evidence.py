"""Evidence that a party changed its record: two contradictory heads of the record.

Both heads must have the party's own cosignature; see ``note``. They contradict each other if they
have the same number of lines but different roots, if the smaller head is later, or if the party
signed an invalid proof between them. Only this is evidence. A missing or damaged proof may be a
transport error, and a second record may be the result of a lost disk.
"""

from __future__ import annotations

import base64
import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm

from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.signing import is_signature_of
from vfl_common.text import to_json
from vfl_party.record import tree
from vfl_party.record.note import RecordHead, StoredHead

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


def keep(
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
