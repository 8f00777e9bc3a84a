"""Digests of what a party has sent: after an interruption, no receiver gets other tensors under the
same noise.
"""

from __future__ import annotations

import hashlib

import torch

from vfl_party.outbound.filter import Passage, Tensors

# Stands for a digest after different tensors have left at the same place.
_SEVERAL = b""
# This many digests take about 50 MB. A rollback goes back by a few checkpoints.
_MAX_MESSAGES = 200_000


class SentDigests:
    """Digests of what has left through noisy chains, in memory, for all generations of a process.

    A resumed run repeats the noise of its checkpoint, so that it ends bit for bit as it would have.
    The noise covers one message: a peer that dies on purpose, and then sends other embeddings,
    would get a second one under the same noise, and the difference has none.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[str, Passage], bytes] = {}

    def differs(self, way: str, at: Passage, tensors: Tensors) -> bool:
        """Notes what leaves at ``at``; returns whether something else has ever left there.

        Once it has, this stays so: which of the tensors had the noise that would come now is not
        known any more. ``way``: names the exchange and the direction.
        """
        digest = hashlib.sha256()
        for name, x in sorted(tensors.items()):
            digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
            digest.update(
                x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        current, key = digest.digest(), (way, at)
        same = self._digests.pop(key, current) == current
        # The newest are last.
        self._digests[key] = current if same else _SEVERAL
        if len(self._digests) > _MAX_MESSAGES:
            del self._digests[next(iter(self._digests))]
        return not same
