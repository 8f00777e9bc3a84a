"""Checks a record against the heads that its party and its peers signed."""

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
from vfl_party.record.heads import OWN, read_signed_heads
from vfl_party.record.note import RecordHead, StoredHead
from vfl_party.record.note import signers as signers_of

# The first bytes of a line with the head of a peer's record.
_HEAD = b'{"head":'


@dataclass(frozen=True)
class VerificationResult:
    """The result of a verification.

    Args:
        lines: The number of lines in the record.
        covered: The number of lines in the newest signed head.
        heads: The number of signed heads.
        signers: {signer: maximum number of lines in a head that it signed}.
        wrong: The problems, each as a sentence. Empty if the record is as it was signed.
        records: {peer: names of its records} for peers that sent heads of several records.
    """

    lines: int
    covered: int
    heads: int
    signers: dict[str, int]
    wrong: tuple[str, ...] = ()
    records: Mapping[str, Sequence[str]] = field(default_factory=dict)


def verify(folder: Path, credentials: Credentials, owner: str | None = None) -> VerificationResult:
    """Recomputes the tree of a record and compares it with each signed head.

    Args:
        folder: The folder of the record.
        credentials: The credentials with the CA that must have issued the certificates.
        owner: The party that owns the record. Default: the party of ``credentials``.

    Raises InputError if there is no record, or if its heads cannot be read.
    """
    wrong: list[str] = []
    # This reads heads before lines, because running programs first add lines and then their heads.
    heads = read_signed_heads(folder)
    try:
        record_tree = _build_tree(folder / LINES)
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder / LINES}: cannot be read ({error.strerror}). Restore it from a copy.",
        ) from None
    if record_tree.rest:
        wrong.append(
            f"the last line is incomplete ({record_tree.rest} bytes); nothing was sent for it"
        )
    origin = _read_origin(record_tree.first, owner or credentials.name)
    signers: dict[str, int] = {}
    for number, held in enumerate(heads, 1):
        head = held.note.head
        signer_names, problems = signers_of(held, credentials)
        wrong += [f"head {number}: {problem}" for problem in problems]
        for name in signer_names:
            signers[name] = max(signers.get(name, 0), head.size)
        problem = _describe_problem(head, origin, record_tree)
        if problem:
            names = ", ".join(signer_names) or "nobody"
            wrong.append(f"head {number}, signed by {names}: {problem}")
    # A peer's signed head is stored before the line about the peer's head is written, so this
    # reads the heads again, after the lines.
    counts = Counter(name for stored in read_signed_heads(folder) for name in _list_signers(stored))
    wrong += _describe_missing_heads(record_tree.heads, counts)
    covered = max((stored.note.head.size for stored in heads), default=0)
    several = {peer: [*names] for peer, names in record_tree.origins.items() if len(names) > 1}
    return VerificationResult(
        record_tree.lines, covered, len(heads), signers, tuple(wrong), several
    )


def copy(folder: Path, out: Path) -> None:
    """Copies the lines and the signed heads of a record to a new folder for an auditor.

    It does not copy the key of the people's tags, which allows looking up any id. Raises InputError
    if there is no record, or if the folder cannot be created.
    """
    try:
        out.mkdir(mode=0o700)
        # This copies heads before lines, because running programs first add lines and then heads.
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
    """Raises InputError with the first problem if the record is not as it was signed."""
    result = verify(folder, credentials)
    if result.wrong:
        raise InputError(
            Code.FILE_INVALID,
            f"{folder}: the record is not as it was signed: {result.wrong[0]} (problems found: "
            f"{len(result.wrong)}). Restore it from a copy.",
        )


@dataclass
class _RecordTree:
    """The Merkle tree of a record.

    Args:
        first: The first line.
        lines: The number of complete lines.
        rest: The number of bytes after the last complete line.
        heads: {peer: number of lines with a head of its record}.
        origins: {peer: names of the records whose heads it sent}.
        hashes: The concatenated hashes of the tree, of which there may be millions.
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
    """Computes the tree over the lines of a file. Raises OSError if it cannot be read."""
    record_tree = _RecordTree()
    with path.open("rb") as file:
        for line in file:
            if not line.endswith(b"\n"):
                record_tree.rest = len(line)
                break
            record_tree.first = record_tree.first or line
            if line.startswith(_HEAD):
                peer, origin = _peer_and_origin(line)
                record_tree.heads[peer] += 1
                record_tree.origins.setdefault(peer, {})[origin] = None
            for digest in tree.hashes_of_leaf(
                tree.leaf_hash(line[:-1]), record_tree.lines, record_tree.hash_at
            ):
                record_tree.hashes += digest
            record_tree.lines += 1
    return record_tree


def _peer_and_origin(line: bytes) -> tuple[str, str]:
    """Returns the peer and the name of its record in a line with the head of a peer's record.

    Both are '' if the line was changed, which the comparison of the trees reports.
    """
    try:
        fields = json.loads(line)
        return str(fields["head"]), str(fields["origin"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", ""


def _describe_missing_heads(
    head_lines: Mapping[str, int], signed_heads: Mapping[str, int]
) -> list[str]:
    """Returns a sentence for each peer whose signatures of this record's heads are missing.

    When a peer sends its head, it also signs the head of this record. This signed head is stored
    before the line about the peer's head is written.
    """
    return [
        f"{peer} has signed a head of this record {times:,} times, and {OWN} holds "
        f"{signed_heads.get(peer, 0):,} of these heads: heads were lost or deleted"
        for peer, times in head_lines.items()
        if peer and signed_heads.get(peer, 0) < times
    ]


def _list_signers(held: StoredHead) -> set[str]:
    return {signer for signer, _, _ in held.note.signatures}


def _read_origin(first: bytes, name: str) -> str:
    try:
        return f"vfl-record/{name}/{json.loads(first)['record']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""


def _describe_problem(head: RecordHead, origin: str, record_tree: _RecordTree) -> str:
    """Describes why a head does not match the first lines of the record, or returns ''."""
    if head.origin != origin:
        return f"it belongs to another record, {head.origin}"
    if head.size > record_tree.lines:
        return (
            f"it counts {head.size:,} lines, but the record has {record_tree.lines:,}: its end is "
            "missing"
        )
    if tree.root(head.size, record_tree.hash_at) != head.root:
        return f"one of the first {head.size:,} lines was changed after it was signed"
    return ""
