"""Trains by local self-supervision, with or without a guiding encoder: FedHSSL, Alg. 1, lines 16 to
27, and SS-VFL.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, derive_seed, full_batches
from vfl_party.models import generator
from vfl_party.phases.context import Party
from vfl_party.selfsup.augment import make_augment
from vfl_party.selfsup.augment.check import check_keys
from vfl_party.selfsup.losses import KeyQueue, nt_xent, variance_kept
from vfl_party.selfsup.plan import SelfSupPlan
from vfl_party.selfsup.tower import (
    Tower,
    TrainedTower,
    loss_against,
    make_queue,
    make_target,
    update_target,
)


@dataclass(frozen=True)
class Epochs:
    """The result of one or more epochs: the number of steps, the mean loss, and ``variance_kept``
    of the projections.
    """

    steps: int
    loss: float
    variance_kept: float


@dataclass(frozen=True)
class Guide:
    """The frozen cross-party tower that guides the local tower.

    Args:
        tower: The cross-party tower.
        gamma: The weight of its two terms in the loss (Eq. 6).
        drifts: Whether its BatchNorm statistics are updated in the local step, as in FedHSSL's
            released code.
    """

    tower: Tower
    gamma: float
    drifts: bool


class LocalSelfSup:
    """Trains one party's local tower.

    Args:
        tower: The tower to train.
        guide: The guide of the local tower; None without a guide.
        epochs: The number of epochs in the whole phase, for the schedule.
        split: The split to train on. By default, all of the party's training rows.
    """

    def __init__(
        self,
        party: Party,
        phase: str,
        plan: SelfSupPlan,
        tower: Tower,
        *,
        epochs: int,
        guide: Guide | None = None,
        split: str = "local",
    ) -> None:
        self._party, self._phase, self._plan = party, phase, plan
        self._rows = require_rows(party, phase, split, plan.batch_size)
        self.tower = tower
        self._guide = guide
        self._trained = TrainedTower(tower, plan, epochs)
        self._target = make_target(tower) if plan.has_target else None
        needs_queue = plan.ssl == "moco"
        sizes = {"rows": len(self._rows), "width": tower.width}
        self._keys = make_queue(party, phase, "local", plan, **sizes) if needs_queue else None
        needs_guide_queue = needs_queue and guide is not None and plan.negatives == "queue"
        self._guide_keys = (
            make_queue(party, phase, "guide", plan, **sizes) if needs_guide_queue else None
        )
        check_keys(party, phase, plan.augment)
        self._augment = make_augment(plan.augment, party.need_features(), self._rows)

    def _batches(self, epoch: int) -> list[Rows]:
        """Returns the batches of an epoch, in an order that only this party draws. ``epoch``: The
        number of the epoch in the phase.
        """
        seed = derive_seed(self._party.own_seed, self._party.name)
        return full_batches(seed, self._phase, epoch, self._rows, self._plan.batch_size)

    def steps(self, epochs: int) -> int:
        """Returns the number of steps of ``epochs`` epochs."""
        return epochs * (len(self._rows) // self._plan.batch_size)

    def run(self, round_: int, epochs: int, tick: Callable[[], None]) -> Epochs:
        """Trains the local epochs of a round. Calls ``tick`` after each step. Raises InputError if
        the training diverges.
        """
        # The target starts from the encoder that earlier phases have trained.
        if round_ == 0 and self._target is not None:
            self._target.load_state_dict(make_target(self.tower).state_dict())
        results = [self._run_epoch(round_ * epochs + epoch, tick) for epoch in range(epochs)]
        steps = sum(result.steps for result in results)
        loss, variance = (
            sum(result.loss for result in results) / epochs,
            sum(result.variance_kept for result in results) / epochs,
        )
        return check_finite(Epochs(steps, loss, variance), self._party, self._phase, "local")

    def _run_epoch(self, epoch: int, tick: Callable[[], None]) -> Epochs:
        """Trains one epoch. ``epoch``: The number of the epoch in the phase."""
        party = self._party
        features = party.need_features()
        random = generator(derive_seed(party.own_seed, "augment", self._phase, party.name, epoch))
        self.tower.train()
        if self._guide is not None:
            self._guide.tower.train(self._guide.drifts)
        total, variance = torch.zeros((), device=party.device), torch.zeros((), device=party.device)
        batches = self._batches(epoch)
        for rows in features.expecting(batches):
            # Alg. 1, line 19.
            v1, v2 = self._augment.two_views(features.inputs(rows), random)
            loss, z_BP, new_keys = self._compute_loss(v1, v2)
            # Alg. 1, line 25: the update.
            self._trained.step(loss)
            if self._target is not None:
                update_target(self._target, self.tower, self._plan.momentum)
            # Keys are pushed after the step, because the gradient needs the old keys.
            for queue, keys_BP in new_keys:
                queue.push(keys_BP)
            total += loss.detach()
            variance += variance_kept(z_BP)
            tick()
        self._trained.end_epoch()
        return Epochs(len(batches), total.item() / len(batches), variance.item() / len(batches))

    def _compute_loss(
        self, v1: tuple[Tensor, ...], v2: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, list[tuple[KeyQueue, Tensor]]]:
        """Returns the loss (Eq. 6), the first view's projections without gradient, and each
        queue's new keys.
        """
        new_keys: list[tuple[KeyQueue, Tensor]] = []
        plan, tower = self._plan, self.tower
        z1_BP, z2_BP = tower.project(self._party, v1, v2)
        p1_BP, p2_BP = tower.predict(z1_BP), tower.predict(z2_BP)
        if plan.ssl == "simclr":
            # This loss is symmetric by itself, with gradient on both sides.
            loss = nt_xent(z1_BP, z2_BP, plan.temperature)
        else:
            # Alg. 1, lines 20 and 21.
            with torch.no_grad():
                t1_BP, t2_BP = (
                    (z1_BP, z2_BP)
                    if self._target is None
                    else self._target.project(self._party, v1, v2)
                )
            loss = (
                loss_against(plan, p1_BP, t2_BP, self._keys)
                + loss_against(plan, p2_BP, t1_BP, self._keys)
            ) / 2
            if self._keys is not None:
                new_keys += [(self._keys, t1_BP), (self._keys, t2_BP)]
        if self._guide is not None and self._guide.gamma:
            # Alg. 1, line 23: the guide's projections.
            with torch.no_grad():
                g1_BP, g2_BP = self._guide.tower.project(self._party, v1, v2)
            keys = self._guide_keys
            loss = loss + self._guide.gamma * (
                loss_against(plan, p1_BP, g1_BP, keys) + loss_against(plan, p2_BP, g2_BP, keys)
            )
            if keys is not None:
                new_keys += [(keys, g1_BP), (keys, g2_BP)]
        return loss, z1_BP.detach(), new_keys

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "trained": self._trained.state(),
            "target": None if self._target is None else dict(self._target.state_dict()),
            "keys": None if self._keys is None else self._keys.state(),
            "guide_keys": None if self._guide_keys is None else self._guide_keys.state(),
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self._trained.load_state(tree["trained"])
        if self._target is not None:
            self._target.load_state_dict(tree["target"])
        for queue, name in ((self._keys, "keys"), (self._guide_keys, "guide_keys")):
            if queue is not None:
                queue.load_state(tree[name])


def check_finite(epochs: Epochs, party: Party, phase: str, step: str) -> Epochs:
    """Returns ``epochs`` unchanged. Raises InputError if its loss is NaN or infinite, which no
    other party could notice.
    """
    if not math.isfinite(epochs.loss):
        raise InputError(
            Code.NON_FINITE,
            f"phase {phase}: the {step} loss of {party.name} is {epochs.loss}, because its "
            "training diverged. Lower the learning rate.",
        )
    return epochs


def require_rows(party: Party, phase: str, split: str, batch_size: int) -> Rows:
    """Returns the rows of a split. Raises InputError if the split is empty or smaller than one
    batch.
    """
    rows = party.rows(split)
    kind = {"local": "training", "aligned": "aligned training", "train": "labelled training"}[split]
    if len(rows) == 0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: {party.name} has no {kind} rows to learn from. Add rows, "
            "or change the splits.",
        )
    if batch_size > len(rows):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: batch_size must be at most {len(rows)}, the number of "
            f"{kind} rows of {party.name} (got {batch_size}). Set a smaller batch_size.",
        )
    return np.asarray(rows)
