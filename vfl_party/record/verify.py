"""Checks a record against the heads that its party and its peers have signed, and evidence that a
peer's record was rewritten.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509

from vfl_common.errors import Code, InputError
from vfl_common.identity import pem
from vfl_common.identity.credentials import Credentials
from vfl_party.record import tree
from vfl_party.record.book import LINES
from vfl_party.record.heads import OWN, Held, signed
from vfl_party.record.note import Head

# How a line begins that notes the head of a peer's record.
_HEAD = b'{"head":'


@dataclass(frozen=True)
class Verified:
    """What was found. ``wrong``: in sentences; empty: nothing is.

    ``lines``: of the record; ``covered``: those that the newest signed head counts; ``heads``: how
    many signed heads there are; ``signers``: {who has signed: the most lines}.
    """

    lines: int
    covered: int
    heads: int
    signers: dict[str, int]
    wrong: tuple[str, ...] = ()


def verify(folder: Path, credentials: Credentials) -> Verified:
    """Computes the tree of a record anew, and compares it with each head that was signed. Raises
    InputError if there is no record, or if its heads cannot be read.

    ``credentials``: have the CA that certificates must come from, and the party's name.
    """
    wrong: list[str] = []
    # Before the lines: programs that run meanwhile add lines, and then heads of these.
    heads = signed(folder)
    try:
        grown = _grown(folder / LINES)
    except OSError as error:
        text = f"{folder / LINES}: cannot be read ({error.strerror}); restore it"
        raise InputError(Code.FILE_INVALID, text) from None
    if grown.rest:
        wrong.append(f"the last line has no end: {grown.rest} bytes; nothing was sent for it")
    origin = _origin(grown.first, credentials.name)
    signers: dict[str, int] = {}
    for number, held in enumerate(heads, 1):
        head = held.note.head
        by, problems = _signers(held, credentials)
        wrong += [f"head {number}: {problem}" for problem in problems]
        for name in by:
            signers[name] = max(signers.get(name, 0), head.size)
        problem = _problem(head, origin, grown)
        if problem:
            others = ", ".join(by) or "nobody"
            wrong.append(f"head {number}, signed by {others}: {problem}")
    # A head is kept before the line that notes it.
    kept = Counter(name for each in signed(folder) for name in _names(each))
    wrong += _missing(grown.shown, kept)
    covered = max((each.note.head.size for each in heads), default=0)
    return Verified(grown.lines, covered, len(heads), signers, tuple(wrong))


def require(folder: Path, credentials: Credentials) -> None:
    """Raises InputError if the record is not as it was signed, with what is wrong first."""
    found = verify(folder, credentials)
    if found.wrong:
        more = len(found.wrong) - 1
        others = f", and {more} more" if more else ""
        text = f"{folder}: the record is not as it was signed: {found.wrong[0]}{others}"
        raise InputError(Code.FILE_INVALID, f"{text}; restore it from a copy")


@dataclass
class _Grown:
    """The tree of a record: its hashes one after the other, as it has millions. ``first``: the
    first line; ``rest``: bytes after the last line's end; ``shown``: {peer: how often the record
    notes that it has shown its head}.
    """

    first: bytes = b""
    lines: int = 0
    rest: int = 0
    shown: Counter[str] = field(default_factory=Counter)
    hashes: bytearray = field(default_factory=bytearray)

    def hash_at(self, place: int) -> bytes:
        return bytes(self.hashes[place * tree.HASH_BYTES : (place + 1) * tree.HASH_BYTES])


def _grown(path: Path) -> _Grown:
    """Computes the tree of a file of lines. Raises OSError."""
    found = _Grown()
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                found.rest = len(line)
                break
            found.first = found.first or line
            if line.startswith(_HEAD):
                found.shown[_peer(line)] += 1
            for each in tree.added(tree.leaf_hash(line[:-1]), found.lines, found.hash_at):
                found.hashes += each
            found.lines += 1
    return found


def _peer(line: bytes) -> str:
    """Returns whose head a line notes; '' if the line was changed, which the tree tells."""
    try:
        return str(json.loads(line)["head"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _missing(shown: Mapping[str, int], signed: Mapping[str, int]) -> list[str]:
    """Says which signed heads are missing: whenever a peer shows its head, it signs that of this
    record, and that is kept before the line is written.
    """
    return [
        f"{peer} has signed a head of this record {times:,} times, and {OWN} holds "
        f"{signed.get(peer, 0):,} of these heads: heads were lost or deleted"
        for peer, times in shown.items()
        if peer and signed.get(peer, 0) < times
    ]


def _names(held: Held) -> set[str]:
    return {signer for signer, _, _ in held.note.signatures}


def _origin(first: bytes, name: str) -> str:
    try:
        return f"vfl-record/{name}/{json.loads(first)['record']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _problem(head: Head, origin: str, grown: _Grown) -> str:
    """Returns '' if a head is that of the first lines of the record; else what is wrong."""
    if head.origin != origin:
        return f"it is of another record, {head.origin}"
    if head.size > grown.lines:
        text = f"it counts {head.size:,} lines, and the record has {grown.lines:,}"
        return f"{text}: its end is missing"
    if tree.root(head.size, grown.hash_at) != head.root:
        return f"one of the first {head.size:,} lines is not as it was signed"
    return ""


def _signers(held: Held, credentials: Credentials) -> tuple[list[str], list[str]]:
    """Returns who has signed a head, and what is wrong with signatures. Dates of certificates are
    not looked at: they may have ended since.
    """
    found: list[str] = []
    problems: list[str] = []
    for name in dict.fromkeys(signer for signer, _, _ in held.note.signatures):
        certificate = _certificate(held.certificates.get(name, ""), credentials)
        if certificate is None:
            problems.append(f"the certificate of {name} is missing, or not from this CA")
        elif not credentials.members.stand_for(certificate, name):
            problems.append(f"the certificate of {name} is not that of {name}")
        elif held.note.is_signed_by(name, certificate):
            found.append(name)
        else:
            problems.append(f"the signature of {name} is not good")
    return found, problems


def _certificate(chain: str, credentials: Credentials) -> x509.Certificate | None:
    authorities = pem.parse_certificates(credentials.ca_pem, Path(credentials.ca_file))
    try:
        certificate, *others = x509.load_pem_x509_certificates(chain.encode())
    except ValueError:
        return None
    if not pem.chain_of(certificate, others[: pem.MOST_INTERMEDIATES], authorities):
        return None
    return certificate


def evidence(path: Path, peer: str, credentials: Credentials) -> str:
    """Returns what a file of evidence shows, in one sentence. Raises InputError if it shows
    nothing.

    The file says that ``peer`` has signed two heads of which the later one does not go on from the
    earlier one.
    """
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        held = Held.read(json.dumps(found["held"]))
        shown = Held.read(json.dumps({"at": 0, **found["shown"]}))
        proof = [bytes.fromhex(each) for each in found["proof"]]
    except OSError as error:
        text = f"{path}: cannot be read ({error.strerror})"
        raise InputError(Code.FILE_INVALID, text) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        text = f"{path}: is no evidence about a record"
        raise InputError(Code.FILE_INVALID, text) from None
    for each in (held, shown):
        if peer not in _signers(each, credentials)[0]:
            text = f"{path}: shows nothing: one of its heads is not signed by {peer}"
            raise InputError(Code.FILE_INVALID, text)
    old, new = held.note.head, shown.note.head
    if old.origin == new.origin and tree.is_consistent(
        old.size, new.size, old.root, new.root, proof
    ):
        raise InputError(Code.FILE_INVALID, f"{path}: shows nothing: its heads are consistent")
    if old.origin != new.origin:
        return (
            f"{peer} has signed the heads of two records: {old.origin}, {old.size:,} lines, and "
            f"{new.origin}, {new.size:,} lines"
        )
    return (
        f"{peer} has signed a head of {old.size:,} lines on {_when(old.at)}, and one of "
        f"{new.size:,} lines on {_when(new.at)} that does not go on from it"
    )


def _when(at_s: float) -> str:
    return time.strftime("%Y-%m-%d at %H:%M:%S UTC", time.gmtime(at_s))
