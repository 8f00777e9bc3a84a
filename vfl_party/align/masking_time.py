"""Measures how long a party's masking takes on this machine, without a network."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vfl_party.align import batches
from vfl_party.align.batches import OwnBatches, ReceivedBatches
from vfl_party.align.state import AlignmentFiles, Attempt
from vfl_party.data.ids import Ids
from vfl_party.psi import curve, lanes
from vfl_party.psi.pool import Masking

_SECRET = bytes(range(32))
_TURNS, _BATCHES = 3, 2


@dataclass(frozen=True)
class MaskingTime:
    """Seconds for one batch of rows.

    Args:
        own_s: a worker's time for a batch of the party's own rows.
        others_s: a worker's time for a batch of another party's rows.
        feeding_s: time of the party's own process for both: it gives the workers ids and stores
            what they mask.
    """

    own_s: float
    others_s: float
    feeding_s: float

    def batch_s(self, workers: int, rounds: int = 1) -> float:
        """Returns the seconds for a batch, on average of all rounds, with ``workers`` processes on
        a core each.

        A party masks its own rows in the first of ``rounds`` rounds, and another's in each.
        """
        return max((self.own_s / rounds + self.others_s) / workers, self.feeding_s)


def time_masking(rows: int, workers: int) -> tuple[float, float]:
    """Masks ``rows`` own rows and as many of another party, on disk too, as a party of two does.

    Returns wall-clock seconds and this process's CPU seconds for each pair of batches, without the
    start of the workers.
    """
    ids = Ids.of(f"customer-{row:09d}" for row in range(rows))
    with (
        tempfile.TemporaryDirectory(prefix="vfl-masking-") as place,
        Masking(_SECRET, b"", workers) as masking,
    ):
        for ready in [masking.own(ids[:1]) for _ in range(4 * workers)]:
            ready.result()
        files = AlignmentFiles(Path(place), ids, batches.BATCH)
        files.begin(Attempt(bytes(16), _SECRET, _SECRET))
        order, count = files.attempt.order(rows), -(-rows // batches.BATCH)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        own = OwnBatches(files, masking, ids, order, ahead=2 * workers)
        received = ReceivedBatches(files, masking, 2, rows)
        for batch in range(count):
            # Another party's points cost what these cost.
            received.add(batch, own.take(batch), "another")
            received.settle(max_pending=2 * workers)
        received.settle(max_pending=0)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return took_s / count, cpu_s / count


def measure_masking() -> MaskingTime:
    """Measures CPU time in this process, within a second: the best of a few turns, so that other
    load does not matter.
    """
    ids = [f"customer-{row:09d}".encode() for row in range(batches.BATCH)]
    points = lanes.hash_and_mask(ids, b"", _SECRET)

    def others() -> None:
        curve.check(points, "another")
        curve.mask(points, _SECRET)

    feeding_s = min(time_masking(_BATCHES * batches.BATCH, 1)[1] for _ in range(_TURNS))
    return MaskingTime(
        _best_s(lambda: lanes.hash_and_mask(ids, b"", _SECRET)), _best_s(others), feeding_s
    )


def _best_s(act: Callable[[], object]) -> float:
    """Returns the CPU seconds of ``act``: the minimum of a few turns."""
    times_s = []
    for _ in range(_TURNS):
        began_s = time.process_time()
        act()
        times_s.append(time.process_time() - began_s)
    return min(times_s)
