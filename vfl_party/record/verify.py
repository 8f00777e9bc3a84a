"""Checks a record against the heads that its party and its peers have signed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from vfl_common.errors import Code, InputError
from vfl_common.files import write_error
from vfl_common.identity.credentials import Credentials
from vfl_party.record import tree
from vfl_party.record.book import LINES
from vfl_party.record.evidence import signers as signers_of
from vfl_party.record.heads import OWN, read_signed_heads
from vfl_party.record.note import RecordHead, StoredHead

# How a line begins that notes the head of a peer's record.
_HEAD = b'{"head":'


@dataclass(frozen=True)
class VerificationResult:
    """The result of a verification. ``wrong``: the problems, in sentences; empty: none.

    ``lines``: of the record; ``covered``: those that the newest signed head counts; ``heads``: how
    many signed heads there are; ``signers``: {who has signed: the most lines}; ``records``: {peer:
    the names of the records that it has shown}, of peers that have shown several.
    """

    lines: int
    covered: int
    heads: int
    signers: dict[str, int]
    wrong: tuple[str, ...] = ()
    records: Mapping[str, Sequence[str]] = field(default_factory=dict)


def verify(folder: Path, credentials: Credentials, owner: str | None = None) -> VerificationResult:
    """Recomputes the tree of a record, and compares it with each head that was signed. Raises
    InputError if there is no record, or if its heads cannot be read.

    ``credentials``: have the CA that certificates must come from; ``owner``: the party whose record
    it is, by default that of ``credentials``.
    """
    wrong: list[str] = []
    # Heads are read before lines, because running programs add lines first, and then heads of
    # these.
    heads = read_signed_heads(folder)
    try:
        grown = _build_tree(folder / LINES)
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder / LINES}: cannot be read ({error.strerror}). Restore it from a copy.",
        ) from None
    if grown.rest:
        wrong.append(f"the last line is incomplete ({grown.rest} bytes); nothing was sent for it")
    origin = _origin(grown.first, owner or credentials.name)
    signers: dict[str, int] = {}
    for number, held in enumerate(heads, 1):
        head = held.note.head
        by, problems = signers_of(held, credentials)
        wrong += [f"head {number}: {problem}" for problem in problems]
        for name in by:
            signers[name] = max(signers.get(name, 0), head.size)
        problem = _problem(head, origin, grown)
        if problem:
            others = ", ".join(by) or "nobody"
            wrong.append(f"head {number}, signed by {others}: {problem}")
    # A head is kept before the line that notes it.
    counts = Counter(name for stored in read_signed_heads(folder) for name in _names(stored))
    wrong += _missing(grown.heads, counts)
    covered = max((stored.note.head.size for stored in heads), default=0)
    several = {peer: [*names] for peer, names in grown.origins.items() if len(names) > 1}
    return VerificationResult(grown.lines, covered, len(heads), signers, tuple(wrong), several)


def copy(folder: Path, out: Path) -> None:
    """Copies a record for an auditor into a new folder: lines and signed heads, and not the key of
    people, with which anybody can look an id up. Raises InputError.
    """
    try:
        out.mkdir(mode=0o700)
        # Heads first: programs that run meanwhile add lines, and then heads of these.
        for name in (OWN, LINES):
            if (folder / name).is_file():
                shutil.copyfile(folder / name, out / name)
    except OSError as error:
        raise write_error(out, error) from None
    if not (out / LINES).is_file():
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: contains no record. Check record.folder of the party file.",
        )


def require(folder: Path, credentials: Credentials) -> None:
    """Raises InputError if the record is not as it was signed, with what is wrong first."""
    result = verify(folder, credentials)
    if result.wrong:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: the record is not as it was signed: {result.wrong[0]} (problems found: "
            f"{len(result.wrong)}). Restore it from a copy.",
        )


@dataclass
class _RecordTree:
    """The tree of a record: its hashes one after the other, as it has millions. ``first``: the
    first line; ``rest``: bytes after the last line's end; ``heads``: {peer: how often the record
    notes that it has shown its head}; ``origins``: {peer: the names of the records it has shown}.
    """

    first: bytes = b""
    lines: int = 0
    rest: int = 0
    heads: Counter[str] = field(default_factory=Counter)
    origins: dict[str, dict[str, None]] = field(default_factory=dict)
    hashes: bytearray = field(default_factory=bytearray)

    def hash_at(self, place: int) -> bytes:
        return bytes(self.hashes[place * tree.HASH_BYTES : (place + 1) * tree.HASH_BYTES])


def _build_tree(path: Path) -> _RecordTree:
    """Computes the tree of a file of lines. Raises OSError."""
    grown = _RecordTree()
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                grown.rest = len(line)
                break
            grown.first = grown.first or line
            if line.startswith(_HEAD):
                peer, origin = _peer_and_origin(line)
                grown.heads[peer] += 1
                grown.origins.setdefault(peer, {})[origin] = None
            for digest in tree.hashes_of_leaf(
                tree.leaf_hash(line[:-1]), grown.lines, grown.hash_at
            ):
                grown.hashes += digest
            grown.lines += 1
    return grown


def _peer_and_origin(line: bytes) -> tuple[str, str]:
    """Returns the peer whose head a line notes, and the name of its record; '' if the line was
    changed, which the tree shows.
    """
    try:
        fields = json.loads(line)
        return str(fields["head"]), str(fields["origin"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""


def _missing(notes: Mapping[str, int], signed: Mapping[str, int]) -> list[str]:
    """Says which signed heads are missing: whenever a peer shows its head, it signs that of this
    record, and that is kept before the line is written.
    """
    return [
        f"{peer} has signed a head of this record {times:,} times, and {OWN} holds "
        f"{signed.get(peer, 0):,} of these heads: heads were lost or deleted"
        for peer, times in notes.items()
        if peer and signed.get(peer, 0) < times
    ]


def _names(held: StoredHead) -> set[str]:
    return {signer for signer, _, _ in held.note.signatures}


def _origin(first: bytes, name: str) -> str:
    try:
        return f"vfl-record/{name}/{json.loads(first)['record']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _problem(head: RecordHead, origin: str, grown: _RecordTree) -> str:
    """Returns '' if a head is that of the first lines of the record; else what is wrong."""
    if head.origin != origin:
        return f"it is of another record, {head.origin}"
    if head.size > grown.lines:
        return (
            f"it counts {head.size:,} lines, but the record has {grown.lines:,}: its end is missing"
        )
    if tree.root(head.size, grown.hash_at) != head.root:
        return f"one of the first {head.size:,} lines was changed after it was signed"
    return ""
