"""An encoder with its pretraining heads, and its training by local self-supervision, with or
without a guiding encoder: FedHSSL, Alg. 1, lines 16 to 27, and SS-VFL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import RoundReport
from vfl_party.base.seeds import Rows, derive_seed, full_batches
from vfl_party.models import build_predictor, build_projector, generator, seed_torch
from vfl_party.models.training import build_optimizer, build_schedule, clip, keep_rate
from vfl_party.phases.context import Party
from vfl_party.selfsup.augment import check_keys, make_augment
from vfl_party.selfsup.losses import (
    KeyQueue,
    byol,
    ema_update,
    moco,
    nt_xent,
    simsiam,
    variance_kept,
)
from vfl_party.selfsup.settings import SelfSupPlan


class Tower(nn.Module):
    """An encoder with its heads: encoder -> projector (z) -> predictor (p). Without a predictor in
    the plan, p = z. ``width``: The width of z.
    """

    def __init__(
        self, encoder: nn.Module, projector: nn.Module, predictor: nn.Module, width: int
    ) -> None:
        super().__init__()
        self.width = width
        self.encoder, self.projector, self.predictor = encoder, projector, predictor

    def project(self, party: Party, *batches: tuple[Tensor, ...]) -> list[Tensor]:
        """Returns the projections z [B, P] for each batch of the encoder's inputs. ``party``: The
        encoder's party.
        """
        return [self.projector(h_BE) for h_BE in party.encode.through(self.encoder, *batches)]

    def predict(self, z_BP: Tensor) -> Tensor:
        """Returns the predictions p [B, P]."""
        p_BP: Tensor = self.predictor(z_BP)
        return p_BP


def build_tower(
    party: Party, phase: str, label: str, encoder: nn.Module, plan: SelfSupPlan, *, shared: bool
) -> Tower:
    """Makes a tower by adding heads to ``encoder``. ``shared``: Whether the heads are the same at
    every party; if not, they are drawn from the party's own seed.
    """
    width = encoder_width(encoder, party)
    names = (phase, label) if shared else (phase, party.name, label)
    with seed_torch(derive_seed(party.recipe.seed if shared else party.own_seed, "init", *names)):
        projector, width = build_projector(width, plan.widths), plan.width(width)
        predictor = build_predictor(width, plan.hidden) if plan.predicts else nn.Identity()
    return Tower(encoder, projector.to(party.device), predictor.to(party.device), width)


def encoder_width(encoder: nn.Module, party: Party) -> int:
    """Returns the width of the encoder's output, found with one row of zeros."""
    features, mode = party.rows.need_features(), encoder.training
    encoder.eval()
    with torch.no_grad():
        inputs = features.inputs(party.rows.get("local")[:1])
        width = int(encoder(*inputs).shape[1])
    encoder.train(mode)
    return width


class TrainedTower:
    """A tower with its optimizer and schedule. They are saved together in checkpoints."""

    def __init__(self, tower: Tower, plan: SelfSupPlan, epochs: int) -> None:
        self.tower, self._plan = tower, plan
        self._params = list(tower.parameters())
        self._optimizer = build_optimizer(plan.optimizer, self._params)
        # A predictor with its own rate has its own parameter group and schedule.
        constant = list(tower.predictor.parameters()) if not plan.anneals_predictor else []
        keep_rate(self._optimizer, constant)
        self._schedule = build_schedule(plan.optimizer, self._optimizer, epochs)

    def step(self, loss: Tensor) -> None:
        """Updates the tower with the gradient of ``loss``."""
        for parameter in self._params:
            parameter.grad = None
        loss.backward()  # type: ignore[no-untyped-call]
        clip(self._plan.optimizer, self._params)
        self._optimizer.step()

    def end_epoch(self) -> None:
        """Advances the learning rate schedule."""
        self._schedule.step()

    def state(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {
            "tower": dict(self.tower.state_dict()),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict(),
        }

    def load_state(self, tree: dict[str, Any]) -> None:
        """Restores a state that ``state`` returned."""
        self.tower.load_state_dict(tree["tower"])
        self._optimizer.load_state_dict(tree["optimizer"])
        self._schedule.load_state_dict(tree["schedule"])


def make_target(tower: Tower) -> Tower:
    """Makes the initial target encoder: a copy of encoder and projector, without gradient."""
    # Batch normalization over several processes refers to a process group, which cannot be copied.
    groups = [getattr(module, "process_group", None) for module in tower.modules()]
    target = deepcopy(tower, {id(group): group for group in groups if group is not None})
    target.predictor = nn.Identity()
    return target.requires_grad_(False)


def update_target(target: Tower, online: Tower, momentum: float) -> None:
    """Updates the target tower, a moving average of the online tower's parameters (FedHSSL, Table
    II).
    """
    ema_update(target.encoder, online.encoder, momentum)
    ema_update(target.projector, online.projector, momentum)


def make_queue(
    party: Party, phase: str, label: str, plan: SelfSupPlan, *, rows: int, width: int
) -> KeyQueue:
    """Makes a queue of ``plan.queue`` MoCo keys of ``width``, which are random directions at first.

    Raises InputError unless the queue is smaller than ``rows``. A larger queue would contain every
    row's own key as a negative.
    """
    if plan.queue >= rows:
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {phase}: queue must be less than the {rows} rows of {party.name}, "
            f"or a row's own keys become negatives (got {plan.queue}). Set queue to {rows - 1} or "
            "less.",
        )
    seed = derive_seed(party.own_seed, "queue", phase, party.name, label)
    return KeyQueue(plan.queue, width, seed, party.device)


def loss_against(plan: SelfSupPlan, p_BP: Tensor, z_BP: Tensor, queue: KeyQueue | None) -> Tensor:
    """Computes the loss L_SSL(p, z) of FedHSSL's Eqs. 2 to 4. No gradient flows into z."""
    match plan.ssl:
        case "simsiam":
            return simsiam(p_BP, z_BP)
        case "byol":
            return byol(p_BP, z_BP)
        case _:
            if queue is None:
                return nt_xent(p_BP, z_BP.detach(), plan.temperature)
            return moco(p_BP, z_BP, queue.keys, plan.temperature)


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
        self._augment = make_augment(plan.augment, party.rows.need_features(), self._rows)

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
        features = party.rows.need_features()
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
    rows = party.rows.get(split)
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


# The share of variance below which projections have collapsed; trained encoders keep 0.5 and more.
COLLAPSED = 0.02


def report(party: str, done: Mapping[str, Epochs], warned: set[str] | None = None) -> RoundReport:
    """Makes the report of one party's round: loss and ``variance_kept`` of each step, and a warning
    if projections collapse.

    ``done``: {step: the result of its epochs}. ``warned``: The steps with an earlier warning, which
    get no second warning. This function adds new ones.
    """
    warned = set() if warned is None else warned
    notes = [
        f"{party}: projections of the {step} step keep {epochs.variance_kept:.0%} of their "
        "variance: they are collapsing"
        for step, epochs in done.items()
        if epochs.variance_kept < COLLAPSED and step not in warned
    ]
    warned |= {step for step, epochs in done.items() if epochs.variance_kept < COLLAPSED}
    return RoundReport(
        steps=sum(epochs.steps for epochs in done.values()),
        metrics={
            step: {"loss": epochs.loss, "variance_kept": epochs.variance_kept}
            for step, epochs in done.items()
        },
        note="; ".join(notes),
    )
