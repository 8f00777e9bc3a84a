"""Exchanges the heads of records between the active party and a passive party.

Each party sends the head of its record, stores the last head of each peer, and requests a proof
that the peer's record extends the stored head.

A passive party calls the active party twice. The first call has the passive party's head, and says
which head of the active party it has stored. The answer has the active party's head, which head it
has stored, and its proof. The second call has the passive party's proof, and the active party's
note with the passive party's signature. The answer has the passive party's note, signed.

If a head does not extend the stored head, both are kept with the peer's signatures. If they
contradict each other, they are evidence; see ``note``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from vfl_common.errors import Code, InputError, PeerError
from vfl_common.files import PLAIN_NAME, write_error
from vfl_common.identity.credentials import Credentials
from vfl_common.identity.pem import MAX_INTERMEDIATES, compute_pin
from vfl_common.identity.signing import encode_chain, sign, verify_chain
from vfl_common.rpc.ask import MAX_OTHER_HEADS, LogHeads
from vfl_common.text import make_printable, to_json
from vfl_party.record import tree
from vfl_party.record.book import RecordBook, now
from vfl_party.record.note import (
    Proof,
    RecordHead,
    SignedNote,
    StoredHead,
    is_cosigned_by,
    is_extension,
    keep_evidence,
    proof_text,
)

PEERS, OWN = "peers", "heads.jsonl"
# The maximum number of attempts of a passive party. Another program of the same party may exchange
# a later head at the same time.
_TRIES = 3
# The maximum number of calls of a peer in one process, because each call adds a line to the record.
_MAX_CALLS = 2000


@dataclass(frozen=True)
class _PeerHead:
    """A head that a peer sent and signed, with its certificate and its certificate chain in PEM."""

    note: SignedNote
    certificate: x509.Certificate
    chain: str

    def cosign(self, peer: str, credentials: Credentials) -> SignedNote:
        """Adds this party's cosignature in the format that the peer's version supports."""
        older = not self.note.is_cosigned_by(peer, self.certificate)
        return self.note.sign(credentials, older=older)


class HeadExchange:
    """Exchanges heads of records with peers. Any thread may call it.

    Args:
        book: This party's record.
        credentials: Returns the party's credentials that are currently in use.
    """

    def __init__(self, book: RecordBook, credentials: Callable[[], Credentials]) -> None:
        self.book, self._credentials = book, credentials
        self._lock = threading.Lock()
        # {peer: (its head, this party's note, the peer's stored head)} between its two calls.
        self._between: dict[str, tuple[_PeerHead, SignedNote, StoredHead | None]] = {}
        # {peer: the pin of its key} for the peers that sent a head to this process.
        self.met: dict[str, str] = {}
        # {passive party: the active party's head that it has stored}; see ``relay``.
        self.relayed: dict[str, StoredHead] = {}
        # The size of this record when the active party last cosigned its head.
        self._cosigned_size = -1
        self._calls: Counter[str] = Counter()

    # -- a passive party
    # ----------------------------------------------------------------------

    def confer(self, peer: str, ask: Callable[[LogHeads], LogHeads]) -> None:
        """Exchanges heads with the active party, as a passive party.

        ``ask``: Makes one call to the active party. Raises PeerError if the active party's record
        does not extend the stored head.
        """
        for remaining_attempts in reversed(range(_TRIES)):
            own_note, stored_head = self._sign_head(), self.read_last(peer)
            relayed_heads = self._choose_relayed_heads(peer, stored_head)
            sizes = tuple(other.note.head.size for _, other in relayed_heads)
            answer = ask(replace(self._make_first_message(own_note, stored_head), also=sizes))
            # Another program of this party may have sent a later head in the meantime.
            has_later_head = (
                answer.held_origin == own_note.head.origin and answer.held_size > own_note.head.size
            )
            if has_later_head and remaining_attempts:
                continue
            peer_head = self._read_peer_head(peer, answer)
            self._require_extension(peer, stored_head, peer_head, _read_proof(answer))
            for (holder, other), proof_fields in zip_longest(
                relayed_heads, answer.proofs[: len(relayed_heads)]
            ):
                self._require_extension(
                    peer, other, peer_head, Proof(*(proof_fields or ())), holder
                )
            proof = self._make_requested_proof(answer, own_note.head)
            cosigned = str(peer_head.cosign(peer, self._credentials()))
            second_call = LogHeads(
                proof=proof.hashes, cosigned=cosigned, proof_signature=proof.signature
            )
            second_answer = ask(second_call)
            # If this is false, another program exchanged heads between the two calls.
            if second_answer.cosigned and self.read_last(peer) == stored_head:
                self._store_own_head(peer, own_note, second_answer.cosigned, peer_head)
                self._store_peer_head(peer, peer_head)
                self._cosigned_size = own_note.head.size
                return
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{peer}: did not sign the head of the record of {self.book.name}",
            party=peer,
        )

    def _choose_relayed_heads(
        self, peer: str, stored_head: StoredHead | None
    ) -> list[tuple[str, StoredHead]]:
        """Chooses random heads of the active party's record that other passive parties have stored.

        Returns (passive party, head) for as many heads as fit in one call. It leaves out heads of
        a record for which a person has accepted another record.
        """
        known_states = {_key_of_head(stored_head)} if stored_head is not None else set()
        replaced_records = _replaced_records(self.book.folder, peer)
        candidates = [
            (holder, other)
            for holder, other in self.relayed.items()
            if _key_of_head(other) not in known_states
            and other.note.head.origin not in replaced_records
        ]
        return secrets.SystemRandom().sample(candidates, min(len(candidates), MAX_OTHER_HEADS))

    @property
    def has_news(self) -> bool:
        """Whether the record has new lines since the active party last signed this party's head."""
        return self.book.head().size > self._cosigned_size + 1

    def seal(self) -> None:
        """Signs and stores the head of the record at the end of a program."""
        certificates = {self.book.name: encode_chain(self._credentials()).decode()}
        _append(self.book.folder / OWN, StoredHead(self._sign_head(), certificates, now()).line)

    # -- the active party
    # ----------------------------------------------------------------------

    def answer(self, peer: str, call: LogHeads) -> LogHeads:
        """Answers a call of a passive party's ``confer``.

        Raises PeerError if the passive party's record does not extend the stored head.
        """
        with self._lock:
            self._calls[peer] += 1
            if self._calls[peer] > _MAX_CALLS:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{peer}: sent the head of its record more than {_MAX_CALLS:,} times",
                    party=peer,
                )
            if call.note:
                peer_head = self._read_peer_head(peer, call)
                own_note, stored_head = self._sign_head(), self.read_last(peer)
                self._between[peer] = peer_head, own_note, stored_head
                proof = self._make_requested_proof(call, own_note.head)
                proofs = (self._make_proof(size, own_note.head) for size in call.also)
                return replace(
                    self._make_first_message(own_note, stored_head),
                    proof=proof.hashes,
                    proof_signature=proof.signature,
                    proofs=tuple((proof_.hashes, proof_.signature) for proof_ in proofs),
                )
            if peer not in self._between:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{peer}: did not send the head of its record",
                    party=peer,
                )
            peer_head, own_note, stored_head = self._between.pop(peer)
            if self.read_last(peer) != stored_head:
                # Other programs of both parties exchanged heads in the meantime, so the proof is
                # for an older head. An answer without a signature makes the peer start again.
                return LogHeads()
            self._require_extension(peer, stored_head, peer_head, _read_proof(call))
            self._store_own_head(peer, own_note, call.cosigned, peer_head)
            return LogHeads(cosigned=str(self._store_peer_head(peer, peer_head)))

    # -- both roles
    # ----------------------------------------------------------------------

    def read_last(self, peer: str) -> StoredHead | None:
        """Returns the last head that a peer sent, or None if there is none.

        Raises InputError if the file cannot be read.
        """
        path = self._path(peer)
        try:
            # This parses only the last head, because a peer can send many.
            return next(_yield_newest_first(path), None)
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

    def _make_first_message(self, own_note: SignedNote, stored_head: StoredHead | None) -> LogHeads:
        head = stored_head.note.head if stored_head is not None else RecordHead("", 0, tree.EMPTY)
        return LogHeads(str(own_note), encode_chain(self._credentials()), head.origin, head.size)

    def _make_requested_proof(self, call: LogHeads, own_head: RecordHead) -> Proof:
        """Returns the signed proof that a peer requests.

        The proof is empty if the peer has stored a head of another record or of more lines than
        there are. The peer then reports an error.
        """
        return (
            self._make_proof(call.held_size, own_head)
            if call.held_origin == own_head.origin
            else Proof()
        )

    def _make_proof(self, size: int, own_head: RecordHead) -> Proof:
        if not 0 < size <= own_head.size:
            return Proof()
        hashes = tuple(self.book.consistency(size, own_head.size))
        return Proof(hashes, sign(self._credentials(), proof_text(size, own_head, hashes)))

    def _read_peer_head(self, peer: str, call: LogHeads) -> _PeerHead:
        """Returns the head in a peer's message, with only the peer's signature.

        Raises PeerError if the head is invalid or not signed by the peer.
        """
        certificate = verify_chain(
            call.certificates, self._credentials(), peer, "the head of the record"
        )
        try:
            note = SignedNote.read(call.note)
        except ValueError:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: sent an invalid head of its record. Run the same version of this program "
                "at all parties.",
                party=peer,
            ) from None
        if note.head.owner != peer:
            raise PeerError(
                Code.IDENTITY_MISMATCH,
                f"{peer}: sent a head of another party's record (got {note.head.origin})",
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
        return _PeerHead(note, certificate, "".join(_to_pem(cert) for cert in chain))

    def _require_extension(
        self,
        peer: str,
        stored_head: StoredHead | None,
        peer_head: _PeerHead,
        proof: Proof,
        relayed_by: str = "",
    ) -> None:
        """Raises PeerError if a peer's record does not extend a head that the peer signed.

        ``relayed_by``: The party that relayed the stored head, or '' for this party.
        """
        if stored_head is None or is_extension(stored_head.note.head, peer_head.note.head, proof):
            return
        old, new = stored_head.note.head, peer_head.note.head
        newer = StoredHead(peer_head.note, {peer: peer_head.chain}, now())
        path, contradiction = keep_evidence(
            self.book.folder / PEERS, peer, stored_head, newer, proof
        )
        line_count, holder = f"{old.size:,}", relayed_by or self.book.name
        if contradiction:
            public = PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: its record contradicts the head of {line_count} lines that it signed and "
                f"{holder} holds: lines were changed or lost. Restore the record of {peer}, or ask "
                "the others to accept the new one.",
                party=peer,
            )
            raise public.privately(
                f"{peer}: its record contradicts the head of {line_count} lines that it signed and "
                f"{holder} holds: lines were changed or lost; the evidence is {path}. Ask {peer} "
                f"for its record, or accept the new one: vfl-party disclosures accept PARTY {peer}"
            )
        if old.origin != new.origin:
            public = PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: sent the head of another record than the one whose head of {line_count} "
                f"lines {holder} holds. Restore the record of {peer}, or ask the other parties to "
                "accept the new one.",
                party=peer,
            )
            raise public.privately(
                f"{peer}: sent the head of another record than the one whose head of {line_count} "
                f"lines {holder} holds; both heads, which are no evidence, are in {path}. Ask "
                f"{peer} for its record, or accept the new one: vfl-party disclosures accept PARTY "
                f"{peer}"
            )
        public = PeerError(
            Code.MALFORMED_MESSAGE,
            f"{peer}: did not prove that its record extends the head of {line_count} lines that it "
            f"signed and {holder} holds. Restore the record of {peer}, or ask the others to accept "
            "the new one.",
            party=peer,
        )
        raise public.privately(
            f"{peer}: did not prove that its record extends the head of {line_count} lines that it "
            f"signed and {holder} holds; both heads, which are no evidence, are in {path}. Ask "
            f"{peer} for its record, or accept the new one: vfl-party disclosures accept PARTY "
            f"{peer}"
        )

    def _store_own_head(
        self, peer: str, own_note: SignedNote, cosigned: str, peer_head: _PeerHead
    ) -> None:
        """Stores the head of this party's record with the peer's signature.

        Raises PeerError if the peer has not signed the head.
        """
        try:
            # This drops everything else that the peer added to the note.
            note = SignedNote.read(cosigned).select_signatures(peer, peer_head.certificate)
        except ValueError:
            note = SignedNote(RecordHead("", 0, b""))
        if note.head != own_note.head or not note.signatures:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{peer}: did not sign the head of the record of {self.book.name}",
                party=peer,
            )
        certificates = {
            self.book.name: encode_chain(self._credentials()).decode(),
            peer: peer_head.chain,
        }
        own_head = StoredHead(own_note.with_those_of(note), certificates, now())
        _append(self.book.folder / OWN, own_head.line)

    def _store_peer_head(self, peer: str, peer_head: _PeerHead) -> SignedNote:
        """Stores a peer's head and adds a line about it to this party's record.

        Returns the peer's note with this party's signature.
        """
        credentials = self._credentials()
        note, certificates = (
            peer_head.cosign(peer, credentials),
            {peer: peer_head.chain, self.book.name: encode_chain(credentials).decode()},
        )
        head, pin = note.head, compute_pin(peer_head.certificate)
        self.book.add(head=peer, key=pin, origin=head.origin, size=head.size, root=head.root.hex())
        _append(self._path(peer), StoredHead(note, certificates, now()).line)
        self.met[peer] = pin
        return note


def read_signed_heads(folder: Path) -> list[StoredHead]:
    """Returns the signed heads of a party's own record, the oldest first.

    It ignores incomplete lines of a killed process. Without a file it returns an empty list. Raises
    InputError if the file cannot be read.
    """
    path = folder / OWN
    try:
        return [*_yield_newest_first(path)][::-1] if path.is_file() else []
    except (OSError, UnicodeDecodeError):
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: is not a readable file of record heads. Restore it from a copy.",
        ) from None


def _yield_newest_first(path: Path) -> Iterator[StoredHead]:
    for line in reversed(path.read_text(encoding="utf-8").split("\n")):
        with contextlib.suppress(ValueError):
            yield StoredHead.read(line)


def accept(folder: Path, peer: str) -> Path:
    """Renames the file with a peer's stored heads, so that the next head of the peer is accepted.

    Returns the new path of the file. Raises InputError if there is no file.
    """
    if not PLAIN_NAME.fullmatch(peer):
        raise InputError(
            Code.CONFIG_INVALID,
            f"PEER: not a valid party name (got {make_printable(peer)}). Pass the name of a party.",
        )
    path = folder / PEERS / f"{peer}.jsonl"
    # The time in the name keeps files that were renamed earlier.
    new_path = path.with_name(f"{peer}.until-{now():.6f}.jsonl")
    try:
        path.rename(new_path)
    except OSError as error:
        raise InputError(
            Code.FILE_INVALID,
            f"{path}: cannot rename the file with the heads of {peer} ({error.strerror}). Check "
            "the name of the peer.",
        ) from None
    return new_path


def _replaced_records(folder: Path, peer: str) -> set[str]:
    """Returns the names of a peer's records that a person has replaced by accepting another one."""
    files = (folder / PEERS).glob(f"{peer}.until-*.jsonl")
    newest = (next(_yield_newest_first(path), None) for path in files)
    return {held.note.head.origin for held in newest if held is not None}


def _key_of_head(held: StoredHead) -> tuple[str, int, bytes]:
    head = held.note.head
    return head.origin, head.size, head.root


def _read_proof(call: LogHeads) -> Proof:
    return Proof(call.proof, call.proof_signature)


def _to_pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _append(path: Path, line: str) -> None:
    """Appends a line to a file that only its owner may read. Raises InputError if this fails."""
    try:
        path.parent.mkdir(exist_ok=True, mode=0o700)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            size = os.fstat(file).st_size
            ends_with_newline = size == 0 or os.pread(file, 1, size - 1) == b"\n"
            data = f"{'' if ends_with_newline else chr(10)}{line}\n".encode()
            if os.write(file, data) != len(data):
                os.ftruncate(file, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(file)
    except OSError as error:
        raise write_error(path, error) from None


log = logging.getLogger(__name__)


class HeadRelay:
    """Sends this party's stored head of the active party's record, and receives those of others.

    Passive parties do not call each other. A dishonest active party could therefore keep a separate
    record for each of them. To detect this, each passive party sends its stored head of the active
    party's record when it joins, and the server relays this head unread. The other passive parties
    then ask the active party for a proof that its record extends this head. They ask in the call in
    which they exchange heads, so that all proofs are for the same new head. Heads without a
    cosignature come from an active party of an older version, which gives no such proofs, and are
    not relayed.

    It implements ``vfl_party.policy.meeting.RunGuard``.

    Args:
        heads: This party's exchange of heads.
        me: The name of this party.
        active: The name of the active party.
        credentials: Returns the party's current credentials.
    """

    key = "head"

    def __init__(
        self, heads: HeadExchange, me: str, active: str, credentials: Callable[[], Credentials]
    ) -> None:
        self._heads, self._me, self._active = heads, me, active
        self._credentials = credentials

    def before(self, asked: object) -> None:
        """Does nothing, because a planned run has no heads yet."""

    def shows(self) -> dict[str, Any] | None:
        """Returns the newest stored head of the active party, with only its own signatures."""
        held = self._heads.read_last(self._active) if self._me != self._active else None
        if held is None or not self._is_signed_by_active(held):
            return None
        fields: dict[str, Any] = json.loads(self._keep_own_signatures(held).line)
        return fields

    def meet(self, run_id: str, heads: Mapping[str, Any]) -> None:
        """Stores the heads from other passive parties for the next call to the active party.

        It ignores heads that the active party did not sign, and logs a warning.
        """
        _ = run_id
        relayed = {}
        for peer, value in heads.items():
            if peer in (self._me, self._active) or value is None:
                continue
            try:
                held = self._keep_own_signatures(StoredHead.read(to_json(value)))
                if self._is_signed_by_active(held):
                    relayed[peer] = held
                    continue
            except ValueError:
                pass
            log.warning(
                "ignoring the head of the record of %s that %s passes on: it is not signed by %s",
                self._active,
                peer,
                self._active,
                extra={"event": "record"},
            )
        self._heads.relayed = relayed

    def _is_signed_by_active(self, held: StoredHead) -> bool:
        is_own_record = held.note.head.owner == self._active
        return is_own_record and is_cosigned_by(held, self._active, self._credentials())

    def _keep_own_signatures(self, held: StoredHead) -> StoredHead:
        """Returns a head with only the active party's signatures."""
        signatures = tuple(
            signature for signature in held.note.signatures if signature[0] == self._active
        )
        chain = {self._active: held.certificates.get(self._active, "")}
        return StoredHead(SignedNote(held.note.head, signatures), chain)
