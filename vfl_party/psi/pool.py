"""Masks batches on several cores. Masking holds Python's lock, so it needs processes, not threads:
see ``worker``.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Self

from vfl_common.errors import Code, PeerError
from vfl_common.process.workers import Workers
from vfl_party.psi import worker


class Masking:
    """Worker processes that mask with one secret, from ``with`` until its end; any thread may call.

    ``own`` and ``others`` return at once: see ``Workers``.

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

    def own(self, ids: Sequence[str]) -> Future[bytes]:
        """Hashes and masks ids of this party; gives their points in the same order."""
        return self._workers.submit(
            _points, worker.OWN, *[identifier.encode() for identifier in ids]
        )

    def others(self, points: bytes, party: str) -> Future[bytes]:
        """Checks points that the peer ``party`` has sent, and masks them; gives points in the same
        order.

        The future raises PeerError, as ``curve.check``.
        """
        return self._workers.submit(_points, worker.OTHERS, party.encode(), points)


def _points(answer: list[bytes]) -> bytes:
    """Returns the points of an answer. Raises the PeerError that it contains."""
    kind, *rest = answer
    if kind == worker.REFUSED:
        code, text, party = (part.decode() for part in rest)
        raise PeerError(Code(int(code)), text, party=party)
    return rest[0]
