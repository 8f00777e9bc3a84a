"""Defines an encoder with its pretraining heads, its optimizer, and the loss against another
tower's projections.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import derive_seed
from vfl_party.models import build_predictor, build_projector, seed_torch
from vfl_party.models.training import build_optimizer, build_schedule, clip, keep_rate
from vfl_party.phases.context import Party
from vfl_party.selfsup.losses import KeyQueue, byol, ema_update, moco, nt_xent, simsiam
from vfl_party.selfsup.plan import SelfSupPlan


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
        return [self.projector(h_BE) for h_BE in party.through(self.encoder, *batches)]

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
    features, mode = party.need_features(), encoder.training
    encoder.eval()
    with torch.no_grad():
        inputs = features.inputs(party.rows("local")[:1])
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
