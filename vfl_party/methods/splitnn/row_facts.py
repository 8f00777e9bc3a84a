"""What the active party tells the chain of its gradients about their rows, for defences that depend
on labels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from vfl_common.config.models import TaskSettings
from vfl_party.models import Combined
from vfl_party.outbound.filter import Tensors

LABELS, OF_CLASS = "labels", "class gradients"
BESIDE = frozenset({LABELS, OF_CLASS})


class RowFacts:
    """Finds the facts that a chain ``knows`` (see ``Chain.knows``).

    ``labels``: the batch's targets. ``class gradients``: [classes, B, D], the gradients if all rows
    had one class.
    """

    def __init__(self, knows: frozenset[str], task: TaskSettings) -> None:
        self._knows, self._task = knows, task

    def of(
        self,
        combined: Combined,
        labels: Mapping[str, Tensor],
        y_B: Tensor,
        loss_of: Callable[[Tensor], Tensor],
    ) -> Mapping[str, Tensors]:
        """Returns {party: the facts of its rows}; before the loss's own backward pass.

        ``labels``: {party: those of its rows}. ``y_B``: of the whole batch. ``loss_of``: gives the
        loss of the batch with other targets, as far as it counts.
        """
        known: dict[str, dict[str, Tensor]] = {}
        if LABELS in self._knows:
            known = {name: {LABELS: labels[name]} for name in combined.received}
        if OF_CLASS in self._knows:
            losses = [loss_of(torch.full_like(y_B, c)) for c in range(self._task.classes or 2)]
            for name, gradients in combined.gradients_of(losses).items():
                known.setdefault(name, {})[OF_CLASS] = gradients
        return known
