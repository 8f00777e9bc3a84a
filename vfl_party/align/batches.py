"""The batches in which rows are masked: finished ones on disk, and those being masked."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future

from vfl_party.align.state import AlignmentFiles, RowNumbers
from vfl_party.data.ids import Ids
from vfl_party.psi.curve import POINT_BYTES
from vfl_party.psi.pool import Masking

# Rows of a batch: 60 ms of one core, about what a killed process loses.
BATCH = 1 << 11


class MaskedBatches:
    """The batches that this party masks for one round, in order."""

    def __init__(self, files: AlignmentFiles, round_: int, rows: int) -> None:
        self._files, self._round, self._rows = files, round_, rows
        # Number of rows whose masked points are kept.
        self._done = files.count_stored(round_)
        self._pending: deque[Future[bytes]] = deque()

    def take(self, batch: int) -> bytes:
        """Returns a batch once it is masked; b"" if the set has fewer batches."""
        start, stop = batch * BATCH, min((batch + 1) * BATCH, self._rows)
        while self._done < stop:
            self._settle_one()
        return self._files.points(self._round, batch, self._rows) if start < stop else b""

    def settle(self, max_pending: int) -> None:
        """Waits until at most ``max_pending`` batches are being masked, and saves all finished
        ones.
        """
        while len(self._pending) > max_pending or (self._pending and self._pending[0].done()):
            self._settle_one()

    def _settle_one(self) -> None:
        points = self._pending.popleft().result()
        self._files.add(self._round, self._done // BATCH, points)
        self._done += len(points) // POINT_BYTES


class OwnBatches(MaskedBatches):
    """This party's own rows, masked on demand and a little ahead."""

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
        # Number of rows that the workers were asked to mask.
        self._asked = self._done

    def take(self, batch: int) -> bytes:
        until = min((batch + 1 + self._ahead) * BATCH, self._rows)
        while self._asked < until:
            rows = self._order[self._asked : self._asked + BATCH]
            self._pending.append(self._masking.own([*self._ids.take(rows)]))
            self._asked += len(rows)
        return super().take(batch)


class ReceivedBatches(MaskedBatches):
    """Another party's rows, masked as they arrive."""

    def __init__(self, files: AlignmentFiles, masking: Masking, round_: int, rows: int) -> None:
        super().__init__(files, round_, rows)
        self._masking = masking

    def add(self, batch: int, points: bytes, sender: str) -> None:
        """Starts masking a batch from ``sender``, unless it is already saved."""
        if points and batch * BATCH >= self._done + len(self._pending) * BATCH:
            self._pending.append(self._masking.others(points, sender))
