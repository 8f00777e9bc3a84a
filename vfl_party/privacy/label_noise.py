"""Label differential privacy by randomised response (Warner 1965; K-RR of Kairouz et al. 2016).

The noise of a label stays the same over epochs and runs. It is derived from a secret of the active
party, the row's id, ε, the label column and the class codes. So ε does not grow with the number of
messages, and averaging does not remove the noise. An attacker who recovers a label from gradients
gets only the noisy label.

Different label columns, class codes or numbers of classes never share a random draw. With the same
draw, an attacker could compare the two noisy labels and learn a difference without noise.
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

# Name of the file in the active party's record that holds the secret of the label noise.
LABEL_SECRET = "label-secret"  # noqa: S105 - a file
# Splits whose labels are used only for metrics, so they get no noise.
_MEASURED_SPLITS = ("validation", "test")
_UNIT = 2.0**-64


def keep_probability(epsilon: float, classes: int) -> float:
    """Returns the probability that a label is kept: e^ε / (e^ε + K - 1) with K classes."""
    return 1.0 / (1.0 + (classes - 1) * math.exp(-epsilon))


def build_mechanism(
    epsilon: float, column: str | None, names: Sequence[object], classes: int
) -> Mechanism:
    """Returns the mechanism of the noisy labels, whose cost does not grow with their use.

    Args:
        epsilon: ε of one label.
        column: The name of the label column; None if it has no name.
        names: The names of the classes, in the order of their codes.
        classes: The number of classes of the recipe's task, at least ``len(names)``.
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
    """Applies randomised response to the targets of all rows except validation and test rows.

    A label is kept with ``keep_probability``, and otherwise becomes one of the other classes, each
    with the same probability.

    Args:
        targets: Class codes, int64 [N], or binary labels 0 and 1, [N, 1].
        ids: The ids of the rows, in the same order; ids after the first N are ignored.
        splits: The row numbers of each split.
        noise: The result of ``mechanism``.
        classes: The number of classes.
        root: The seed of the noise. Keep it secret, except in a simulation.
    """
    codes = targets.detach().cpu().reshape(-1).numpy().astype(np.int64)
    numbers_N2 = _draw_numbers(ids[: len(codes)], f"{root} {noise.text}".encode())
    is_changed_N = numbers_N2[:, 0] * _UNIT >= keep_probability(noise.noise, classes)
    measured_rows = [splits[name] for name in _MEASURED_SPLITS if name in splits]
    is_changed_N[np.concatenate([np.empty(0, np.int64), *measured_rows])] = False
    step = 1 + numbers_N2[:, 1] % np.uint64(classes - 1)
    noisy = np.where(is_changed_N, (codes + step.astype(np.int64)) % classes, codes)
    return torch.from_numpy(noisy).to(targets.dtype).reshape(targets.shape)


def _draw_numbers(ids: Sequence[str], secret: bytes) -> npt.NDArray[np.uint64]:
    """Returns two random numbers of 64 bits for each row, [N, 2]."""
    key = hashlib.sha256(secret).digest()
    digests = (hashlib.blake2b(str(name).encode(), digest_size=16, key=key) for name in ids)
    digest_bytes = b"".join(digest.digest() for digest in digests)
    return np.frombuffer(digest_bytes, np.dtype("<u8")).reshape(len(ids), 2).astype(np.uint64)
