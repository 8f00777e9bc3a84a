"""The loss of a step: three classifiers' cross-entropies and five terms over both parties'
representations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl_common.config.models import TaskSettings
from vfl_party.methods.fedcvt.losses import (
    Representations,
    distance,
    estimate,
    halves,
    make_pseudo_labels,
    overlap,
)
from vfl_party.methods.fedcvt.settings import FedCVTSettings, Preset
from vfl_party.models import combine
from vfl_party.models.metrics import loss_fn

Classify = Callable[[Tensor], Tensor]
TERMS = ("classifiers", "shared", "overlap", "estimate")


@dataclass(frozen=True)
class StepLoss:
    """A step's loss. ``terms``: those of ``TERMS``, without weights; ``taken``: how many rows got
    pseudo-labels.
    """

    loss: Tensor
    terms: Tensor
    taken: Tensor


@dataclass(frozen=True)
class Objective:
    """``both``: f^AB, the joint classifier; ``active``, ``passive``: f^A and f^B, of one view
    each.
    """

    task: TaskSettings
    preset: Preset
    settings: FedCVTSettings
    both: Classify
    active: Classify
    passive: Classify

    def __call__(
        self, active: Representations, passive: Representations, y_L: Tensor, *, pseudo: bool
    ) -> StepLoss:
        """Returns the loss of a step of which the first L aligned rows have labels.

        ``pseudo``: whether the other rows may get pseudo-labels.
        """
        sharpen, count = self.settings.sharpness(self.preset), len(active.aligned)
        of_passive = estimate(active.all, active, passive, sharpen)
        of_active = estimate(passive.all, passive, active, sharpen)
        # Rows: the aligned ones, then the active party's own, then the passive party's own.
        r_active = torch.cat([active.all, of_active[count:]])
        r_passive = torch.cat([passive.aligned, of_passive[count:], passive.own])
        classifiers, taken = self._classifiers(
            r_active, r_passive, y_L, count, len(active.own), pseudo=pseudo
        )
        shared = distance(halves(active.aligned)[1], halves(passive.aligned)[1], self.preset)
        terms: Mapping[str, Tensor] = {
            "shared": shared,
            "overlap_active": overlap(active.all, self.preset),
            "overlap_passive": overlap(passive.all, self.preset),
            "estimate_active": distance(of_active[:count], active.aligned, self.preset),
            "estimate_passive": distance(of_passive[:count], passive.aligned, self.preset),
        }
        loss = classifiers
        for name, term in terms.items():
            loss = loss + self.settings.lambdas.of(name, self.preset) * term
        pairs = [
            terms[f"{name}_active"] + terms[f"{name}_passive"] for name in ("overlap", "estimate")
        ]
        return StepLoss(loss, torch.stack([classifiers, shared, *pairs]).detach(), taken)

    def _classifiers(
        self,
        r_active: Tensor,
        r_passive: Tensor,
        y_L: Tensor,
        aligned: int,
        own: int,
        *,
        pseudo: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum of the three cross-entropies, and how many rows got pseudo-labels.

        The joint classifier learns from all rows with labels or pseudo-labels; a party's, from
        those that the party has: its own view of a row that only the other has is an estimate.
        """
        outputs = [
            self.both(combine("concat", [r_active, r_passive])),
            self.active(r_active),
            self.passive(r_passive),
        ]
        taken_N, labels_N = make_pseudo_labels(
            self.task, [out[len(y_L) :] for out in outputs], self.settings.threshold
        )
        if not pseudo:
            taken_N = torch.zeros_like(taken_N)
        with_label_N = torch.cat([taken_N.new_ones(len(y_L)), taken_N])
        y_N, place_N = (
            torch.cat([y_L, labels_N]),
            torch.arange(len(with_label_N), device=y_L.device),
        )
        held = [
            with_label_N,
            with_label_N & (place_N < aligned + own),
            with_label_N & ((place_N < aligned) | (place_N >= aligned + own)),
        ]
        loss = loss_fn(self.task)
        losses = [loss(out[rows], y_N[rows]) for out, rows in zip(outputs, held, strict=True)]
        return torch.stack(losses).sum(), taken_N.sum()
