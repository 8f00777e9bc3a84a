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
    target_of,
    update_target,
)


@dataclass(frozen=True)
class Epochs:
    """The result of some epochs: steps, mean loss, and the share of the projections' variance that
    was kept.
    """

    steps: int
    loss: float
    variance_kept: float


@dataclass(frozen=True)
class Guide:
    """The cross-party tower that guides the local one, frozen.

    Args:
        tower: the tower.
        gamma: the weight of its two terms in the loss (Eq. 6).
        drifts: whether its BatchNorm updates its statistics here, as in FedHSSL's released code.
    """

    tower: Tower
    gamma: float
    drifts: bool


class LocalSelfSup:
    """One party's local tower and the objects that its training needs.

    Args:
        tower: the tower to train.
        guide: the guide of the local tower, if there is one.
        epochs: the epochs of the whole phase, for the schedule.
        split: the rows to train on; default: all of the party's training rows.
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
        self._target = target_of(tower) if plan.has_target else None
        queued = plan.ssl == "moco"
        sizes = {"rows": len(self._rows), "width": tower.width}
        self._keys = make_queue(party, phase, "local", plan, **sizes) if queued else None
        guided = queued and guide is not None and plan.negatives == "queue"
        self._guide_keys = make_queue(party, phase, "guide", plan, **sizes) if guided else None
        check_keys(party, phase, plan.augment)
        self._augment = make_augment(plan.augment, party.need_features(), self._rows)

    def _batches(self, epoch: int) -> list[Rows]:
        """Returns the batches of an epoch (numbered through the phase), in an order of this party
        only.
        """
        seed = derive_seed(self._party.own_seed, self._party.name)
        return full_batches(seed, self._phase, epoch, self._rows, self._plan.batch_size)

    def steps(self, epochs: int) -> int:
        """Returns the number of steps of ``epochs`` epochs."""
        return epochs * (len(self._rows) // self._plan.batch_size)

    def run(self, round_: int, epochs: int, tick: Callable[[], None]) -> Epochs:
        """Trains the local epochs of a round; calls ``tick`` after each step. Raises InputError if
        they diverge.
        """
        # Start from the encoder as earlier phases have trained it.
        if round_ == 0 and self._target is not None:
            self._target.load_state_dict(target_of(self.tower).state_dict())
        done = [self._epoch(round_ * epochs + epoch, tick) for epoch in range(epochs)]
        steps = sum(result.steps for result in done)
        loss, variance = (
            sum(result.loss for result in done) / epochs,
            sum(result.variance_kept for result in done) / epochs,
        )
        return check_finite(Epochs(steps, loss, variance), self._party, self._phase, "local")

    def _epoch(self, epoch: int, tick: Callable[[], None]) -> Epochs:
        """Trains one pass over the rows; ``epoch`` is numbered through the phase."""
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
            loss, z_BP, fresh = self._loss(v1, v2)
            # Alg. 1, line 25: the update.
            self._trained.step(loss)
            if self._target is not None:
                update_target(self._target, self.tower, self._plan.momentum)
            # After the step: the gradient needs the old keys.
            for queue, keys_BP in fresh:
                queue.push(keys_BP)
            total += loss.detach()
            variance += variance_kept(z_BP)
            tick()
        self._trained.end_epoch()
        return Epochs(len(batches), total.item() / len(batches), variance.item() / len(batches))

    def _loss(
        self, v1: tuple[Tensor, ...], v2: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, list[tuple[KeyQueue, Tensor]]]:
        """Returns the loss (Eq. 6), the first view's projections without gradient, and each
        queue's new keys.
        """
        fresh: list[tuple[KeyQueue, Tensor]] = []
        plan, tower = self._plan, self.tower
        z1_BP, z2_BP = tower.project(self._party, v1, v2)
        p1_BP, p2_BP = tower.predict(z1_BP), tower.predict(z2_BP)
        if plan.ssl == "simclr":
            # Symmetric by itself, with gradient on both sides.
            loss = nt_xent(z1_BP, z2_BP, plan.temperature)
        else:
            # Lines 20 and 21.
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
                fresh += [(self._keys, t1_BP), (self._keys, t2_BP)]
        if self._guide is not None and self._guide.gamma:
            # Alg. 1, line 23: the guide's projections.
            with torch.no_grad():
                g1_BP, g2_BP = self._guide.tower.project(self._party, v1, v2)
            keys = self._guide_keys
            loss = loss + self._guide.gamma * (
                loss_against(plan, p1_BP, g1_BP, keys) + loss_against(plan, p2_BP, g2_BP, keys)
            )
            if keys is not None:
                fresh += [(keys, g1_BP), (keys, g2_BP)]
        return loss, z1_BP.detach(), fresh

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
    """Returns ``epochs`` unchanged. Raises InputError if its loss is NaN or infinite: no other
    party could notice.
    """
    if not math.isfinite(epochs.loss):
        raise InputError(
            Code.NON_FINITE,
            f"phase {phase}: the {step} loss of {party.name} is {epochs.loss}, because its "
            "training diverged. Lower the learning rate.",
        )
    return epochs


def require_rows(party: Party, phase: str, split: str, batch_size: int) -> Rows:
    """Returns the rows of a split. Raises InputError if there are none, or too few for one
    batch.
    """
    rows = party.rows(split)
    what = {"local": "training", "aligned": "aligned training", "train": "labelled training"}[split]
    if len(rows) == 0:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: {party.name} has no {what} rows to learn from. Add rows, "
            "or change the splits.",
        )
    if batch_size > len(rows):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: batch_size must be at most {len(rows)}, the number of "
            f"{what} rows of {party.name} (got {batch_size}). Set a smaller batch_size.",
        )
    return np.asarray(rows)
