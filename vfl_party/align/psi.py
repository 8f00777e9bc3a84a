"""Private set intersection: the parties find the rows that all of them hold, and show each other no
other row.

Diffie-Hellman on Curve25519 among any number of parties and the aggregation server; all follow the
protocol, and the server takes no party's side. With the keys a, b, c of the parties A (active), B
and C:

    round 1    A -> B: A's rows, masked by a      B -> C: masked by b         C -> A: masked by c
    round 2    C's rows, masked by c and a        A's rows, by a and b        B's rows, by b and c
    round 3    the last one to mask a set sends tags of it to the server: A of B's rows, B of
               C's, C of A's

Each owner shuffles its rows once, and nobody changes that order. The server compares the tags, and
tells each owner which of its own rows are common. No party ever sees two sets under the same keys,
so none can compare any; the server sees all sets, masked by all keys, so it learns how large they
and their overlaps are, and no id. What B sends C passes A, who answers both: it is sealed for C
(``vfl_party.psi.sealed``). ``docs/explanation/private-alignment.md`` says who learns what.

The rows go in batches, a step each. Every party keeps what it has masked, so that a party that is
killed costs the others the batches that were under way.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.recipe import Recipe
from vfl_common.errors import AbortedError, Code, InputError, LostError, PeerError
from vfl_common.psi import MOST_ROWS, PHASE, TAG_BYTES, least_common, too_few
from vfl_party.align.aligned import Aligned, Aligning
from vfl_party.align.digest import PASSES_FOUND, DigestAlignment, slow_digest
from vfl_party.align.state import NO_ATTEMPT, Attempt, Common, Kept
from vfl_party.data import Table
from vfl_party.outbound.chains import make_chains
from vfl_party.outbound.declared import NOTHING, Exchange, Occurrence, Role, Sent, i64, u8
from vfl_party.outbound.exchange import Answering, Asking
from vfl_party.outbound.policies import Policy
from vfl_party.psi import curve, sealed
from vfl_party.psi.curve import POINT_BYTES
from vfl_party.psi.pool import Masking

log = logging.getLogger(__name__)

CPU = torch.device("cpu")
# Rows: 60 ms of one core, which is about what a death costs.
BATCH = 1 << 11
NAME_BYTES = len(NO_ATTEMPT)
REMEDY = "to align again, remove the folder 'alignment' of the run at either party"
# A public key, a certificate and a signature, with their length in front.
INTRODUCTION_BYTES = 4096

HELLO = Exchange(
    "hello",
    Sent(
        Kind.ROWS,
        {
            "rows": i64(1),
            "attempt": u8(NAME_BYTES),
            # Rows that the party keeps of each round.
            "masked": i64("parties"),
            # Whether it knows the common rows already.
            "known": u8(1),
            "introduction": u8(INTRODUCTION_BYTES),
        },
    ),
    Sent(
        Kind.ROWS,
        {
            "rows": i64("parties"),
            "attempt": u8(NAME_BYTES),
            # The first batch of each round that somebody lacks.
            "first": i64("parties"),
            "known": u8(1),
            "introductions": u8("parties", INTRODUCTION_BYTES),
        },
    ),
    when="once a generation",
)
MASKED = Exchange(
    "masked ids",
    Sent(Kind.ROWS, {"points": u8("up")}),
    Sent(Kind.ROWS, {"points": u8("down")}),
    when="once a batch and round",
)
SIZES = Exchange("sizes", Sent(Kind.ROWS, {"sizes": i64(2)}), NOTHING, asks="server", when="once")
LISTS = Exchange("lists", Sent(Kind.ROWS, {"digest": u8(32)}), NOTHING, asks="server", when="once")
TAGS = Exchange(
    "tags",
    Sent(Kind.ROWS, {"tags": u8("tags")}),
    Sent(Kind.ROWS, {"common": u8("bits")}),
    asks="server",
    when="once",
)


class PsiAlignment:
    """See ``Alignment``."""

    certain = False
    protocol = 8

    def __init__(self, recipe: Recipe, policy: Policy, *, divides: bool = True) -> None:
        self._recipe, self._policy, self._divides = recipe, policy, divides
        self._digest = DigestAlignment(recipe, policy, divides=divides, remedy=REMEDY)

    def occurrences(self, rows: int) -> list[Occurrence]:
        ring = 1 + len(self._recipe.passives)
        found = [Occurrence.of(HELLO, StepKey(PHASE, 0, 0), parties=ring)]
        for round_ in range(1, ring):
            for batch, begin in enumerate(range(0, rows, BATCH)):
                size = min(BATCH, rows - begin) * POINT_BYTES + (sealed.OVERHEAD if ring > 2 else 0)
                found.append(
                    Occurrence.of(MASKED, StepKey(PHASE, round_, batch), up=size, down=size)
                )
        found.append(Occurrence.of(SIZES, StepKey(PHASE, ring, 0)))
        found.append(
            Occurrence.of(TAGS, StepKey(PHASE, ring, 1), tags=rows * TAG_BYTES, bits=-(-rows // 8))
        )
        found.append(Occurrence.of(LISTS, StepKey(PHASE, ring, 2)))
        return [*found, *self._digest.occurrences(rows)]

    def expected(self, table: Table) -> Aligned:
        return self._digest.expected(table)

    def kept(self, at: Aligning) -> Aligned:
        found = Kept(at.folder, at.table.ids, BATCH).common() if self._recipe.passives else None
        if found is None and self._recipe.passives:
            text = (
                f"{at.folder}: does not say which rows all parties hold, and the others are in "
                "the middle of the run"
            )
            raise InputError(
                Code.DATA_INVALID, f"{text}; restore the folder and the rows that it had"
            )
        return self._digest.expected(at.table if found is None else _picked(at.table, found.rows))

    def show(self, at: Aligning, aligned: Aligned) -> None:
        found = Kept(at.folder, at.table.ids, BATCH).common() if self._recipe.passives else None
        self._digest.show(at if found is None else replace(at, salt=found.salt), aligned)

    def found_before(self, runs: Path, name: str, table: Table) -> int | None:
        """Returns how many rows the run of ``rows.alignment`` has found to be common; None if the
        recipe names none.

        ``runs``: the party's folder of runs. Raises InputError if that run cannot be used;
        PeerError if it has too few.
        """
        found = self._of_earlier(Kept(runs, table.ids, BATCH), runs, name)
        return int(found.rows.sum()) if found is not None else None

    def _of_earlier(self, kept: Kept, runs: Path, name: str) -> Common | None:
        rows = self._recipe.rows
        if rows.alignment is None or not self._divides:
            return None
        common = kept.common_of(runs / rows.alignment / name)
        _require_enough(rows.at_least, common.rows)
        return common

    def align(self, at: Aligning) -> Aligned:
        """Finds the common rows, if the run does not know them yet, and compares them as
        ``DigestAlignment`` does.

        Raises PeerError: ROWS_DIFFER if there are fewer than ``rows.at_least`` or ``at.at_least``;
        REFUSED if a party has more than ``at.peer_rows_at_most``; another code if a party or the
        server breaks the protocol. Raises InputError if the file of an earlier alignment does not
        fit.
        """
        if not self._recipe.passives:
            return self._digest.align(at)
        kept = Kept(at.folder, at.table.ids, BATCH)
        common = kept.common()
        if (
            common is None
            and (common := self._of_earlier(kept, at.folder.parent.parent, at.name)) is not None
        ):
            kept.finish(common)
        ring = _Ring(self._recipe, self._policy, at, kept)
        try:
            ring.meet(known=common is not None)
            if not ring.known:
                common = ring.run()
                self._check_enough(common.rows, at)
                ring.compare(
                    [at.table.ids[row] for row in np.flatnonzero(common.rows).tolist()], common.salt
                )
                kept.finish(common)
        except (PeerError, AbortedError):
            # The run ends, and the attempt with it.
            if not ring.known:
                kept.forget()
            raise
        assert common is not None  # noqa: S101 - the ring knows it if this party does
        aligned = self._digest.align(
            replace(at, table=_picked(at.table, common.rows), salt=common.salt)
        )
        # All parties have kept the common rows before they compared them.
        kept.clear()
        return aligned

    def _check_enough(self, common: npt.NDArray[np.bool_], at: Aligning) -> None:
        """Raises PeerError (ROWS_DIFFER) if fewer rows are common than the recipe or this party
        wants.
        """
        if self._divides:
            _require_enough(self._recipe.rows.at_least, common)
        found = int(common.sum())
        if found < at.at_least:
            text = f"fewer rows are held by all parties than {at.name} answers for"
            mine = (
                f"{text}: {found:,} are, and predict.at_least of its party file is {at.at_least:,}"
            )
            raise PeerError(Code.ROWS_DIFFER, text, party=at.name).privately(mine)


def _require_enough(at_least: int | float, common: npt.NDArray[np.bool_]) -> None:
    """Raises PeerError if too few of this party's rows are common."""
    found = int(common.sum())
    if found < least_common(at_least, len(common)):
        raise too_few(at_least, found)


def _picked(table: Table, common: npt.NDArray[np.bool_]) -> Table:
    return table.select(np.flatnonzero(common).astype(np.int64))


class _Ring:
    """One party's place in the ring of all parties: the active party is number 0."""

    def __init__(self, recipe: Recipe, policy: Policy, at: Aligning, kept: Kept) -> None:
        self.names = [recipe.active.name, *(party.name for party in recipe.passives)]
        # Of each party, once they have met.
        self.rows: list[int] = []
        # Whether all know the common rows.
        self.known = False
        self._at, self._kept = at, kept
        self._me, self._size = self.names.index(at.name), len(self.names)
        self._first: list[int] = []
        # Of the parties' keys for sealing.
        self._publics: list[bytes] = []
        role: Role = "passive" if self._me else "active"
        self._chains = {
            each.name: make_chains(recipe, PHASE, each, role, policy)
            for each in (HELLO, MASKED, SIZES, TAGS, LISTS)
        }
        self._server = recipe.server

    # -- how the parties meet
    # ----------------------------------------------------------------------

    def meet(self, *, known: bool) -> None:
        """Agrees with the others on an attempt and on the batches that are left to do. Raises
        PeerError.
        """
        before, step, k = self._kept.attempt, StepKey(PHASE, 0, 0), self._size
        self._identity = sealed.KeyPair.new()
        mine = {
            "rows": _ints(len(self._at.table)),
            "attempt": _bytes(before.name),
            "masked": _ints(*(self._kept.stored(round_) for round_ in range(1, k + 1))),
            "known": _ints(int(known), dtype=torch.uint8),
            "introduction": _bytes(self._introduction()),
        }
        if self._me:
            said = self._asking(HELLO, parties=k).swap(step, mine)
        else:
            answering = self._answering(HELLO, parties=k)
            received = answering.collect(step)
            said = self._decide({self.names[0]: mine, **received})
            answering.reply_all(step, received, said)
        self.rows = said["rows"].tolist()
        self._first = said["first"].tolist()
        self.known = bool(said["known"][0])
        if self.known:
            if not known:
                text = (
                    f"{self.names[0]} says that all parties know the common rows, and this "
                    "party does not"
                )
                raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.names[0])
            return
        fit = all(0 < rows <= MOST_ROWS for rows in self.rows) and self.rows[self._me] == len(
            self._at.table
        )
        # The active party has looked at each.
        if not fit:
            text = f"{self.names[0]} says that the parties have {self.rows} rows, which cannot be"
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.names[0])
        for other, rows in zip(self.names, self.rows, strict=True):
            self._require_masks(other, rows)
        self._publics = [
            self._public(number, each.numpy().tobytes())
            for number, each in enumerate(said["introductions"])
        ]
        name = said["attempt"].numpy().tobytes()
        if name != before.name or name == NO_ATTEMPT:
            self._at.begins()
            self._kept.begin(
                Attempt(name, os.urandom(32), os.urandom(32), self._salt(name), tuple(self.rows))
            )
        elif before.rows != tuple(self.rows):
            # With the same secrets, another set would show what has changed.
            text = (
                f"{self.names[0]} goes on with an alignment in which the parties had other "
                "numbers of rows"
            )
            raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.names[0])
        else:
            done = sum(
                min(self._kept.stored(round_), self.rows[self._set(round_)])
                for round_ in range(1, k + 1)
            )
            facts = {"masked": done, "of": sum(self.rows)}
            log.info(
                "resuming the alignment: %d of %d ids are masked",
                *facts.values(),
                extra={"event": "realigning"},
            )
            self._at.show("realigning", **facts)
        for round_ in range(1, k + 1):
            self._kept.cut(round_, self.rows[self._set(round_)])
        for round_ in range(1, k):
            have, rows = self._kept.stored(round_ + 1), self.rows[self._set(round_ + 1)]
            if (
                not 0
                <= self._first[round_ - 1]
                <= (have // BATCH if have < rows else self._batches)
            ):
                text = f"{self.names[0]} would leave out batches that {self._at.name} lacks"
                raise PeerError(Code.MALFORMED_MESSAGE, text, party=self.names[0])

    def _decide(self, told: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
        """Decides, at the active party, what is left to do. ``told``: by each party that has not
        left the run.

        Raises PeerError, naming a party that says what cannot be; LostError if a party that has
        left is needed.
        """
        k = self._size
        for name, each in told.items():
            rows, masked = int(each["rows"][0]), int(each["masked"].min())
            if not 0 < rows <= MOST_ROWS:
                text = f"{name} says that it has {rows} rows; 1 to {MOST_ROWS} can be aligned"
                raise PeerError(Code.MALFORMED_MESSAGE, text, party=name)
            if masked < 0:
                text = f"{name} says that it keeps {masked} masked rows, which cannot be"
                raise PeerError(Code.MALFORMED_MESSAGE, text, party=name)
        if all(bool(each["known"][0]) for each in told.values()):
            return {
                "rows": torch.zeros(k, dtype=torch.int64),
                "attempt": _bytes(NO_ATTEMPT),
                "first": torch.zeros(k, dtype=torch.int64),
                "known": _ints(1, dtype=torch.uint8),
                "introductions": torch.zeros(k, INTRODUCTION_BYTES, dtype=torch.uint8),
            }
        for name, each in told.items():
            self._require_masks(name, int(each["rows"][0]))
        gone = [name for name in self.names if name not in told]
        if gone:
            text = f"{gone[0]} has left the run, and the rows in common cannot be found without it"
            raise LostError(Code.PARTY_LOST, f"{text}; begin a new run", party=gone[0])
        self.rows = [int(told[name]["rows"][0]) for name in self.names]
        attempts = {each["attempt"].numpy().tobytes() for each in told.values()}
        goes_on = (
            len(attempts) == 1
            and attempts != {NO_ATTEMPT}
            and self._kept.attempt.rows == tuple(self.rows)
        )
        first = []
        for round_ in range(1, k):
            lacking = [self._batches]
            for receiver, name in enumerate(self.names):
                rows = self.rows[(receiver - round_) % k]
                have = int(told[name]["masked"][round_]) if goes_on else 0
                if have < rows:
                    lacking.append(have // BATCH)
            first.append(min(lacking))
        return {
            "rows": _ints(*self.rows),
            "attempt": _bytes(attempts.pop() if goes_on else os.urandom(NAME_BYTES)),
            "first": _ints(*first, 0),
            "known": _ints(0, dtype=torch.uint8),
            "introductions": torch.stack([told[name]["introduction"] for name in self.names]),
        }

    def _require_masks(self, name: str, rows: int) -> None:
        """Raises PeerError (REFUSED) if another party has more rows than this one masks."""
        me, most, active = self._at.name, self._at.peer_rows_at_most, self.names[0]
        if name != me and rows > most:
            who = name if active in (me, name) else f"{active} says that {name}"
            text = (
                f"{who} announces {rows:,} rows, and {me} masks at most {most:,} of another party"
            )
            raise PeerError(
                Code.REFUSED, f"{text} (peer_rows_at_most of its party file)", party=name
            )

    def _introduction(self) -> bytes:
        """Returns how this party introduces its key for sealing; signed, if parties are processes
        of their own.

        Raises InputError if its certificate is too long.
        """
        mine = self._at.credentials
        said = (
            self._identity.public
            if mine is None
            else self._identity.introduction(mine, self._at.run_id.encode())
        )
        if mine is not None and len(said) + 2 > INTRODUCTION_BYTES:
            text = (
                f"{mine.certificate_file}: the certificate is too long to introduce "
                f"{self._at.name} to other parties"
            )
            most = (
                f"its introduction has {len(said)} bytes, and {INTRODUCTION_BYTES - 2} may be sent"
            )
            raise InputError(
                Code.CERTIFICATE_INVALID,
                f"{text}: {most}; take one with fewer names or a shorter key",
            )
        return (len(said).to_bytes(2, "little") + said).ljust(INTRODUCTION_BYTES, b"\0")

    def _public(self, number: int, padded: bytes) -> bytes:
        """Returns a party's key for sealing. Raises PeerError if its introduction is not its
        own.
        """
        size, said = int.from_bytes(padded[:2], "little"), padded[2:]
        mine = self._at.credentials
        # Whatever the active party says: it salts the digest of the list.
        if number == self._me:
            return self._identity.public
        if mine is None:
            return said[: sealed.PUBLIC_BYTES]
        return sealed.verified(said[:size], mine, self.names[number], self._at.run_id.encode())

    def _salt(self, name: bytes) -> bytes:
        """Returns a new attempt's salt, which nobody can know before: each party has just drawn a
        key for it.
        """
        return hashlib.sha256(b"vfl common rows" + name + b"".join(self._publics)).digest()

    # -- what the rounds mask
    # ----------------------------------------------------------------------

    def run(self) -> Common:
        """Does what is left of the attempt; returns which of this party's rows are common.

        Raises PeerError if a party has sent a point twice, or the server has marked other rows in
        this attempt.
        """
        attempt, k = self._kept.attempt, self._size
        order = attempt.order(len(self._at.table))
        salt = self._at.run_id.encode() + attempt.name
        with Masking(attempt.secret, salt, self._at.workers) as masking:
            own = _Own(self._kept, masking, self._at.table.ids, order, ahead=2 * self._at.workers)
            outputs: list[_Own | _Received] = [own]
            for round_ in range(1, k):
                received = _Received(
                    self._kept, masking, round_ + 1, self.rows[self._set(round_ + 1)]
                )
                outputs.append(received)
                for batch in range(self._first[round_ - 1], self._batches):
                    self._at.tick(PHASE, round_ - 1, k - 1, batch, self._batches)
                    points = self._swap(round_, batch, outputs[round_ - 1].take(batch))
                    received.add(batch, points, self._sender)
                    # Who waits for the last has the results of the others.
                    for each in reversed(outputs):
                        each.settle(most=2 * self._at.workers)
                received.settle(most=0)
                # Before the next party could be blamed for it.
                self._kept.require_distinct(round_ + 1, self._sender)
        bits = self._intersect()
        self._pin(bits)
        common = np.zeros(len(order), bool)
        common[order] = np.unpackbits(bits, count=len(order)).astype(bool)
        return Common(common, attempt.salt)

    def _pin(self, bits: npt.NDArray[np.uint8]) -> None:
        """Notes the first bits of the attempt before anything is answered. Raises PeerError if
        these are others.

        Each choice of bits is one list whose digest can be tried out. So others end the attempt,
        and count as one more.
        """
        if self._kept.pin(bits.tobytes()):
            return
        # The day's last alignment has begun already; the run ends anyway.
        with contextlib.suppress(InputError):
            self._at.begins()
        text = f"{self._server} has marked other rows as common than before in the same alignment"
        whose = "the server, or a party that has sent it other masked rows, lies"
        raise PeerError(
            Code.MALFORMED_MESSAGE, f"{text}: {whose}; begin a new run", party=self._server
        )

    def compare(self, ids: Sequence[str], salt: bytes) -> None:
        """Has the server compare the list of common ids with those of the others, with a salt that
        it does not know.

        So no party sees another's digest. Whoever makes up a list and sees its digest pays for each
        guess of the ids that it does not know. Raises PeerError (ROWS_DIFFER) if the lists differ.
        """
        digest = hmac.digest(slow_digest(salt, ids, PASSES_FOUND), b"lists", "sha256")
        self._asking(LISTS).swap(StepKey(PHASE, self._size, 2), {"digest": _bytes(digest)})

    def _intersect(self) -> npt.NDArray[np.uint8]:
        """Sends the server the tags of the next party's rows; returns a bit a row of this one's, in
        the shown order.
        """
        k, rows = self._size, self.rows[self._set(self._size)]
        step = StepKey(PHASE, k, 0)
        self._asking(SIZES).swap(step, {"sizes": _ints(len(self._at.table), rows)})
        cut = (
            curve.tags(self._kept.points(k, at, min(at + BATCH, rows)))
            for at in range(0, rows, BATCH)
        )
        tags = _bytes(b"".join(cut))
        bits = -(-len(self._at.table) // 8)
        reply = self._asking(TAGS).swap(step._replace(batch=1), {"tags": tags}, bits=bits)
        return reply["common"].numpy()

    def _swap(self, round_: int, batch: int, points: bytes) -> bytes:
        """Gives the next party this batch of the set that this party holds; returns the one before
        it gives.
        """
        step = StepKey(PHASE, round_, batch)
        expected = self._bytes(self._set(round_ + 1), batch)
        if self._me:
            relayed = self._me > 1
            down = expected + (sealed.OVERHEAD if relayed else 0)
            up = self._sealed(step, points) if self._me + 1 < self._size else points
            reply = (
                self._asking(MASKED)
                .swap(step, {"points": _bytes(up)}, down=down)["points"]
                .numpy()
                .tobytes()
            )
            return self._opened(step, reply) if relayed else reply
        answering = self._answering(MASKED)
        sizes = {}
        for number in range(1, self._size):
            held = self._bytes((number - round_ + 1) % self._size, batch)
            sizes[self.names[number]] = {
                "up": held + (sealed.OVERHEAD if number + 1 < self._size else 0)
            }
        received = answering.collect(step, each=sizes)
        replies = {self.names[1]: {"points": _bytes(points)}}
        for number in range(2, self._size):
            replies[self.names[number]] = received[self.names[number - 1]]
        answering.reply(step, replies)
        return received[self.names[-1]]["points"].numpy().tobytes()

    def _sealed(self, step: StepKey, points: bytes) -> bytes:
        receiver = self._me + 1
        return self._identity.seal(self._publics[receiver], self._context(step, receiver), points)

    def _opened(self, step: StepKey, said: bytes) -> bytes:
        sender = self._me - 1
        return self._identity.open(
            self._publics[sender], self._context(step, self._me), said, self.names[sender]
        )

    def _context(self, step: StepKey, receiver: int) -> bytes:
        return f"{self._at.run_id} {self._kept.attempt.name.hex()} {receiver} {step}".encode()

    # -- who holds what
    # ----------------------------------------------------------------------

    def _set(self, round_: int) -> int:
        """Returns whose rows this party masks for a round: its own for the first, then those of the
        one before, …
        """
        return (self._me - round_ + 1) % self._size

    @property
    def _sender(self) -> str:
        return self.names[(self._me - 1) % self._size]

    def _bytes(self, owner: int, batch: int) -> int:
        """Returns the size of a batch of a set; 0 if the set has fewer batches than another."""
        return max(0, min(BATCH, self.rows[owner] - batch * BATCH)) * POINT_BYTES

    @cached_property
    def _batches(self) -> int:
        """The batches of the largest set."""
        return -(-max(self.rows) // BATCH)

    def _asking(self, exchange: Exchange, **sizes: int) -> Asking:
        peer = self._server if exchange.asks == "server" else self.names[0]
        return Asking(exchange, PHASE, self._chains[exchange.name], self._at.ways, peer, CPU, sizes)

    def _answering(self, exchange: Exchange, **sizes: int) -> Answering:
        return Answering(exchange, PHASE, self._chains[exchange.name], self._at.ways, CPU, sizes)


class _Output:
    """The batches that this party masks for one round, in order: some are kept, the next ones are
    being masked.
    """

    def __init__(self, kept: Kept, round_: int, rows: int) -> None:
        self._kept, self._round, self._rows = kept, round_, rows
        # Rows.
        self._done = kept.stored(round_)
        self._pending: deque[Future[bytes]] = deque()

    def take(self, batch: int) -> bytes:
        """Returns a batch, when it is masked; nothing if the set has fewer."""
        start, stop = batch * BATCH, min((batch + 1) * BATCH, self._rows)
        while self._done < stop:
            self._settle_one()
        return self._kept.points(self._round, start, stop) if start < stop else b""

    def settle(self, most: int) -> None:
        """Waits until at most ``most`` batches are being masked; keeps all that are done."""
        while len(self._pending) > most or (self._pending and self._pending[0].done()):
            self._settle_one()

    def _settle_one(self) -> None:
        points = self._pending.popleft().result()
        self._kept.add(self._round, points)
        self._done += len(points) // POINT_BYTES


class _Own(_Output):
    """This party's own rows, masked as they are asked for and a little ahead."""

    def __init__(
        self,
        kept: Kept,
        masking: Masking,
        ids: Sequence[str],
        order: npt.NDArray[np.int64],
        *,
        ahead: int,
    ) -> None:
        super().__init__(kept, 1, len(ids))
        self._masking, self._ids, self._order, self._ahead = masking, ids, order, ahead
        # Rows.
        self._asked = self._done

    def take(self, batch: int) -> bytes:
        until = min((batch + 1 + self._ahead) * BATCH, self._rows)
        while self._asked < until:
            rows = self._order[self._asked : self._asked + BATCH]
            self._pending.append(self._masking.own([self._ids[row] for row in rows.tolist()]))
            self._asked += len(rows)
        return super().take(batch)


class _Received(_Output):
    """Another party's rows, masked as they come."""

    def __init__(self, kept: Kept, masking: Masking, round_: int, rows: int) -> None:
        super().__init__(kept, round_, rows)
        self._masking = masking

    def add(self, batch: int, points: bytes, sender: str) -> None:
        """Has a batch masked that has come from ``sender``, unless it is kept already."""
        if points and batch * BATCH >= self._done + len(self._pending) * BATCH:
            self._pending.append(self._masking.others(points, sender))


def _ints(*values: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(values, dtype=dtype)


def _bytes(data: bytes) -> Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
