"""Heads of records among peers: each party shows its own, holds the last one of each peer, and asks
every time for the proof that the peer's record goes on from it.

A passive party calls the active one, twice. The first call shows its head and says which head of
the active party it holds; the answer does the same, with the proof. The second call has the proof
for the active party, and the active party's note with a signature of the caller's; the answer has
the caller's note, signed.

A head that does not extend the held one is kept with it, with the peer's signatures on both. If
they contradict each other, that is evidence; see ``evidence``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import PLAIN_NAME, write_error
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.pem import MAX_INTERMEDIATES, pin_of
from vfl_common.identity.signing import chain_pem, sign, verify_chain
from vfl_common.rpc.confer import MAX_OTHER_HEADS, LogHeads
from vfl_common.text import make_printable
from vfl_party.record import tree
from vfl_party.record.book import RecordBook, now
from vfl_party.record.evidence import Proof, is_extension, keep, proof_text
from vfl_party.record.note import RecordHead, SignedNote, StoredHead

PEERS, OWN = "peers", "heads.jsonl"
# The tries to show a head that is not older than one that another program of the party shows.
_TRIES = 3
# The most calls of a peer in one process: each adds a line to the record.
_MAX_CALLS = 2000


@dataclass(frozen=True)
class _Shown:
    """A head that a peer has shown and signed, with its certificate and its chain in PEM."""

    note: SignedNote
    certificate: x509.Certificate
    chain: str

    def cosign(self, peer: str, credentials: Credentials) -> SignedNote:
        """Adds this party's cosignature, in the form that the peer's version reads."""
        older = not self.note.is_cosigned_by(peer, self.certificate)
        return self.note.sign(credentials, older=older)


class HeadExchange:
    """What a party shows and holds; any thread may call it.

    Args:
        book: the party's own record.
        credentials: gives those that are in use.
    """

    def __init__(self, book: RecordBook, credentials: Callable[[], Credentials]) -> None:
        self.book, self._credentials = book, credentials
        self._lock = threading.Lock()
        # {peer: (what it has shown, this party's note, the peer's head that was held)}, between its
        # two calls.
        self._between: dict[str, tuple[_Shown, SignedNote, StoredHead | None]] = {}
        # {peer: the pin of its key}, of those that have shown their record in this process.
        self.met: dict[str, str] = {}
        # {passive party: the active party's head that it holds}; see ``relay``.
        self.relayed: dict[str, StoredHead] = {}
        # The size of the record when the active party last cosigned its head.
        self._cosigned_size = -1
        self._calls: Counter[str] = Counter()

    # -- a passive party
    # ----------------------------------------------------------------------

    def confer(self, peer: str, ask: Callable[[LogHeads], LogHeads]) -> None:
        """Shows the active party the head of this party's record, and takes its head. Raises
        PeerError if its record does not go on from the head that is held.

        ``ask``: makes one call.
        """
        for left in reversed(range(_TRIES)):
            own, held = self._sign_head(), self.read_last(peer)
            others = self._of_others(peer, held)
            also = tuple(other.note.head.size for _, other in others)
            first = ask(replace(self._shows(own, held), also=also))
            # If so, another program of this party has shown a later head meanwhile.
            later = first.held_origin == own.head.origin and first.held_size > own.head.size
            if later and left:
                continue
            seen = self._read(peer, first)
            self._require_going_on(peer, held, seen, _proof_in(first))
            for (holder, other), more in zip_longest(others, first.proofs[: len(others)]):
                self._require_going_on(peer, other, seen, Proof(*(more or ())), holder)
            proof = self._proof(first, own.head)
            cosigned = str(seen.cosign(peer, self._credentials()))
            shows = LogHeads(proof=proof.hashes, cosigned=cosigned, proof_signature=proof.signature)
            last = ask(shows)
            # Otherwise the same has happened between the two calls.
            if last.cosigned and self.read_last(peer) == held:
                self._keep_own(peer, own, last.cosigned, seen)
                self._keep(peer, seen)
                self._cosigned_size = own.head.size
                return
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{peer}: did not sign the head of the record of {self.book.name}",
            party=peer,
        )

    def _of_others(self, peer: str, held: StoredHead | None) -> list[tuple[str, StoredHead]]:
        """Returns (holder, the active party's head that it holds) of other passive parties: as many
        as one call asks about, by chance. Those are left out whose record a person has replaced.
        """
        known = {_state(held)} if held is not None else set()
        aside = _set_aside(self.book.folder, peer)
        new = [
            (holder, other)
            for holder, other in self.relayed.items()
            if _state(other) not in known and other.note.head.origin not in aside
        ]
        return secrets.SystemRandom().sample(new, min(len(new), MAX_OTHER_HEADS))

    @property
    def has_news(self) -> bool:
        """Whether something has left since the active party last signed this party's head."""
        return self.book.head().size > self._cosigned_size + 1

    def seal(self) -> None:
        """Signs the head of the record at the end of a program, and keeps it with those that peers
        have signed.
        """
        certificates = {self.book.name: chain_pem(self._credentials()).decode()}
        _append(self.book.folder / OWN, StoredHead(self._sign_head(), certificates, now()).line)

    # -- the active party
    # ----------------------------------------------------------------------

    def answer(self, peer: str, call: LogHeads) -> LogHeads:
        """Answers a call of ``confer``. Raises PeerError if the peer's record does not go on from
        the head that is held.
        """
        with self._lock:
            self._calls[peer] += 1
            if self._calls[peer] > _MAX_CALLS:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{peer}: showed its record more than {_MAX_CALLS:,} times",
                    party=peer,
                )
            if call.note:
                seen = self._read(peer, call)
                own, held = self._sign_head(), self.read_last(peer)
                self._between[peer] = seen, own, held
                proof = self._proof(call, own.head)
                more = (self._proof_from(size, own.head) for size in call.also)
                return replace(
                    self._shows(own, held),
                    proof=proof.hashes,
                    proof_signature=proof.signature,
                    proofs=tuple((other.hashes, other.signature) for other in more),
                )
            if peer not in self._between:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{peer}: did not show the head of its record",
                    party=peer,
                )
            seen, own, held = self._between.pop(peer)
            if self.read_last(peer) != held:
                # Other programs of both have met meanwhile: the proof is of an older head. An
                # answer without a signature asks the peer to begin again.
                return LogHeads()
            self._require_going_on(peer, held, seen, _proof_in(call))
            self._keep_own(peer, own, call.cosigned, seen)
            return LogHeads(cosigned=str(self._keep(peer, seen)))

    # -- both roles
    # ----------------------------------------------------------------------

    def read_last(self, peer: str) -> StoredHead | None:
        """Returns the last head of a peer's record that it has shown; None if it never has. Raises
        InputError if the file cannot be read.
        """
        path = self._path(peer)
        try:
            # Only the last head is read: a peer can make many.
            return next(_newest_first(path), None)
        except FileNotFoundError:
            return None
        except (OSError, ValueError):
            raise InputError(
                Code.FILE_INVALID,
                f"{path}: is not a readable file of record heads. Restore it from a copy.",
            ) from None

    def _path(self, peer: str) -> Path:
        return self.book.folder / PEERS / f"{peer}.jsonl"

    def _sign_head(self) -> SignedNote:
        return SignedNote(self.book.head()).sign(self._credentials())

    def _shows(self, own: SignedNote, held: StoredHead | None) -> LogHeads:
        head = held.note.head if held is not None else RecordHead("", 0, tree.EMPTY)
        return LogHeads(str(own), chain_pem(self._credentials()), head.origin, head.size)

    def _proof(self, call: LogHeads, own: RecordHead) -> Proof:
        """Returns the proof that a peer asks for, signed. There is none of another record, or of
        more lines than there are; the peer reports that.
        """
        return self._proof_from(call.held_size, own) if call.held_origin == own.origin else Proof()

    def _proof_from(self, size: int, own: RecordHead) -> Proof:
        if not 0 < size <= own.size:
            return Proof()
        hashes = tuple(self.book.consistency(size, own.size))
        return Proof(hashes, sign(self._credentials(), proof_text(size, own, hashes)))

    def _read(self, peer: str, call: LogHeads) -> _Shown:
        """Returns what a peer shows, with its own signature alone. Raises PeerError if it has not
        signed it.
        """
        certificate = verify_chain(
            call.certificates, self._credentials(), peer, "the head of the record"
        )
        try:
            note = SignedNote.read(call.note)
        except ValueError:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: the head of its record cannot be read. Run the same version of this "
                "program at all parties.",
                party=peer,
            ) from None
        if note.head.owner != peer:
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                f"{peer}: showed a head of another party's record (got {note.head.origin})",
                party=peer,
            )
        note = note.select_signatures(peer, certificate)
        if not note.signatures:
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                f"{peer}: the head of its record is not signed with the key of its certificate",
                party=peer,
            )
        chain = x509.load_pem_x509_certificates(call.certificates)[: 1 + MAX_INTERMEDIATES]
        return _Shown(note, certificate, "".join(_pem(cert) for cert in chain))

    def _require_going_on(
        self, peer: str, held: StoredHead | None, seen: _Shown, proof: Proof, of: str = ""
    ) -> None:
        """Raises PeerError if a peer's record does not go on from a head that it has signed.

        ``of``: the party that has passed the head on; '': this party holds it.
        """
        if held is None or is_extension(held.note.head, seen.note.head, proof):
            return
        old, new = held.note.head, seen.note.head
        newer = StoredHead(seen.note, {peer: seen.chain}, now())
        path, why = keep(self.book.folder / PEERS, peer, held, newer, proof)
        lines, holder = f"{old.size:,}", of or self.book.name
        if why:
            public = PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: its record contradicts the head of {lines} lines that it signed and "
                f"{holder} holds: lines were changed or lost. Restore the record of {peer}, or ask "
                "the others to accept the new one.",
                party=peer,
            )
            raise public.privately(
                f"{peer}: its record contradicts the head of {lines} lines that it signed and "
                f"{holder} holds: lines were changed or lost; the evidence is {path}. Ask {peer} "
                f"for its record, or accept the new one: vfl-party disclosures accept PARTY {peer}"
            )
        if old.origin != new.origin:
            public = PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: showed another record than the one whose head of {lines} lines {holder} "
                f"holds. Restore the record of {peer}, or ask the others to accept the new one.",
                party=peer,
            )
            raise public.privately(
                f"{peer}: showed another record than the one whose head of {lines} lines {holder} "
                f"holds; both heads, which are no evidence, are in {path}. Ask {peer} for its "
                f"record, or accept the new one: vfl-party disclosures accept PARTY {peer}"
            )
        public = PeerError(
            Code.MALFORMED_MESSAGE,
            f"{peer}: did not prove that its record extends the head of {lines} lines that it "
            f"signed and {holder} holds. Restore the record of {peer}, or ask the others to accept "
            "the new one.",
            party=peer,
        )
        raise public.privately(
            f"{peer}: did not prove that its record extends the head of {lines} lines that it "
            f"signed and {holder} holds; both heads, which are no evidence, are in {path}. Ask "
            f"{peer} for its record, or accept the new one: vfl-party disclosures accept PARTY "
            f"{peer}"
        )

    def _keep_own(self, peer: str, own: SignedNote, cosigned: str, seen: _Shown) -> None:
        """Keeps the head of this party's record with the peer's signature. Raises PeerError if the
        peer has not signed it.
        """
        try:
            # Nothing else that it has put there.
            note = SignedNote.read(cosigned).select_signatures(peer, seen.certificate)
        except ValueError:
            note = SignedNote(RecordHead("", 0, b""))
        if note.head != own.head or not note.signatures:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: did not sign the head of the record of {self.book.name}",
                party=peer,
            )
        certificates = {
            self.book.name: chain_pem(self._credentials()).decode(),
            peer: seen.chain,
        }
        own_head = StoredHead(own.with_those_of(note), certificates, now())
        _append(self.book.folder / OWN, own_head.line)

    def _keep(self, peer: str, seen: _Shown) -> SignedNote:
        """Keeps a peer's head, and notes in this party's record that it was shown; returns it with
        this party's signature.
        """
        credentials = self._credentials()
        note, certificates = (
            seen.cosign(peer, credentials),
            {peer: seen.chain, self.book.name: chain_pem(credentials).decode()},
        )
        head, pin = note.head, pin_of(seen.certificate)
        self.book.add(head=peer, key=pin, origin=head.origin, size=head.size, root=head.root.hex())
        _append(self._path(peer), StoredHead(note, certificates, now()).line)
        self.met[peer] = pin
        return note


def read_signed_heads(folder: Path) -> list[StoredHead]:
    """Returns the heads of a party's own record that it and its peers have signed, the oldest
    first, without lines that a killed process has not finished; none if there is no file. Raises
    InputError if it cannot be read.
    """
    path = folder / OWN
    try:
        return [*_newest_first(path)][::-1] if path.is_file() else []
    except (OSError, UnicodeDecodeError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a readable file of record heads. Restore it from a copy.",
        ) from None


def _newest_first(path: Path) -> Iterator[StoredHead]:
    for line in reversed(path.read_text(encoding="utf-8").split("\n")):
        with contextlib.suppress(ValueError):
            yield StoredHead.read(line)


def accept(folder: Path, peer: str) -> Path:
    """Sets the held heads of a peer aside, so that its next head is taken whatever it is. Returns
    where they are now. Raises InputError if there are none.
    """
    if not PLAIN_NAME.fullmatch(peer):
        raise InputError(
            Code.CONFIG_INVALID,
            f"PEER: not a valid party name (got {make_printable(peer)}). Pass the name of a party.",
        )
    path = folder / PEERS / f"{peer}.jsonl"
    # What was set aside before stays.
    aside = path.with_name(f"{peer}.until-{now():.6f}.jsonl")
    try:
        path.rename(aside)
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: no heads of {peer} can be set aside ({error.strerror}). Check the name of "
            "the peer.",
        ) from None
    return aside


def _set_aside(folder: Path, peer: str) -> set[str]:
    """Returns the names of a peer's records in place of which a person has accepted another."""
    files = (folder / PEERS).glob(f"{peer}.until-*.jsonl")
    newest = (next(_newest_first(path), None) for path in files)
    return {held.note.head.origin for held in newest if held is not None}


def _state(held: StoredHead) -> tuple[str, int, bytes]:
    head = held.note.head
    return head.origin, head.size, head.root


def _proof_in(call: LogHeads) -> Proof:
    return Proof(call.proof, call.proof_signature)


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _append(path: Path, line: str) -> None:
    """Appends a line to a file that only its owner may read. Raises InputError."""
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(file).st_size
            whole = size == 0 or os.pread(file, 1, size - 1) == b"\n"
            data = f"{'' if whole else chr(10)}{line}\n".encode()
            if os.write(file, data) != len(data):
                os.ftruncate(file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)
    except OSError as error:
        raise write_error(path, error) from None
