"""The head that is trained on frozen features, and the labelled rows for its training."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, batches, derive_seed, stratify_order
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.models import forward, seed_torch
from vfl_party.models.encoders.mlp import layers
from vfl_party.models.metrics import loss_fn
from vfl_party.models.optim import build_optimizer, build_schedule, clip
from vfl_party.phases.context import Party


@dataclass(frozen=True)
class KnownRows:
    """The rows of a split whose labels the active party knows: its own row numbers [N], and
    features [N, E].
    """

    rows: Rows
    features: Tensor


def select_labelled(
    party: Party, phase: str, known: KnownRows, settings: ProbeSettings
) -> KnownRows:
    """Returns a stratified sample of the training rows, drawn by the recipe's seed, whose labels
    the head learns from.

    A larger share contains the rows of a smaller one. Raises InputError if no row is left, or only
    one for a hidden layer.
    """
    chosen, share = known, settings.labelled
    if share < 1.0:
        targets = party.need_labels()[1][torch.from_numpy(known.rows)].cpu()
        order = stratify_order(party.recipe.seed, targets.long().reshape(-1).numpy())
        some = np.sort(order[: round(share * len(known.rows))])
        chosen = KnownRows(
            known.rows[some], known.features[torch.from_numpy(some).to(party.device)]
        )
    min_rows = 2 if settings.hidden else 1
    if len(chosen.rows) < min_rows:
        raise InputError(
            Code.DATA_INVALID,
            f"phase {phase}: labelled = {share:g} of {len(known.rows):,} training rows with "
            f"labels leaves too few (got {len(chosen.rows)}, need {min_rows}). Increase labelled.",
        )
    return chosen


class ProbeHead:
    """The top model or, with ``hidden``, a model that ends with the phase."""

    def __init__(self, party: Party, phase: str, settings: ProbeSettings) -> None:
        self._party, self._phase, self._settings = party, phase, settings
        self._own: nn.Module | None = None
        if settings.hidden:
            with seed_torch(derive_seed(party.own_seed, "init", party.name, phase)):
                made = layers(
                    party.embedding_size,
                    settings.hidden,
                    party.recipe.task.outputs,
                    batch_norm=True,
                )
            self._own = nn.Sequential(*made).to(party.device)
        self._model = self._own if self._own is not None else party.models["top"]

    def _logits(self, features_NE: Tensor) -> Tensor:
        if self._own is None:
            return self._party.outputs(features_NE)
        return forward(self._own, features_NE, precision=self._party.recipe.model.precision)

    @torch.no_grad()
    def outputs(self, features_NE: Tensor) -> Tensor:
        """Returns the head's outputs for features, [N, O]."""
        self._model.eval()
        return self._logits(features_NE)

    def train(self, train: KnownRows, y_N: Tensor) -> tuple[int, float]:
        """Trains the head on frozen features; returns the number of steps, and the last epoch's
        loss.
        """
        party, settings, phase, model = self._party, self._settings, self._phase, self._model
        optimizer = build_optimizer(settings.optimizer, model.parameters())
        positions = np.arange(len(train.rows), dtype=np.int64)
        per = len(batches(party.own_seed, phase, 0, positions, settings.batch_size))
        epochs = max(settings.epochs, -(-settings.least_steps // per))
        schedule = build_schedule(settings.optimizer, optimizer, epochs)
        weights = party.row_weights(train.rows)
        w_N = None if weights is None else party.take(weights, train.rows)
        loss_of = loss_fn(party.recipe.task)
        steps, mean = 0, 0.0
        model.train()
        for epoch in range(epochs):
            total = torch.zeros((), device=party.device)
            parts = batches(party.own_seed, phase, epoch, positions, settings.batch_size)
            for rows in parts:
                loss = loss_of(
                    self._logits(party.take(train.features, rows)),
                    party.take(y_N, rows),
                    None if w_N is None else party.take(w_N, rows),
                )
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                clip(settings.optimizer, model.parameters())
                optimizer.step()
                total += loss.detach()
            schedule.step()
            steps, mean = steps + len(parts), total.item() / len(parts)
        return steps, mean
