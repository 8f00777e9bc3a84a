"""Masks batches of ids in several worker processes. Threads would not help, because masking holds
Python's global interpreter lock.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Self

from vfl_common.errors import Code, PeerError
from vfl_common.process.workers import Workers
from vfl_party.psi import worker


class Masking:
    """Worker processes that mask with one secret. Use it as a context manager; any thread may call
    it.

    ``mask_own`` and ``mask_received`` return a future at once.

    Args:
        secret: 32 random bytes.
        salt: the salt with which all parties hash their ids.
        workers: the number of processes.
    """

    def __init__(self, secret: bytes, salt: bytes, workers: int) -> None:
        self._workers = Workers(worker.__name__, workers, "masked ids", [secret, salt])

    def __enter__(self) -> Self:
        self._workers.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        """Ends the workers at once. Futures that are not done are cancelled or raise
        InternalError.
        """
        self._workers.__exit__(*exception)

    def mask_own(self, ids: Sequence[str]) -> Future[bytes]:
        """Hashes and masks ids of this party. The future holds their points, in the same order."""
        return self._workers.submit(
            _read_points, worker.OWN, *[identifier.encode() for identifier in ids]
        )

    def mask_received(self, points: bytes, party: str) -> Future[bytes]:
        """Checks and masks points from the peer ``party``. The future holds points in the same
        order.

        It raises PeerError if a point is invalid, see ``curve.check_points``.
        """
        return self._workers.submit(_read_points, worker.OTHERS, party.encode(), points)


def _read_points(answer: list[bytes]) -> bytes:
    """Returns the points in a worker's answer, or raises the PeerError in it."""
    kind, *fields = answer
    if kind == worker.REFUSED:
        code, text, party = (part.decode() for part in fields)
        raise PeerError(Code(int(code)), text, party=party)
    return fields[0]
