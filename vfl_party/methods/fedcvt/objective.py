"""Computes the loss of a step: the cross-entropies of three classifiers and five terms on both
parties' representations.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from vfl_common.config.models import TaskSettings
from vfl_party.methods.fedcvt.losses import (
    Representations,
    estimate_view,
    make_pseudo_labels,
    mean_distance,
    mean_overlap,
    split_halves,
)
from vfl_party.methods.fedcvt.settings import FedCVTSettings, Preset
from vfl_party.models import combine
from vfl_party.models.metrics import loss_fn

Classify = Callable[[Tensor], Tensor]
TERMS = ("classifiers", "shared", "overlap", "estimate")


@dataclass(frozen=True)
class StepLoss:
    """The loss of a step.

    ``terms``: the values of ``TERMS``, without weights. ``taken``: the number of rows that got
    pseudo-labels.
    """

    loss: Tensor
    terms: Tensor
    taken: Tensor


@dataclass(frozen=True)
class Objective:
    """Computes the loss of a step.

    ``both``: the joint classifier f^AB. ``active``, ``passive``: the classifiers f^A and f^B, each
    of one party's view.
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

        ``pseudo``: whether rows without labels may get pseudo-labels.
        """
        sharpen, num_aligned = self.settings.resolve_sharpness(self.preset), len(active.aligned)
        estimated_passive = estimate_view(active.all, active, passive, sharpen)
        estimated_active = estimate_view(passive.all, passive, active, sharpen)
        # The rows are the aligned rows, then the active party's own rows, then the passive party's
        # own rows.
        r_active = torch.cat([active.all, estimated_active[num_aligned:]])
        r_passive = torch.cat([passive.aligned, estimated_passive[num_aligned:], passive.own])
        classifiers, taken = self._classify(
            r_active, r_passive, y_L, num_aligned, len(active.own), pseudo=pseudo
        )
        shared_distance = mean_distance(
            split_halves(active.aligned)[1], split_halves(passive.aligned)[1], self.preset
        )
        terms: Mapping[str, Tensor] = {
            "shared": shared_distance,
            "overlap_active": mean_overlap(active.all, self.preset),
            "overlap_passive": mean_overlap(passive.all, self.preset),
            "estimate_active": mean_distance(
                estimated_active[:num_aligned], active.aligned, self.preset
            ),
            "estimate_passive": mean_distance(
                estimated_passive[:num_aligned], passive.aligned, self.preset
            ),
        }
        loss = classifiers
        for name, term in terms.items():
            loss = loss + self.settings.lambdas.of(name, self.preset) * term
        term_sums = [
            terms[f"{name}_active"] + terms[f"{name}_passive"] for name in ("overlap", "estimate")
        ]
        return StepLoss(
            loss, torch.stack([classifiers, shared_distance, *term_sums]).detach(), taken
        )

    def _classify(
        self,
        r_active: Tensor,
        r_passive: Tensor,
        y_L: Tensor,
        num_aligned: int,
        num_active_own: int,
        *,
        pseudo: bool,
    ) -> tuple[Tensor, Tensor]:
        """Returns the sum of the three cross-entropies, and the number of rows that got
        pseudo-labels.

        The joint classifier learns from all rows with labels or pseudo-labels. A party's classifier
        learns only from rows that the party has, because the party's view of other rows is an
        estimate.
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
        masks = [
            with_label_N,
            with_label_N & (place_N < num_aligned + num_active_own),
            with_label_N & ((place_N < num_aligned) | (place_N >= num_aligned + num_active_own)),
        ]
        loss = loss_fn(self.task)
        losses = [loss(out[rows], y_N[rows]) for out, rows in zip(outputs, masks, strict=True)]
        return torch.stack(losses).sum(), taken_N.sum()
