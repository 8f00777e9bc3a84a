"""Computes the weight of each row in the training loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vfl_common.config.task import TaskSettings, class_text
from vfl_party.base.devices import get_real_dtype
from vfl_party.data import checks
from vfl_party.data.inputs.labels import Labels


def check_weights(source: str, name: str, values: npt.NDArray[Any]) -> Tensor:
    """Returns the weights as float64 [N]. Raises InputError unless all weights are finite and at
    least 0.
    """
    if values.dtype.kind not in "biuf":
        raise checks.unusable(
            source, f"weight column {name!r} must hold numbers (got text). Correct it."
        )
    if not np.isfinite(values).all():
        raise checks.unusable(
            source,
            f"weight column {name!r} has numbers that are not finite, such as inf. Correct them.",
        )
    if (values < 0).any():
        raise checks.unusable(source, f"weight column {name!r} has numbers below 0. Correct them.")
    return torch.from_numpy(values.astype(np.float64))


def check_classes(task: TaskSettings, labels: Labels) -> None:
    """Raises InputError if ``task.class_weight`` names a class that the labels do not have."""
    known = {class_text(name) for name in labels.classes}
    for name in task.class_weight if isinstance(task.class_weight, dict) else ():
        if name not in known:
            raise checks.unusable(
                labels.source,
                f"the label has no value {name!r}, which task.class_weight of the recipe names. "
                "Correct the recipe.",
            )


def row_weights(
    task: TaskSettings,
    labels: Labels,
    targets: Tensor,
    column_N: Tensor | None,
    rows: npt.NDArray[np.int64],
) -> Tensor | None:
    """Computes the weight of each row in the loss, float32 [N]: the weight in the column times the
    weight of the class, scaled to a mean of 1 over ``rows``. None if all rows have the same weight.

    With ``balanced``, the weight of a class is N / (classes * rows of the class), over ``rows``.
    Raises InputError if all of ``rows`` have the weight 0, or if the weight of another row is too
    large.
    """
    if column_N is None and task.class_weight is None:
        return None
    weights_N = torch.ones(len(targets), dtype=torch.float64)
    row_index = torch.from_numpy(rows)
    if column_N is not None:
        # Weights are divided by the largest weight, so that no sum or product overflows.
        largest = column_N[row_index].max() if len(rows) else column_N.new_zeros(())
        weights_N *= column_N / (largest if largest > 0 else 1.0)
    if task.class_weight is not None:
        codes_N = targets.detach().cpu().reshape(-1).long()
        if isinstance(task.class_weight, dict):
            class_weights_C = torch.tensor(
                [task.class_weight.get(class_text(name), 1.0) for name in labels.classes],
                dtype=torch.float64,
            )
        else:
            counts_C = torch.bincount(codes_N[row_index], minlength=len(labels.classes)).double()
            class_weights_C = len(rows) / (len(labels.classes) * counts_C.clamp_min(1.0))
        weights_N *= class_weights_C[codes_N]
    mean = weights_N[row_index].mean()
    if len(rows) and not mean > 0:
        raise checks.unusable(
            labels.source, "all training rows have the weight 0. Correct the weights."
        )
    weights_N = (weights_N / mean).to(get_real_dtype())
    if not weights_N.isfinite().all():
        raise checks.unusable(
            labels.source,
            "a row outside training has more than 1e38 times the mean weight of the training "
            "rows. Correct data.weight.",
        )
    return weights_N
