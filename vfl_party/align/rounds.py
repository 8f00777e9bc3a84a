"""The rounds of a private set intersection: each party masks its own rows, then the rows of the
other parties.
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
from vfl_party.align.digest import PASSES_FOUND, compute_slow_digest
from vfl_party.align.exchanges import (
    DIGEST_BYTES,
    LISTS,
    MASKED,
    SIZES,
    TAGS,
    bytes_to_tensor,
    to_tensor,
)
from vfl_party.align.meeting import Agreement
from vfl_party.align.ring import PsiRing
from vfl_party.align.state import AlignmentFiles, Attempt, CommonRows, unpack_masks
from vfl_party.psi import curve, sealed
from vfl_party.psi.pool import Masking


class Rounds:
    """One party's side of the remaining rounds of an attempt, by X25519."""

    def __init__(self, ring: PsiRing, files: AlignmentFiles, agreed: Agreement) -> None:
        self._ring, self._files, self._agreed = ring, files, agreed

    # Whether the server gets tags.
    has_tags = True

    def run(self) -> CommonRows:
        """Runs the remaining rounds, and returns which of this party's rows are common.

        Raises PeerError if a party sent a point twice, or if the server marked other rows earlier
        in this attempt.
        """
        ring, attempt, k = self._ring, self._files.attempt, self._ring.size
        ids, workers = ring.context.table.ids, ring.context.workers
        row_order = attempt.order(len(ids))
        salt = ring.context.run_id.encode() + attempt.name
        with Masking(attempt.secret, salt, workers) as masking:
            own_batches = OwnBatches(self._files, masking, ids, row_order, ahead=2 * workers)
            outputs: list[OwnBatches | ReceivedBatches] = [own_batches]
            for round_ in range(1, k):
                received = ReceivedBatches(
                    self._files, masking, round_ + 1, ring.rows[ring.find_owner(round_ + 1)]
                )
                outputs.append(received)
                for batch in range(self._agreed.first[round_ - 1], ring.batches):
                    ring.context.tick(PHASE, round_ - 1, k - 1, batch, ring.batches)
                    points = self._swap_batch(round_, batch, outputs[round_ - 1].take(batch))
                    received.add(batch, points, ring.sender)
                    # A later set is masked after the earlier sets, so the later sets are settled
                    # first.
                    for output in reversed(outputs):
                        output.settle(max_pending=2 * workers)
                received.settle(max_pending=0)
                owned_rows = ring.rows[ring.find_owner(round_ + 1)]
                # Checked here, so that the error names the party that sent a point twice.
                self._files.require_distinct(round_ + 1, ring.sender, owned_rows)
        bits = self._intersect()
        self._check_marks(bits)
        masks = []
        for mask in unpack_masks(bits, max(1, len(ring.holders)), len(row_order)):
            masks.append(np.zeros(len(row_order), bool))
            masks[-1][row_order] = mask
        holders = dict(zip(ring.holders, masks, strict=True)) if ring.holders else {}
        return CommonRows(np.logical_or.reduce(masks), attempt.salt, holders)

    def _check_marks(self, bits: npt.NDArray[np.uint8]) -> None:
        """Saves the server's first bits of the attempt. Raises PeerError if later bits differ from
        the first ones.

        A server that sends different bits learns the digests of several lists, and could use them
        to guess ids. So different bits end the attempt and count as one more alignment.
        """
        if self._files.pin(bits.tobytes()):
            return
        # The daily limit of alignments may be reached, but the run ends anyway.
        with contextlib.suppress(InputError):
            self._ring.context.begins()
        raise PeerError(
            Code.MALFORMED_MESSAGE,
            f"{self._ring.server}: marked different rows as common than before in the same "
            "alignment. The server or another party does not follow the protocol. Begin a new run.",
            party=self._ring.server,
        )

    def compare(self, lists: Sequence[Sequence[str]], salt: bytes) -> None:
        """Has the server compare the salted digests of all parties' common ids.

        With ``rows.partial`` the active party sends one digest for each other party. The server
        does not know the salt, and no party sees the digest of another party, so guessing unknown
        ids is expensive. Raises PeerError (ROWS_DIFFER) if the digests differ.

        lists: The common ids with each other party.
        """
        digests = [
            hmac.digest(compute_slow_digest(salt, ids, PASSES_FOUND), b"lists", "sha256")
            for ids in lists
        ]
        asking = self._ring.make_asking(LISTS, bytes=DIGEST_BYTES * len(lists))
        batch = 1 + (psi.count_tag_batches(self._ring.rows) if self.has_tags else 0)
        step = self._ring.make_step(self._ring.size, batch)
        asking.swap(step, {"digest": bytes_to_tensor(b"".join(digests))})

    def _announce(self, masked_rows: int, attempt: Attempt | None = None) -> int:
        """Tells the server the number of this party's rows and of the rows whose tags it sends.
        Returns the first batch of tags that the server lacks.

        ``attempt``: Default: the attempt of this pass.
        """
        sizes = {
            "sizes": to_tensor(len(self._ring.context.table), masked_rows),
            "attempt": bytes_to_tensor((attempt or self._files.attempt).word),
        }
        step = self._ring.make_step(self._ring.size, 0)
        return int(self._ring.make_asking(SIZES).swap(step, sizes)["first"][0])

    def _intersect(self) -> npt.NDArray[np.uint8]:
        """Sends the tags of the fully masked rows to the server, and returns its answer.

        The answer has one bit for each row of this party, uint8, in the order in which this party
        sent its rows. With ``rows.partial`` the active party gets such bits for each other party.
        """
        ring, k = self._ring, self._ring.size
        owned_rows, batch_count = ring.rows[ring.find_owner(k)], psi.count_tag_batches(ring.rows)
        first_batch, asking, bits = self._announce(owned_rows), ring.make_asking(TAGS), 0
        if not 0 <= first_batch < batch_count:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{ring.server}: announced an impossible number of batches of tags (got "
                f"{first_batch} of {batch_count}). Begin a new run.",
                party=ring.server,
            )
        for number in range(first_batch, batch_count):
            # A tick restarts the time limit for an answer at all parties.
            ring.context.tick(PHASE, k - 2, k - 1, ring.batches, ring.batches)
            asking.send(
                ring.make_step(k, 1 + number),
                {"tags": bytes_to_tensor(self._read_tags(number, owned_rows))},
            )
            if number == batch_count - 1:
                bits = max(1, len(ring.holders)) * -(-len(ring.context.table) // 8)
                # The server compares all tags before it answers, so this answer may take longer.
                asking.link.unhurried()
            reply = asking.receive(ring.make_step(k, 1 + number), bits=bits)
        return reply["common"].numpy()

    def _read_tags(self, number: int, rows: int) -> bytes:
        """Returns a batch of tags for the server; b"" if there is no such batch."""
        k, size = self._ring.size, psi.TAG_BATCH
        start, stop = number * size, min((number + 1) * size, rows)
        points = (
            self._files.points(k, start_row // batches.BATCH, rows)
            for start_row in range(start, stop, batches.BATCH)
        )
        return b"".join(map(curve.cut_tags, points))

    def _swap_batch(self, round_: int, batch: int, points: bytes) -> bytes:
        """Sends a batch of masked points to the next party in the ring, and returns the batch from
        the party before this one.
        """
        step = self._ring.make_step(round_, batch)
        expected = self._ring.count_bytes(self._ring.find_owner(round_ + 1), batch)
        if self._ring.me:
            relayed = self._ring.me > 1
            reply_bytes = expected + (sealed.OVERHEAD if relayed else 0)
            request = self._seal(step, points) if self._ring.me + 1 < self._ring.size else points
            reply = (
                self._ring.make_asking(MASKED)
                .swap(step, {"points": bytes_to_tensor(request)}, down=reply_bytes)["points"]
                .numpy()
                .tobytes()
            )
            return self._open(step, reply) if relayed else reply
        answering = self._ring.make_answering(MASKED)
        sizes = {}
        for number in range(1, self._ring.size):
            own_bytes = self._ring.count_bytes((number - round_ + 1) % self._ring.size, batch)
            sizes[self._ring.names[number]] = {
                "up": own_bytes + (sealed.OVERHEAD if number + 1 < self._ring.size else 0)
            }
        received = answering.collect(step, each=sizes)
        replies = {self._ring.names[1]: {"points": bytes_to_tensor(points)}}
        for number in range(2, self._ring.size):
            replies[self._ring.names[number]] = received[self._ring.names[number - 1]]
        answering.reply(step, replies)
        return received[self._ring.names[-1]]["points"].numpy().tobytes()

    def _seal(self, step: StepKey, points: bytes) -> bytes:
        receiver, agreed = self._ring.me + 1, self._agreed
        return agreed.identity.seal(
            agreed.publics[receiver], self._make_context(step, receiver), points
        )

    def _open(self, step: StepKey, sealed_points: bytes) -> bytes:
        me, sender, agreed = self._ring.me, self._ring.sender, self._agreed
        return agreed.identity.open(
            agreed.publics[me - 1], self._make_context(step, me), sealed_points, sender
        )

    def _make_context(self, step: StepKey, receiver: int) -> bytes:
        run, attempt = self._ring.context.run_id, self._files.attempt.name.hex()
        return f"{run} {attempt} {receiver} {step}".encode()


class KnownRounds(Rounds):
    """One party's side of a pass whose common rows all parties know, because they have saved them.
    The server compares the lists again, so that it follows the passes.
    """

    has_tags = False

    def run(self) -> CommonRows:
        """Returns the saved common rows. Raises PeerError if this party has none."""
        # A party that has finished its alignment does not know the name of the attempt any more.
        self._announce(psi.NO_TAGS, Attempt())
        common = self._files.common()
        if common is None:
            raise PeerError(
                Code.MALFORMED_MESSAGE,
                f"{self._ring.active}: changed the number of known passes during the alignment. "
                "Begin a new run.",
                party=self._ring.active,
            )
        return common
