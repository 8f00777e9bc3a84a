"""The first exchange of a private set intersection: the parties agree on an attempt and its
remaining batches.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from vfl_common.errors import Code, InputError, LostError, PeerError
from vfl_party.align import batches
from vfl_party.align.exchanges import (
    HELLO,
    INTRODUCTION_BYTES,
    NAME_BYTES,
    bytes_to_tensor,
    to_tensor,
)
from vfl_party.align.ring import PsiRing
from vfl_party.align.state import NO_ATTEMPT, AlignmentFiles, Attempt
from vfl_party.psi import sealed
from vfl_party.rr22.turns import divide

log = logging.getLogger(__name__)
Engine = Literal["auto", "rr22", "x25519"]
# With ``engine = "auto"``, smaller tables use X25519, which takes about a second for them.
MIN_ROWS = 20_000


@dataclass(frozen=True)
class Agreement:
    """The decision that the parties have agreed on.

    Args:
        known: The number of passes whose common rows all parties already know. If this pass is
            one of them, the last fields are empty.
        identity: The key pair with which this party seals messages.
        first: For each round, the first batch that some party lacks; with rr22, the first bucket.
        publics: The public sealing keys of all parties.
        rr22: Whether the parties use rr22.
    """

    known: int
    identity: sealed.KeyPair = field(repr=False)
    first: Sequence[int] = ()
    publics: Sequence[bytes] = ()
    rr22: bool = False


class Meeting:
    """One party's side of the meeting that begins each pass of a generation."""

    def __init__(self, ring: PsiRing, files: AlignmentFiles, engine: Engine) -> None:
        self._ring, self._files, self._engine = ring, files, engine
        self._offers = engine != "x25519"
        self._identity = sealed.KeyPair.new()

    def meet(self, *, known: int) -> Agreement:
        """Agrees with the other parties on an attempt and its remaining batches.

        ``known``: The number of passes whose common rows this party had at the beginning. Raises
        PeerError.
        """
        ring, step, k = self._ring, self._ring.make_step(0, 0), self._ring.size
        table, attempt = ring.context.table, self._files.attempt
        hello = {
            "rows": to_tensor(len(table)),
            "attempt": bytes_to_tensor(attempt.name),
            "masked": to_tensor(*(self._files.count_stored(round_) for round_ in range(1, k + 1))),
            "known": to_tensor(known, dtype=torch.uint8),
            "introduction": bytes_to_tensor(self._make_introduction()),
            "rr22": to_tensor(int(self._offers), dtype=torch.uint8),
            "buckets": to_tensor(self._files.count_buckets()),
        }
        if ring.me:
            decision = ring.make_asking(HELLO, parties=k).swap(step, hello)
        else:
            answering = ring.make_answering(HELLO, parties=k)
            received = answering.collect(step)
            decision = self._decide({ring.active: hello, **received})
            answering.reply_all(step, received, decision)
        ring.rows = decision["rows"].tolist()
        first_batches = decision["first"].tolist()
        all_known = int(decision["known"][0])
        if all_known > known:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.active}: reported that all parties know the common rows, but "
                f"{ring.context.name} does not. Begin a new run.",
                party=ring.active,
            )
        if all_known > self._ring.number:
            return Agreement(all_known, self._identity)
        are_valid = all(rows > 0 for rows in ring.rows) and ring.rows[ring.me] == len(table)
        # The active party has checked these numbers, so a wrong one is its own fault.
        if not are_valid:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.active}: announced impossible numbers of rows (got {ring.rows}). Begin a "
                "new run.",
                party=ring.active,
            )
        for other, rows in zip(ring.names, ring.rows, strict=True):
            self._check_limit(other, rows)
        publics = [
            self._read_public_key(number, introduction.numpy().tobytes())
            for number, introduction in enumerate(decision["introductions"])
        ]
        uses_rr22 = bool(decision["rr22"][0])
        self._check_engine(uses_rr22)
        name = decision["attempt"].numpy().tobytes()
        if name != attempt.name or name == NO_ATTEMPT:
            ring.context.begins()
            self._files.begin(
                Attempt(
                    name,
                    os.urandom(32),
                    os.urandom(32),
                    make_salt(name, publics),
                    tuple(ring.rows),
                )
            )
        elif attempt.rows != tuple(ring.rows):
            # Masking another set of rows with the same secrets would reveal which rows have
            # changed.
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.active}: resumes an alignment in which the parties had different numbers "
                "of rows. Begin a new run.",
                party=ring.active,
            )
        else:
            self._resume(first_batches, uses_rr22)
        self._check_first_batches(first_batches, uses_rr22)
        return Agreement(all_known, self._identity, first_batches, publics, rr22=uses_rr22)

    def _check_engine(self, uses_rr22: bool) -> None:
        """Raises PeerError if the active party's engine is not one that this party offers."""
        ring = self._ring
        if uses_rr22 and not self._offers:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.active}: begins an alignment by rr22, which {ring.context.name} does not "
                "offer. Begin a new run.",
                party=ring.active,
            )
        if self._engine == "rr22" and not uses_rr22:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.active}: begins an alignment by x25519, but the recipe asks for rr22. "
                "Begin a new run.",
                party=ring.active,
            )

    def _resume(self, first_batches: Sequence[int], uses_rr22: bool) -> None:
        """Reports that an attempt is resumed, and counts it if it may reveal more rows."""
        ring, total = self._ring, sum(self._ring.rows)
        if uses_rr22 or self._files.used_rr22:
            # The other party may come back with other ids in the remaining buckets, or may have
            # learned common rows of other ids.
            ring.context.begins()
        if uses_rr22:
            masked_rows = total * first_batches[0] // divide(*ring.rows).number
        else:
            masked_rows = sum(
                min(self._files.count_stored(round_), ring.rows[ring.find_owner(round_)])
                for round_ in range(1, ring.size + 1)
            )
        log.info(
            "resuming the alignment: %d of %d ids are masked",
            masked_rows,
            total,
            extra={"event": "realigning"},
        )
        ring.context.show("realigning", masked=masked_rows, of=total)

    def _check_first_batches(self, first_batches: Sequence[int], uses_rr22: bool) -> None:
        """Removes incomplete batches of masked points. Raises PeerError if the active party skips
        batches or buckets that this party lacks.
        """
        ring, k = self._ring, self._ring.size
        if uses_rr22:
            if not 0 <= first_batches[0] <= self._files.count_buckets():
                raise self._make_skip_error()
            return
        for round_ in range(1, k + 1):
            self._files.cut(round_, ring.rows[ring.find_owner(round_)])
        for round_ in range(1, k):
            saved_rows, rows = (
                self._files.count_stored(round_ + 1),
                ring.rows[ring.find_owner(round_ + 1)],
            )
            if (
                not 0
                <= first_batches[round_ - 1]
                <= (saved_rows // batches.BATCH if saved_rows < rows else ring.batches)
            ):
                raise self._make_skip_error()

    def _make_skip_error(self) -> PeerError:
        active, me = self._ring.active, self._ring.context.name
        return PeerError(
            Code.MALFORMED_MESSAGE,
            f"{active}: skips batches that {me} lacks. Begin a new run.",
            party=active,
        )

    def _decide(self, hellos: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Decides at the active party which batches remain, from the ``HELLO`` messages of all
        parties.

        Raises PeerError, which names a party with impossible values; LostError if a party has left
        the run and the common rows are not known.
        """
        k = self._ring.size
        for name, hello in hellos.items():
            rows, masked = int(hello["rows"][0]), int(hello["masked"].min())
            if rows <= 0:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{name}: must have at least one row (got {rows}). Give it rows.",
                    party=name,
                )
            if masked < 0:
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{name}: announced an impossible number of masked rows (got {masked}). Begin "
                    "a new run.",
                    party=name,
                )
        known = min(int(hello["known"][0]) for hello in hellos.values())
        absent = [name for name in self._ring.names if name not in hellos]
        if known > self._ring.number and not (absent and known < self._ring.passes):
            return {
                "rows": torch.zeros(k, dtype=torch.int64),
                "attempt": bytes_to_tensor(NO_ATTEMPT),
                "first": torch.zeros(k, dtype=torch.int64),
                "known": to_tensor(known, dtype=torch.uint8),
                "rr22": to_tensor(0, dtype=torch.uint8),
                "introductions": torch.zeros(k, INTRODUCTION_BYTES, dtype=torch.uint8),
            }
        for name, hello in hellos.items():
            self._check_limit(name, int(hello["rows"][0]))
        if absent:
            raise LostError(
                Code.PARTY_LOST,
                f"{absent[0]}: has left the run, and the common rows cannot be found without "
                "it. Begin a new run.",
                party=absent[0],
            )
        self._ring.rows = [int(hellos[name]["rows"][0]) for name in self._ring.names]
        attempts = {hello["attempt"].numpy().tobytes() for hello in hellos.values()}
        is_resumed = (
            len(attempts) == 1
            and attempts != {NO_ATTEMPT}
            and self._files.attempt.rows == tuple(self._ring.rows)
        )
        uses_rr22 = all(bool(hello["rr22"][0]) for hello in hellos.values()) and (
            self._engine == "rr22" or max(self._ring.rows) >= MIN_ROWS
        )
        saved_buckets = min(int(hello["buckets"][0]) for hello in hellos.values())
        first_batches = [max(0, saved_buckets) if is_resumed else 0] if uses_rr22 else []
        for round_ in () if uses_rr22 else range(1, k):
            missing_batches = [self._ring.batches]
            for receiver, name in enumerate(self._ring.names):
                rows = self._ring.rows[(receiver - round_) % k]
                saved_rows = int(hellos[name]["masked"][round_]) if is_resumed else 0
                if saved_rows < rows:
                    missing_batches.append(saved_rows // batches.BATCH)
            first_batches.append(min(missing_batches))
        return {
            "rows": to_tensor(*self._ring.rows),
            "attempt": bytes_to_tensor(attempts.pop() if is_resumed else os.urandom(NAME_BYTES)),
            "first": to_tensor(*first_batches, 0),
            "known": to_tensor(known, dtype=torch.uint8),
            "rr22": to_tensor(int(uses_rr22), dtype=torch.uint8),
            "introductions": torch.stack(
                [hellos[name]["introduction"] for name in self._ring.names]
            ),
        }

    def _check_limit(self, name: str, rows: int) -> None:
        """Raises PeerError (REFUSED) if another party has more rows than this party is willing to
        mask.
        """
        me, limit = self._ring.context.name, self._ring.context.peer_rows_at_most
        if name != me and rows > limit:
            raise PeerError(
                Code.REFUSED,
                f"{name}: announces {rows:,} rows, but {me} masks at most {limit:,} of another "
                f"party. Raise peer_rows_at_most in the party file of {me}, or align fewer rows.",
                party=name,
            )

    def _make_introduction(self) -> bytes:
        """Returns the padded introduction of this party's sealing key, signed unless all parties
        are in one process.

        Raises InputError if this party's certificate is too long.
        """
        credentials = self._ring.context.credentials
        introduction = (
            self._identity.public
            if credentials is None
            else self._identity.introduction(credentials, self._ring.context.run_id.encode())
        )
        if credentials is not None and len(introduction) + 2 > INTRODUCTION_BYTES:
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{credentials.certificate_file}: the introduction of {self._ring.context.name} "
                f"must have at most {INTRODUCTION_BYTES - 2} bytes (got {len(introduction)}). Use "
                "a certificate with fewer names or a shorter key.",
            )
        return (len(introduction).to_bytes(2, "little") + introduction).ljust(
            INTRODUCTION_BYTES, b"\0"
        )

    def _read_public_key(self, number: int, padded: bytes) -> bytes:
        """Returns the sealing key of the party ``number``. Raises PeerError if another party signed
        the introduction.
        """
        size, introduction = int.from_bytes(padded[:2], "little"), padded[2:]
        credentials = self._ring.context.credentials
        # This party uses its own key and not the copy from the active party, because the keys
        # determine the salt of the digests.
        if number == self._ring.me:
            return self._identity.public
        if credentials is None:
            return introduction[: sealed.PUBLIC_BYTES]
        return sealed.verify_introduction(
            introduction[:size],
            credentials,
            self._ring.names[number],
            self._ring.context.run_id.encode(),
        )


def make_salt(attempt: bytes, publics: Sequence[bytes]) -> bytes:
    """Returns the salt of a new attempt. Nobody can predict it, because each party has just drawn a
    random key.
    """
    return hashlib.sha256(b"vfl common rows" + attempt + b"".join(publics)).digest()
