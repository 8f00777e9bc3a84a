"""The rounds of a private set intersection: each party masks its own rows, then those of the
others.
"""

from __future__ import annotations

import contextlib
import hmac
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vfl_common import psi
from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError, PeerError
from vfl_common.psi import PHASE
from vfl_party.align import batches
from vfl_party.align.batches import OwnBatches, ReceivedBatches
from vfl_party.align.digest import PASSES_FOUND, slow_digest
from vfl_party.align.exchanges import DIGEST_BYTES, LISTS, MASKED, SIZES, TAGS, ints, raw
from vfl_party.align.meeting import Agreement
from vfl_party.align.ring import PsiRing
from vfl_party.align.state import AlignmentFiles, CommonRows, unpack_masks
from vfl_party.psi import curve, sealed
from vfl_party.psi.pool import Masking


class Rounds:
    """One party's side of the remaining rounds of an attempt."""

    def __init__(self, ring: PsiRing, files: AlignmentFiles, agreed: Agreement) -> None:
        self._ring, self._files, self._agreed = ring, files, agreed

    def run(self) -> CommonRows:
        """Runs the rest of the attempt, and returns which of this party's rows are common.

        Raises PeerError if a party sent a point twice, or the server marked other rows in this
        attempt.
        """
        ring, attempt, k = self._ring, self._files.attempt, self._ring.size
        ids, workers = ring.at.table.ids, ring.at.workers
        order = attempt.order(len(ids))
        salt = ring.at.run_id.encode() + attempt.name
        with Masking(attempt.secret, salt, workers) as masking:
            own = OwnBatches(self._files, masking, ids, order, ahead=2 * workers)
            outputs: list[OwnBatches | ReceivedBatches] = [own]
            for round_ in range(1, k):
                received = ReceivedBatches(
                    self._files, masking, round_ + 1, ring.rows[ring.owner(round_ + 1)]
                )
                outputs.append(received)
                for batch in range(self._agreed.first[round_ - 1], ring.batches):
                    ring.at.tick(PHASE, round_ - 1, k - 1, batch, ring.batches)
                    points = self._swap(round_, batch, outputs[round_ - 1].take(batch))
                    received.add(batch, points, ring.sender)
                    # When the last batch is done, the others are too.
                    for output in reversed(outputs):
                        output.settle(max_pending=2 * workers)
                received.settle(max_pending=0)
                of = ring.rows[ring.owner(round_ + 1)]
                # Before the next party could be blamed for it.
                self._files.require_distinct(round_ + 1, ring.sender, of)
        bits = self._intersect()
        self._pin(bits)
        masks = []
        for mask in unpack_masks(bits, max(1, len(ring.holders)), len(order)):
            masks.append(np.zeros(len(order), bool))
            masks[-1][order] = mask
        holders = dict(zip(ring.holders, masks, strict=True)) if ring.holders else {}
        return CommonRows(np.logical_or.reduce(masks), attempt.salt, holders)

    def _pin(self, bits: npt.NDArray[np.uint8]) -> None:
        """Saves the first bits of the attempt before anything is answered. Raises PeerError if
        these differ from them.

        Each choice of bits gives one list whose digest can be guessed, so other bits end the
        attempt and count as one more alignment.
        """
        if self._files.pin(bits.tobytes()):
            return
        # The day's last alignment has begun already; the run ends anyway.
        with contextlib.suppress(InputError):
            self._ring.at.begins()
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{self._ring.server}: marked other rows as common than before in the same alignment: "
            "the server lies, or a party that sent it other masked rows. Begin a new run.",
            party=self._ring.server,
        )

    def compare(self, lists: Sequence[Sequence[str]], salt: bytes) -> None:
        """Has the server compare the salted digest of the common ids with those of the other
        parties; the active party with ``rows.partial`` sends one list for each other party.

        The server does not know the salt, and no party sees another's digest, so guessing unknown
        ids is expensive for everyone. Raises PeerError (ROWS_DIFFER) if the lists differ.
        """
        digests = [
            hmac.digest(slow_digest(salt, ids, PASSES_FOUND), b"lists", "sha256") for ids in lists
        ]
        side = self._ring.asking(LISTS, bytes=DIGEST_BYTES * len(lists))
        step = StepKey(PHASE, self._ring.size, 1 + psi.tag_batches(self._ring.rows))
        side.swap(step, {"digest": raw(b"".join(digests))})

    def _intersect(self) -> npt.NDArray[np.uint8]:
        """Sends the server the tags of the next party's rows, and returns a bit for each row of
        this party, uint8, in the shown order; the active party with ``rows.partial`` gets bits for
        each other party.
        """
        ring, attempt, k = self._ring, self._files.attempt, self._ring.size
        owned, last = ring.rows[ring.owner(k)], psi.tag_batches(ring.rows)
        sizes = {"sizes": ints(len(ring.at.table), owned), "attempt": raw(attempt.word)}
        answer = ring.asking(SIZES).swap(StepKey(PHASE, k, 0), sizes)
        first, side, bits = int(answer["first"][0]), ring.asking(TAGS), 0
        if not 0 <= first < last:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.server}: announced an impossible number of batches of tags (got {first} of "
                f"{last}). Begin a new run.",
                party=ring.server,
            )
        for number in range(first, last):
            # Resets the waiting time of all parties.
            ring.at.tick(PHASE, k - 2, k - 1, ring.batches, ring.batches)
            side.send(StepKey(PHASE, k, 1 + number), {"tags": raw(self._tags(number, owned))})
            if number == last - 1:
                bits = max(1, len(ring.holders)) * -(-len(ring.at.table) // 8)
                # The server compares all tags before it answers.
                side.link.unhurried()
            reply = side.receive(StepKey(PHASE, k, 1 + number), bits=bits)
        return reply["common"].numpy()

    def _tags(self, number: int, rows: int) -> bytes:
        """Returns a batch of the tags for the server; b"" if the set has fewer batches."""
        k, size = self._ring.size, psi.TAG_BATCH
        start, stop = number * size, min((number + 1) * size, rows)
        points = (
            self._files.points(k, at // batches.BATCH, rows)
            for at in range(start, stop, batches.BATCH)
        )
        return b"".join(map(curve.tags, points))

    def _swap(self, round_: int, batch: int, points: bytes) -> bytes:
        """Sends the next party this batch of the set that this party holds, and returns the batch
        from the party before it.
        """
        step = StepKey(PHASE, round_, batch)
        expected = self._ring.nbytes(self._ring.owner(round_ + 1), batch)
        if self._ring.me:
            relayed = self._ring.me > 1
            down = expected + (sealed.OVERHEAD if relayed else 0)
            up = self._seal(step, points) if self._ring.me + 1 < self._ring.size else points
            reply = (
                self._ring.asking(MASKED)
                .swap(step, {"points": raw(up)}, down=down)["points"]
                .numpy()
                .tobytes()
            )
            return self._open(step, reply) if relayed else reply
        answering = self._ring.answering(MASKED)
        sizes = {}
        for number in range(1, self._ring.size):
            held = self._ring.nbytes((number - round_ + 1) % self._ring.size, batch)
            sizes[self._ring.names[number]] = {
                "up": held + (sealed.OVERHEAD if number + 1 < self._ring.size else 0)
            }
        received = answering.collect(step, each=sizes)
        replies = {self._ring.names[1]: {"points": raw(points)}}
        for number in range(2, self._ring.size):
            replies[self._ring.names[number]] = received[self._ring.names[number - 1]]
        answering.reply(step, replies)
        return received[self._ring.names[-1]]["points"].numpy().tobytes()

    def _seal(self, step: StepKey, points: bytes) -> bytes:
        receiver, agreed = self._ring.me + 1, self._agreed
        return agreed.identity.seal(agreed.publics[receiver], self._context(step, receiver), points)

    def _open(self, step: StepKey, sealed_points: bytes) -> bytes:
        me, sender, agreed = self._ring.me, self._ring.sender, self._agreed
        return agreed.identity.open(
            agreed.publics[me - 1], self._context(step, me), sealed_points, sender
        )

    def _context(self, step: StepKey, receiver: int) -> bytes:
        return f"{self._ring.at.run_id} {self._files.attempt.name.hex()} {receiver} {step}".encode()
