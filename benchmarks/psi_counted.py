"""Run ``vfl-party``, and note the ids that it gives to be masked: ``python -m
benchmarks.psi_counted FILE ARGUMENT …``.

Each batch is a line in the file, its number of ids, written when a worker is asked: a batch that a
kill cuts short counts whole.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from vfl.launcher import child
from vfl_party.align import rounds
from vfl_party.psi import worker
from vfl_party.psi.curve import POINT_BYTES
from vfl_party.psi.pool import Masking


def counting(path: Path) -> type[Masking]:
    """Returns ``Masking`` that adds a line to the file for each batch."""
    file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)

    class Counting(Masking):
        def _ask(self, *request: bytes) -> bytes:
            kind, *rest = request
            ids = len(rest) if kind == worker.OWN else len(rest[-1]) // POINT_BYTES
            os.write(file, f"{ids}\n".encode())
            return super()._ask(*request)

    return Counting


if __name__ == "__main__":
    rounds.Masking = counting(Path(sys.argv[1]))  # type: ignore[misc]
    child.run(sys.argv[2:])
