"""Evidence that a party has changed its record: two heads of the record that contradict each other.

Both heads must have the party's own cosignature; see ``note``. They contradict each other if they
count the same lines with other roots, if the smaller one is later, or if the party has signed a
proof from one to the other that does not hold. Nothing else convicts a party. A proof that is
missing or spoilt may be lost on the way, and two records are what a lost disk leaves behind.
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

# The most files of each kind about one peer: a peer can show any number of heads.
MAX_FILES = 16


@dataclass(frozen=True)
class Proof:
    """A proof that a peer's record goes on from a head, with the peer's signature; b'' if it has
    signed none.
    """

    hashes: tuple[bytes, ...] = ()
    signature: bytes = b""


def proof_text(old: int, new: RecordHead, hashes: Sequence[bytes]) -> bytes:
    """Returns what the owner of a record signs with a proof from its first ``old`` lines to
    ``new``.
    """
    lines = (base64.b64encode(digest).decode() for digest in (new.root, *hashes))
    return "\n".join(["vfl-record/proof/v1", new.origin, f"{old} {new.size}", *lines, ""]).encode()


def is_extension(old: RecordHead, new: RecordHead, proof: Proof) -> bool:
    """Whether a proof shows that the record of ``new`` begins with the lines of ``old``."""
    same = old.origin == new.origin
    return same and tree.is_consistent(old.size, new.size, old.root, new.root, proof.hashes)


def contradiction(one: StoredHead, other: StoredHead, peer: str, proof: Proof) -> str:
    """Returns how two heads of a peer's record contradict each other, or '' if it has not signed a
    contradiction. The certificates of both have been checked.
    """
    small, large = sorted((one, other), key=lambda held: held.note.head.size)
    for held in (small, large):
        certificate = _first_certificate(held.certificates.get(peer, ""))
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
            f"two heads of {old.size:,} lines with different roots, of {_when(old.at)} and "
            f"{_when(new.at)}"
        )
    if old.at > new.at:
        return (
            f"a head of {new.size:,} lines on {_when(new.at)}, and one of only {old.size:,} lines "
            f"on {_when(old.at)}"
        )
    if is_extension(old, new, proof) or not proof.signature:
        return ""
    message = proof_text(old.size, new, proof.hashes)
    if certificate is None or not is_signature_of(certificate, message, proof.signature):
        return ""
    return (
        f"a head of {old.size:,} lines on {_when(old.at)}, one of {new.size:,} lines on "
        f"{_when(new.at)}, and a proof from one to the other that does not hold"
    )


def keep(
    folder: Path, peer: str, held: StoredHead, newer: StoredHead, proof: Proof
) -> tuple[Path, str]:
    """Writes two heads of a peer that do not go on from one another. Returns the file and the
    contradiction; '' if there is none. After ``MAX_FILES`` files of a kind no more are written.
    """
    why = contradiction(held, newer, peer, proof)
    kind = "broken" if why else "not-shown"
    path = folder / f"{peer}.{kind}-{newer.note.head.root.hex()[:12]}.json"
    fields = {
        "held": json.loads(held.line),
        "shown": {"note": str(newer.note), "certificates": newer.certificates},
        "proof": [digest.hex() for digest in proof.hashes],
        "proof_signature": proof.signature.hex(),
        "at": newer.at,
    }
    # The error is raised even if the disk is full.
    with contextlib.suppress(InputError):
        if path.exists() or len([*folder.glob(f"{peer}.{kind}-*.json")]) < MAX_FILES:
            write_atomic(path, to_json(fields) + "\n")
    return path, why


def verify_evidence(path: Path, peer: str, credentials: Credentials) -> str:
    """Returns the contradiction that a file of evidence proves, in one sentence. Raises InputError
    if it proves none.
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
            f"{path}: is not evidence about a record. Pass a file that a failed meeting of two "
            "parties wrote.",
        ) from None
    for head in (held, newer):
        if head.note.head.owner != peer:
            raise _unproven(
                path,
                peer,
                f"one of its heads is of another party's record, {head.note.head.origin}",
            )
        if peer not in signers(head, credentials)[0]:
            raise _unproven(path, peer, f"one of its heads is not signed by {peer}")
    if why := contradiction(held, newer, peer, proof):
        return f"{peer} has signed {why}"
    raise _unproven(path, peer, _why_unproven(held, newer, peer, proof))


def _why_unproven(held: StoredHead, newer: StoredHead, peer: str, proof: Proof) -> str:
    """Returns why two heads that the peer has signed prove nothing."""
    old, new = held.note.head, newer.note.head
    if old.origin != new.origin:
        return (
            f"it has signed heads of two records, {old.origin} and {new.origin}, as after a lost "
            "folder"
        )
    if is_extension(old, new, proof):
        return "its heads are consistent"
    for head in (held, newer):
        certificate = _first_certificate(head.certificates.get(peer, ""))
        if certificate is None or not head.note.is_cosigned_by(peer, certificate):
            return (
                "one of its heads was signed by a version without cosignatures, which signed any "
                "head"
            )
    return f"its proof is not signed by {peer}"


def _unproven(path: Path, peer: str, why: str) -> InputError:
    return InputError(
        Code.FILE_INVALID,
        f"{path}: does not prove that {peer} changed its record: {why}. Ask {peer} for its record.",
    )


def is_cosigned_by(held: StoredHead, peer: str, credentials: Credentials) -> bool:
    """Whether a peer has cosigned a head with a certificate of the CA."""
    certificate = _certificate(held.certificates.get(peer, ""), credentials)
    if certificate is None or not credentials.members.stands_for(certificate, peer):
        return False
    return held.note.is_cosigned_by(peer, certificate)


def signers(held: StoredHead, credentials: Credentials) -> tuple[list[str], list[str]]:
    """Returns the signers of a head, and what is wrong with signatures. Certificates may be out of
    date by now.
    """
    good: list[str] = []
    problems: list[str] = []
    for name in dict.fromkeys(signer for signer, _, _ in held.note.signatures):
        certificate = _certificate(held.certificates.get(name, ""), credentials)
        if certificate is None:
            problems.append(f"the certificate of {name} is missing or not from this CA")
        elif not credentials.members.stands_for(certificate, name):
            problems.append(f"the certificate of {name} is not that of {name}")
        elif held.note.is_signed_by(name, certificate):
            good.append(name)
        else:
            problems.append(f"the signature of {name} is invalid")
    return good, problems


def _certificate(chain: str, credentials: Credentials) -> x509.Certificate | None:
    authorities = pem.parse_certificates(credentials.ca_pem, Path(credentials.ca_file))
    try:
        certificate, *others = x509.load_pem_x509_certificates(chain.encode())
        certificate.public_key()
        trusted = pem.chain_of(certificate, others[: pem.MAX_INTERMEDIATES], authorities)
    except (ValueError, UnsupportedAlgorithm, x509.InvalidVersion):
        return None
    return certificate if trusted else None


def _first_certificate(chain: str) -> x509.Certificate | None:
    try:
        return x509.load_pem_x509_certificates(chain.encode())[0]
    except (ValueError, x509.InvalidVersion):
        return None


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d at %H:%M:%S UTC", time.gmtime(at_s))
