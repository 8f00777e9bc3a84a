"""Manages the batches in which rows are masked: finished batches on disk, and batches in work."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from vfl_party.align.state import AlignmentFiles, RowNumbers
from vfl_party.data.ids import Ids
from vfl_party.psi.curve import POINT_BYTES
from vfl_party.psi.pool import Masking

# The number of rows in a batch. Masking a batch takes 60 ms of one core, so a killed process loses
# little work.
BATCH = 1 << 11


class MaskedBatches:
    """The batches that this party masks for one round, in order."""

    def __init__(self, files: AlignmentFiles, round_: int, rows: int) -> None:
        self._files, self._round, self._rows = files, round_, rows
        # The number of rows whose masked points are on disk.
        self._done = files.count_stored(round_)
        self._pending: deque[Future[bytes]] = deque()

    def take(self, batch: int) -> bytes:
        """Waits until a batch is masked, and returns its points; b"" if there is no such batch."""
        start, stop = batch * BATCH, min((batch + 1) * BATCH, self._rows)
        while self._done < stop:
            self._settle_one()
        return self._files.points(self._round, batch, self._rows) if start < stop else b""

    def settle(self, max_pending: int) -> None:
        """Waits until at most ``max_pending`` batches are being masked, and saves all finished
        batches.
        """
        while len(self._pending) > max_pending or (self._pending and self._pending[0].done()):
            self._settle_one()

    def _settle_one(self) -> None:
        points = self._pending.popleft().result()
        self._files.add(self._round, self._done // BATCH, points)
        self._done += len(points) // POINT_BYTES


class OwnBatches(MaskedBatches):
    """The batches of this party's own rows, which are masked shortly before they are needed."""

    def __init__(
        self,
        files: AlignmentFiles,
        masking: Masking,
        ids: Sequence[str],
        order: RowNumbers,
        *,
        ahead: int,
    ) -> None:
        super().__init__(files, 1, len(ids))
        self._masking, self._order, self._ahead = masking, order, ahead
        self._ids = Ids.of(ids)
        # The number of rows that the workers have been asked to mask.
        self._requested = self._done

    def take(self, batch: int) -> bytes:
        requested_stop = min((batch + 1 + self._ahead) * BATCH, self._rows)
        while self._requested < requested_stop:
            rows = self._order[self._requested : self._requested + BATCH]
            self._pending.append(self._masking.mask_own([*self._ids.take(rows)]))
            self._requested += len(rows)
        return super().take(batch)


class ReceivedBatches(MaskedBatches):
    """The batches of another party's rows, which are masked when they arrive."""

    def __init__(self, files: AlignmentFiles, masking: Masking, round_: int, rows: int) -> None:
        super().__init__(files, round_, rows)
        self._masking = masking

    def add(self, batch: int, points: bytes, sender: str) -> None:
        """Starts masking a batch from ``sender``, unless it is already saved."""
        if points and batch * BATCH >= self._done + len(self._pending) * BATCH:
            self._pending.append(self._masking.mask_received(points, sender))
