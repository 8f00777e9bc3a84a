"""Keeps digests of what a party has sent, so that after an interruption no receiver gets different
tensors with the same noise.
"""

from __future__ import annotations

import hashlib

import torch

from vfl_party.outbound.filter import Passage, Tensors

# Replaces the digest after different tensors have left for the same step and receiver.
_SEVERAL = b""
# This number of digests takes about 50 MB. Old ones may be dropped, because a rollback goes back
# only a few checkpoints.
_MAX_MESSAGES = 200_000


class SentDigests:
    """Keeps digests of what has left through noisy chains, in memory, for all generations of a
    process.

    A resumed run repeats the noise of its checkpoint, so that it ends bit for bit as it would have
    without the interruption. That noise protects only one message. A peer could stop on purpose and
    then send different embeddings, to get a second message with the same noise. The difference of
    the two has no noise.
    """

    def __init__(self) -> None:
        self._digests: dict[tuple[str, Passage], bytes] = {}

    def differs(self, way: str, at: Passage, tensors: Tensors) -> bool:
        """Stores the digest of the tensors of the bundle ``at`` and returns whether different
        tensors have ever left for the same step and receiver.

        After one difference the result stays true, because it is no longer known which of the
        tensors had the noise that would come next. ``way``: the name of the exchange and direction.
        """
        digest = hashlib.sha256()
        for name, x in sorted(tensors.items()):
            digest.update(f"{name} {x.dtype} {tuple(x.shape)} ".encode())
            digest.update(
                x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            )
        current, key = digest.digest(), (way, at)
        is_same = self._digests.pop(key, current) == current
        # ``pop`` and this assignment put the newest digest last, so the oldest is dropped first.
        self._digests[key] = current if is_same else _SEVERAL
        if len(self._digests) > _MAX_MESSAGES:
            del self._digests[next(iter(self._digests))]
        return not is_same
