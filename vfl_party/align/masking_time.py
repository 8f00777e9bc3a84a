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
_REPETITIONS, _BATCHES = 3, 2


@dataclass(frozen=True)
class MaskingTime:
    """The measured seconds for one batch of rows.

    Args:
        own_s: The time of a worker process for a batch of the party's own rows.
        others_s: The time of a worker process for a batch of another party's rows.
        feeding_s: The time of the party's main process for both batches. It sends ids to the
            workers and stores the masked points.
    """

    own_s: float
    others_s: float
    feeding_s: float

    def batch_s(self, workers: int, rounds: int = 1) -> float:
        """Returns the mean seconds for a batch in ``rounds`` rounds, with ``workers`` processes and
        one core for each.

        A party masks its own rows only in the first round, and another party's rows in every round.
        """
        return max((self.own_s / rounds + self.others_s) / workers, self.feeding_s)


def time_masking(rows: int, workers: int) -> tuple[float, float]:
    """Masks ``rows`` own rows and as many rows of another party, and stores them on disk.

    Returns the wall-clock seconds and the CPU seconds of this process for each pair of batches. The
    start of the workers is not included.
    """
    ids = Ids.of(f"customer-{row:09d}" for row in range(rows))
    with (
        tempfile.TemporaryDirectory(prefix="vfl-masking-") as folder,
        Masking(_SECRET, b"", workers) as masking,
    ):
        for ready in [masking.mask_own(ids[:1]) for _ in range(4 * workers)]:
            ready.result()
        files = AlignmentFiles(Path(folder), ids, batches.BATCH)
        files.begin(Attempt(bytes(16), _SECRET, _SECRET))
        order, count = files.attempt.order(rows), -(-rows // batches.BATCH)
        began_s, began_cpu_s = time.perf_counter(), time.process_time()
        own = OwnBatches(files, masking, ids, order, ahead=2 * workers)
        received = ReceivedBatches(files, masking, 2, rows)
        for batch in range(count):
            # Masking these points takes as long as masking another party's points.
            received.add(batch, own.take(batch), "another")
            received.settle(max_pending=2 * workers)
        received.settle(max_pending=0)
        took_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
        return took_s / count, cpu_s / count


def measure_masking() -> MaskingTime:
    """Measures the CPU time of masking, which takes less than a second. Each time is the minimum of
    several repetitions, so that other load on the machine matters little.
    """
    ids = [f"customer-{row:09d}".encode() for row in range(batches.BATCH)]
    points = lanes.hash_and_mask(ids, b"", _SECRET)

    def mask_received_points() -> None:
        curve.check_points(points, "another")
        curve.mask(points, _SECRET)

    feeding_s = min(time_masking(_BATCHES * batches.BATCH, 1)[1] for _ in range(_REPETITIONS))
    return MaskingTime(
        _measure_cpu_s(lambda: lanes.hash_and_mask(ids, b"", _SECRET)),
        _measure_cpu_s(mask_received_points),
        feeding_s,
    )


def _measure_cpu_s(act: Callable[[], object]) -> float:
    """Returns the CPU seconds of ``act``: the minimum of several repetitions."""
    times_s = []
    for _ in range(_REPETITIONS):
        began_s = time.process_time()
        act()
        times_s.append(time.process_time() - began_s)
    return min(times_s)
