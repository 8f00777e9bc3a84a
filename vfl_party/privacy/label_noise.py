"""Label differential privacy by randomised response (Warner 1965; K-RR of Kairouz et al. 2016).

The noise of a label is drawn once and kept, over epochs and runs: it follows from a secret of the
active party, the row's id, ε, the label column and the codes of its classes. So ε does not grow
with what is sent, and averaging does not remove the noise. An attacker who reads every gradient
perfectly still reads only the noisy label.

Two settings never share a draw. With the same draw, labels of two columns, or one label under other
codes or another number of classes, would tell their difference without noise.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_party.base.mechanism import Mechanism
from vfl_party.base.seeds import Rows

# A file of the active party's record: the noise of its labels follows from it.
LABEL_SECRET = "label-secret"  # noqa: S105 - a file
# Splits whose labels serve metrics alone.
_MEASURED = ("validation", "test")
_UNIT = 2.0**-64


def keep_probability(epsilon: float, classes: int) -> float:
    """Returns e^ε / (e^ε + K - 1), with which a label is kept."""
    return 1.0 / (1.0 + (classes - 1) * math.exp(-epsilon))


def mechanism(
    epsilon: float, column: str | None, names: Sequence[object], classes: int
) -> Mechanism:
    """Returns what the noisy labels cost each row, however often they are used.

    Args:
        column: of the labels.
        names: of the classes, in the order of their codes.
        classes: K of the recipe's task, at least ``len(names)``.
    """
    draw = json.dumps([column, [str(name) for name in names], classes])
    return Mechanism("response", epsilon, of=hashlib.sha256(draw.encode()).hexdigest()[:16])


def randomise(
    targets: Tensor,
    ids: Sequence[str],
    splits: Mapping[str, Rows],
    *,
    noise: Mechanism,
    classes: int,
    root: int,
) -> Tensor:
    """Returns the targets with randomised response on all rows but those of validation and test.

    A label is kept with ``keep_probability``, and otherwise becomes one of the other classes, each
    with the same probability.

    Args:
        targets: codes of classes, int64 [N], or 0 and 1, [N, 1].
        ids: of the rows, [N] or more.
        noise: see ``mechanism``.
        root: the seed from which the noise follows; secret, except in a simulation.
    """
    codes = targets.detach().cpu().reshape(-1).numpy().astype(np.int64)
    drawn = _draws(ids[: len(codes)], f"{root} {noise.text}".encode())
    changed = drawn[:, 0] * _UNIT >= keep_probability(noise.noise, classes)
    measured = [splits[name] for name in _MEASURED if name in splits]
    changed[np.concatenate([np.empty(0, np.int64), *measured])] = False
    step = 1 + drawn[:, 1] % np.uint64(classes - 1)
    noisy = np.where(changed, (codes + step.astype(np.int64)) % classes, codes)
    return torch.from_numpy(noisy).to(targets.dtype).reshape(targets.shape)


def _draws(ids: Sequence[str], secret: bytes) -> npt.NDArray[np.uint64]:
    """Returns two random numbers of 64 bits for each row, [N, 2]."""
    key = hashlib.sha256(secret).digest()
    digests = (hashlib.blake2b(str(name).encode(), digest_size=16, key=key) for name in ids)
    bytes_ = b"".join(digest.digest() for digest in digests)
    return np.frombuffer(bytes_, np.dtype("<u8")).reshape(len(ids), 2).astype(np.uint64)
