"""Label differential privacy by randomised response (Warner 1965; K-RR of Kairouz et al. 2016).

The noise of a label is drawn once and kept, over epochs and runs: it follows from a secret of the
active party, ε and the row's id. So ε does not grow with what is sent, and averaging does not
remove the noise. An attacker who reads every gradient perfectly still reads only the noisy label.
"""

from __future__ import annotations

import hashlib
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


def mechanism(epsilon: float) -> Mechanism:
    """Returns what the noisy labels cost each row, however often they are used."""
    return Mechanism("response", epsilon)


def randomise(
    targets: Tensor,
    ids: Sequence[str],
    splits: Mapping[str, Rows],
    *,
    epsilon: float,
    classes: int,
    root: int,
) -> Tensor:
    """Returns the targets with randomised response on all rows but those of validation and test.

    A label is kept with ``keep_probability``, and otherwise becomes one of the other classes, each
    with the same probability.

    Args:
        targets: codes of classes, int64 [N], or 0 and 1, [N, 1].
        ids: of the rows, [N] or fewer; a row without an id is known by its position.
        root: the seed from which the noise follows; secret, except in a simulation.
    """
    codes = targets.detach().cpu().reshape(-1).numpy().astype(np.int64)
    drawn = _draws(ids, len(codes), f"{root} {epsilon!r}".encode())
    changed = drawn[:, 0] * _UNIT >= keep_probability(epsilon, classes)
    measured = [splits[name] for name in _MEASURED if name in splits]
    changed[np.concatenate([np.empty(0, np.int64), *measured])] = False
    step = 1 + drawn[:, 1] % np.uint64(classes - 1)
    noisy = np.where(changed, (codes + step.astype(np.int64)) % classes, codes)
    return torch.from_numpy(noisy).to(targets.dtype).reshape(targets.shape)


def _draws(ids: Sequence[str], rows: int, secret: bytes) -> npt.NDArray[np.uint64]:
    """Returns two random numbers of 64 bits for each row, [N, 2]."""
    key = hashlib.sha256(secret).digest()
    names = (ids[row] if row < len(ids) else f"\0{row}" for row in range(rows))
    digests = (hashlib.blake2b(str(name).encode(), digest_size=16, key=key) for name in names)
    bytes_ = b"".join(digest.digest() for digest in digests)
    return np.frombuffer(bytes_, np.dtype("<u8")).reshape(rows, 2).astype(np.uint64)
