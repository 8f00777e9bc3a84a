"""The meeting of the parties of a private set intersection: they agree on an attempt and its
remaining batches.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError, LostError, PeerError
from vfl_common.psi import PHASE
from vfl_party.align import batches
from vfl_party.align.exchanges import HELLO, INTRODUCTION_BYTES, NAME_BYTES, ints, raw
from vfl_party.align.ring import PsiRing
from vfl_party.align.state import NO_ATTEMPT, AlignmentFiles, Attempt
from vfl_party.psi import sealed

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Agreement:
    """What the parties have agreed on.

    Args:
        known: all know the common rows; the other fields are then empty.
        identity: this party's key for sealing.
        first: the first batch of each round that some party lacks.
        publics: all parties' public keys for sealing.
    """

    known: bool
    identity: sealed.KeyPair = field(repr=False)
    first: Sequence[int] = ()
    publics: Sequence[bytes] = ()


class Meeting:
    """One party's side of the meeting that begins each generation."""

    def __init__(self, ring: PsiRing, files: AlignmentFiles) -> None:
        self._ring, self._files = ring, files
        self._identity = sealed.KeyPair.new()

    def meet(self, *, known: bool) -> Agreement:
        """Agrees with the others on an attempt and on its remaining batches. Raises PeerError."""
        ring, step, k = self._ring, StepKey(PHASE, 0, 0), self._ring.size
        table, before = ring.at.table, self._files.attempt
        mine = {
            "rows": ints(len(table)),
            "attempt": raw(before.name),
            "masked": ints(*(self._files.count_stored(round_) for round_ in range(1, k + 1))),
            "known": ints(int(known), dtype=torch.uint8),
            "introduction": raw(self._introduction()),
        }
        if ring.me:
            decision = ring.asking(HELLO, parties=k).swap(step, mine)
        else:
            answering = ring.answering(HELLO, parties=k)
            received = answering.collect(step)
            decision = self._decide({ring.active: mine, **received})
            answering.reply_all(step, received, decision)
        ring.rows = decision["rows"].tolist()
        first = decision["first"].tolist()
        if decision["known"][0]:
            return Agreement(True, self._identity)
        fit = all(rows > 0 for rows in ring.rows) and ring.rows[ring.me] == len(table)
        # The active party has looked at each.
        if not fit:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.active}: announced impossible numbers of rows (got {ring.rows}). Begin a "
                "new run.",
                party=ring.active,
            )
        for other, rows in zip(ring.names, ring.rows, strict=True):
            self._require_masks(other, rows)
        publics = [
            self._public(number, introduction.numpy().tobytes())
            for number, introduction in enumerate(decision["introductions"])
        ]
        name = decision["attempt"].numpy().tobytes()
        if name != before.name or name == NO_ATTEMPT:
            ring.at.begins()
            self._files.begin(
                Attempt(
                    name,
                    os.urandom(32),
                    os.urandom(32),
                    make_salt(name, publics),
                    tuple(ring.rows),
                )
            )
        elif before.rows != tuple(ring.rows):
            # With the same secrets, another set would show what has changed.
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.active}: goes on with an alignment in which the parties had other numbers "
                "of rows. Begin a new run.",
                party=ring.active,
            )
        else:
            done = sum(
                min(self._files.count_stored(round_), ring.rows[ring.owner(round_)])
                for round_ in range(1, k + 1)
            )
            log.info(
                "resuming the alignment: %d of %d ids are masked",
                done,
                sum(ring.rows),
                extra={"event": "realigning"},
            )
            ring.at.show("realigning", masked=done, of=sum(ring.rows))
        for round_ in range(1, k + 1):
            self._files.cut(round_, ring.rows[ring.owner(round_)])
        for round_ in range(1, k):
            have, rows = (
                self._files.count_stored(round_ + 1),
                ring.rows[ring.owner(round_ + 1)],
            )
            if (
                not 0
                <= first[round_ - 1]
                <= (have // batches.BATCH if have < rows else ring.batches)
            ):
                raise PeerError(
                    Code.MALFORMED_MESSAGE,
                    f"{ring.active}: leaves out batches that {ring.at.name} lacks. Begin a new "
                    "run.",
                    party=ring.active,
                )
        return Agreement(False, self._identity, first, publics)

    def _decide(self, hellos: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Decides, at the active party, what is left to do, from the hellos of all parties in the
        run.

        Raises PeerError, naming a party with impossible values; LostError if a party that has left
        is needed.
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
        if all(bool(hello["known"][0]) for hello in hellos.values()):
            return {
                "rows": torch.zeros(k, dtype=torch.int64),
                "attempt": raw(NO_ATTEMPT),
                "first": torch.zeros(k, dtype=torch.int64),
                "known": ints(1, dtype=torch.uint8),
                "introductions": torch.zeros(k, INTRODUCTION_BYTES, dtype=torch.uint8),
            }
        for name, hello in hellos.items():
            self._require_masks(name, int(hello["rows"][0]))
        gone = [name for name in self._ring.names if name not in hellos]
        if gone:
            raise LostError(
                Code.PARTY_LOST,
                f"{gone[0]}: has left the run, and the rows in common cannot be found without it. "
                "Begin a new run.",
                party=gone[0],
            )
        self._ring.rows = [int(hellos[name]["rows"][0]) for name in self._ring.names]
        attempts = {hello["attempt"].numpy().tobytes() for hello in hellos.values()}
        goes_on = (
            len(attempts) == 1
            and attempts != {NO_ATTEMPT}
            and self._files.attempt.rows == tuple(self._ring.rows)
        )
        first = []
        for round_ in range(1, k):
            lacking = [self._ring.batches]
            for receiver, name in enumerate(self._ring.names):
                rows = self._ring.rows[(receiver - round_) % k]
                have = int(hellos[name]["masked"][round_]) if goes_on else 0
                if have < rows:
                    lacking.append(have // batches.BATCH)
            first.append(min(lacking))
        return {
            "rows": ints(*self._ring.rows),
            "attempt": raw(attempts.pop() if goes_on else os.urandom(NAME_BYTES)),
            "first": ints(*first, 0),
            "known": ints(0, dtype=torch.uint8),
            "introductions": torch.stack(
                [hellos[name]["introduction"] for name in self._ring.names]
            ),
        }

    def _require_masks(self, name: str, rows: int) -> None:
        """Raises PeerError (REFUSED) if another party has more rows than this one masks."""
        me, limit = self._ring.at.name, self._ring.at.peer_rows_at_most
        if name != me and rows > limit:
            raise PeerError(
                Code.REFUSED,
                f"{name}: announces {rows:,} rows, but {me} masks at most {limit:,} of another "
                f"party. Raise peer_rows_at_most in the party file of {me}, or align fewer rows.",
                party=name,
            )

    def _introduction(self) -> bytes:
        """Returns the introduction of this party's sealing key, signed if each party is a process.

        Raises InputError if its certificate is too long.
        """
        credentials = self._ring.at.credentials
        introduction = (
            self._identity.public
            if credentials is None
            else self._identity.introduction(credentials, self._ring.at.run_id.encode())
        )
        if credentials is not None and len(introduction) + 2 > INTRODUCTION_BYTES:
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{credentials.certificate_file}: the introduction of {self._ring.at.name} must "
                f"have at most {INTRODUCTION_BYTES - 2} bytes (got {len(introduction)}). Use a "
                "certificate with fewer names or a shorter key.",
            )
        return (len(introduction).to_bytes(2, "little") + introduction).ljust(
            INTRODUCTION_BYTES, b"\0"
        )

    def _public(self, number: int, padded: bytes) -> bytes:
        """Returns a party's sealing key. Raises PeerError if the introduction is not its own."""
        size, introduction = int.from_bytes(padded[:2], "little"), padded[2:]
        credentials = self._ring.at.credentials
        # Whatever the active party says: it salts the digest of the list.
        if number == self._ring.me:
            return self._identity.public
        if credentials is None:
            return introduction[: sealed.PUBLIC_BYTES]
        return sealed.verify_introduction(
            introduction[:size],
            credentials,
            self._ring.names[number],
            self._ring.at.run_id.encode(),
        )


def make_salt(attempt: bytes, publics: Sequence[bytes]) -> bytes:
    """Returns a new attempt's salt, which cannot be known in advance: each party has just drawn a
    key for it.
    """
    return hashlib.sha256(b"vfl common rows" + attempt + b"".join(publics)).digest()
