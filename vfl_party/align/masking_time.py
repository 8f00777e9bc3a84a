"""How long a party's masking takes on this machine, without a network."""

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
    """Of one batch of rows. ``own_s``, ``others_s``: what a worker takes for a party's own, and for
    another's; ``feeding_s``: what the party's process takes for both, which gives the workers ids
    and keeps what they mask.
    """

    own_s: float
    others_s: float
    feeding_s: float

    def batch_s(self, workers: int, rounds: int = 1) -> float:
        """Returns how long a party masks a batch, on average of all rounds, with ``workers``
        processes, each on a core of its own.

        It masks its own rows in the first of ``rounds`` rounds, and another's in each.
        """
        return max((self.own_s / rounds + self.others_s) / workers, self.feeding_s)


def time_masking(rows: int, workers: int) -> tuple[float, float]:
    """Masks ``rows`` rows as a party of two does, on the disk too: its own, and as many of another.

    Returns seconds of each pair of batches, and those of this process's processor. The start of the
    workers is not in them.
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


def measured() -> MaskingTime:
    """Measures processor time in this process, in a second: the best of a few turns. So it does
    not depend on what else runs.
    """
    ids = [f"customer-{row:09d}".encode() for row in range(batches.BATCH)]
    points = lanes.own(ids, b"", _SECRET)

    def others() -> None:
        curve.check(points, "another")
        curve.masked(points, _SECRET)

    feeding_s = min(time_masking(_BATCHES * batches.BATCH, 1)[1] for _ in range(_TURNS))
    return MaskingTime(_best_s(lambda: lanes.own(ids, b"", _SECRET)), _best_s(others), feeding_s)


def _best_s(act: Callable[[], object]) -> float:
    """Returns processor seconds: the fewest of a few turns."""
    times_s = []
    for _ in range(_TURNS):
        began_s = time.process_time()
        act()
        times_s.append(time.process_time() - began_s)
    return min(times_s)
