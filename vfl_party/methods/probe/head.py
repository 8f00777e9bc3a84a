"""Trains the head on frozen features, and selects the labelled rows for its training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, batches, derive_seed, stratify_order
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.models import forward, seed_torch
from vfl_party.models.layers import build_layers
from vfl_party.models.losses import loss_fn
from vfl_party.models.training import build_optimizer, build_schedule, clip
from vfl_party.phases.context import Party


@dataclass(frozen=True)
class KnownRows:
    """The rows of a split whose labels the active party knows: the active party's row numbers [N],
    and features [N, E].
    """

    rows: Rows
    features: Tensor


def select_labelled(
    party: Party, phase: str, known: KnownRows, settings: ProbeSettings
) -> KnownRows:
    """Returns a stratified sample of the training rows, drawn by the recipe's seed, from whose
    labels the head learns.

    The sample of a larger share contains the sample of a smaller share. Raises InputError if no row
    remains, or only one row with hidden layers.
    """
    selected, share = known, settings.labelled
    if share < 1.0:
        targets = party.need_labels()[1][torch.from_numpy(known.rows)].cpu()
        order = stratify_order(party.recipe.seed, targets.long().reshape(-1).numpy())
        positions = np.sort(order[: round(share * len(known.rows))])
        selected = KnownRows(
            known.rows[positions], known.features[torch.from_numpy(positions).to(party.device)]
        )
    min_rows = 2 if settings.hidden else 1
    if len(selected.rows) < min_rows:
        raise InputError(
            Code.DATA_INVALID,
            f"phase {phase}: labelled = {share:g} of {len(known.rows):,} training rows with labels "
            f"leaves too few (got {len(selected.rows)}, need {min_rows}). Increase labelled.",
        )
    return selected


class ProbeHead:
    """Trains the head: the top model or, with ``hidden``, a model that is discarded after the
    phase.
    """

    def __init__(self, party: Party, phase: str, settings: ProbeSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._hidden_head: nn.Module | None = None
        if settings.hidden:
            with seed_torch(derive_seed(party.own_seed, "init", party.name, phase)):
                head_layers = build_layers(
                    party.embedding_size,
                    settings.hidden,
                    party.recipe.task.outputs,
                    batch_norm=True,
                )
            self._hidden_head = nn.Sequential(*head_layers).to(party.device)
        self._model = self._hidden_head if self._hidden_head is not None else party.models["top"]

    def _compute_logits(self, features_NE: Tensor) -> Tensor:
        if self._hidden_head is None:
            return self._party.outputs(features_NE)
        return forward(self._hidden_head, features_NE, precision=self._party.recipe.model.precision)

    @torch.no_grad()
    def compute_outputs(self, features_NE: Tensor) -> Tensor:
        """Returns the head's outputs for features, [N, O]."""
        self._model.eval()
        return self._compute_logits(features_NE)

    def train(self, train: KnownRows, y_N: Tensor) -> tuple[int, float]:
        """Trains the head on frozen features and returns the number of steps and the mean loss of
        the last epoch.
        """
        party, settings, phase, model = self._party, self._settings, self._phase, self._model
        optimizer = build_optimizer(settings.optimizer, model.parameters())
        positions = np.arange(len(train.rows), dtype=np.int64)
        steps_per_epoch = len(batches(party.own_seed, phase, 0, positions, settings.batch_size))
        epochs = max(settings.epochs, -(-settings.least_steps // steps_per_epoch))
        schedule = build_schedule(settings.optimizer, optimizer, epochs)
        weights = party.row_weights(train.rows)
        w_N = None if weights is None else party.take(weights, train.rows)
        loss_function = loss_fn(party.recipe.task)
        steps, mean_loss = 0, 0.0
        model.train()
        for epoch in range(epochs):
            total = torch.zeros((), device=party.device)
            epoch_batches = batches(party.own_seed, phase, epoch, positions, settings.batch_size)
            for rows in epoch_batches:
                loss = loss_function(
                    self._compute_logits(party.take(train.features, rows)),
                    party.take(y_N, rows),
                    None if w_N is None else party.take(w_N, rows),
                )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                clip(settings.optimizer, model.parameters())
                optimizer.step()
                total += loss.detach()
            schedule.step()
            steps, mean_loss = steps + len(epoch_batches), total.item() / len(epoch_batches)
        return steps, mean_loss
