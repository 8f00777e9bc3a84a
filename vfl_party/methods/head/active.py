"""The active party's side: collects representations once, then trains the top model and, if the
recipe enables this, the active party's encoder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.config.models import TopSettings
from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import HeldRows, Rows, batches
from vfl_party.methods.head.settings import TRAIN, UPLOAD, HeadSettings
from vfl_party.methods.head.upload import Uploads, zero_late_weights
from vfl_party.models import combine
from vfl_party.models.losses import loss_fn
from vfl_party.models.top import STAND_INS, learnt_stand_ins
from vfl_party.models.training import build_optimizer, build_schedule, clip
from vfl_party.phases.context import Party
from vfl_party.phases.passes import HeldBatch, compute_losses, make_passes
from vfl_party.phases.scoring import embed
from vfl_party.phases.sets import Sets, sum_losses
from vfl_party.privacy.dpsgd import PrivateSteps
from vfl_party.selfsup.augment.supervised import BatchViews


class ActiveHead(Phase):
    """Runs two rounds: the upload and the training."""

    alone_from = TRAIN

    def __init__(self, party: Party, name: str, settings: HeadSettings) -> None:
        self.name, self.rounds = name, 2
        self._party, self._settings = party, settings
        self._loss, self._sets = loss_fn(party.recipe.task), Sets(party, name, settings)
        self._stand_ins = learnt_stand_ins(party.models)
        self._rows = party.rows("train")
        self._weights = party.row_weights(self._rows) if len(self._rows) else None
        where = f"recipe: phases: {name}"
        if len(self._rows) == 0:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: there are no labelled training rows. Add rows with labels to the "
                "training split.",
            )
        if settings.deadline_s is not None and party.recipe.model.combine != "concat":
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: deadline_s needs model.combine = 'concat', because zeros for a late "
                f"party change the {party.recipe.model.combine} of all embeddings. Set "
                "model.combine = 'concat', or remove deadline_s.",
            )
        if settings.deadline_s is not None and not isinstance(party.recipe.model.top, TopSettings):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: deadline_s needs a top model of kind 'mlp', whose weights for a late "
                "party's representations are known. Set model.top.kind = 'mlp', or remove "
                "deadline_s.",
            )
        self._trains_encoder = settings.own_encoder == "trained"
        if self._trains_encoder and party.features is None:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: own_encoder = 'trained' needs features, but {party.name} has none. "
                "Give it features, or remove own_encoder.",
            )
        augment = settings.augment
        self._views = BatchViews(party, name, augment) if augment is not None else None
        self._models = nn.ModuleDict({key: party.models[key] for key in self._trained_models})
        norms = any(isinstance(module, _BatchNorm) for module in self._models.modules())
        if norms and min(settings.batch_size, len(self._rows)) < 2:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: batch normalization needs batches of at least 2 rows. Add rows, or "
                "increase batch_size.",
            )
        if norms and party.recipe.rows.partial:
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: batch normalization needs batches of at least 2 rows, but with "
                "rows.partial a group of rows may be smaller. Choose models without batch "
                "normalization.",
            )
        self._params = list(self._models.parameters())
        self._optimizer = build_optimizer(settings.optimizer, self._params)
        self.epochs = self._epochs = settings.epochs_over(len(self._rows))
        self._schedule = build_schedule(settings.optimizer, self._optimizer, self._epochs)
        self._positions = np.arange(len(self._rows), dtype=np.int64)
        self._private: PrivateSteps | None = None
        if settings.dp is not None:
            if party.recipe.task.compares:
                kind = party.recipe.task.kind
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{where}: dp limits the influence of each row, but the loss of a {kind} task "
                    "compares rows. Remove dp.",
                )
            if self._weights is not None:
                raise InputError(
                    Code.CONFIG_INVALID,
                    f"{where}: task.class_weight and data.weight depend on all rows, which the "
                    "epsilon of dp does not cover. Remove dp, or the weights.",
                )
            size, norm = settings.batch_size, settings.dp.max_grad_norm
            trained = self._models, self._optimizer, self._positions
            self._private = PrivateSteps(
                party.need_privacy(), name, party.name, *trained, size, norm
            )
        self._uploads = Uploads(party, name, settings)

    @property
    def _trained_models(self) -> tuple[str, ...]:
        encoder = ("encoder",) if self._trains_encoder else ()
        stand_ins = (STAND_INS,) if self._stand_ins is not None else ()
        return (*encoder, "top", *stand_ins)

    def run_round(self, round_: int) -> RoundReport:
        if round_ == UPLOAD:
            return self._uploads.collect()
        return self._train(round_)

    def _train(self, round_: int) -> RoundReport:
        """Trains the models (SS-VFL, Alg. 1, lines 6 to 10; FedOnce, Alg. 1, lines 20 to 30)."""
        self._uploads.acknowledge()
        party, combine_rule, top = (
            self._party,
            self._party.recipe.model.combine,
            self._models["top"],
        )
        _, targets = party.need_labels()
        y_N = party.take(targets, self._rows)
        r_ND = {
            passive.name: self._uploads.by_party[passive.name] for passive in party.recipe.passives
        }
        w_N = None if self._weights is None else party.take(self._weights, self._rows)
        own_ND = self._embed_frozen()
        epochs, held_rows = self._epochs, party.data.held

        def loss(batch: Rows) -> Tensor:
            own_BD = self._embed_own(own_ND, batch, steps)
            y_B = party.take(y_N, batch)
            weights_B = None if w_N is None else party.take(w_N, batch)
            if held_rows is not None:
                groups = make_passes(
                    combine_rule, self._sets, self._make_held_batch(held_rows, batch, own_BD, steps)
                )
                outputs = [top(combine(combine_rule, group.embeddings)) for group in groups]
                return sum_losses(
                    compute_losses(self._loss, outputs, y_B, weights_B, groups), groups
                )
            r_BD = {name: party.take(rows_ND, batch) for name, rows_ND in r_ND.items()}
            sets = self._sets.draw(r_BD, steps)
            combined = self._sets.embeddings(sets, own_BD, r_BD) or [[*own_BD, *r_BD.values()]]
            outputs = [top(combine(combine_rule, embeddings)) for embeddings in combined]
            return sum_losses(compute_losses(self._loss, outputs, y_B, weights_B, None), sets)

        steps, mean_loss = 0, 0.0
        self._models.train()
        for epoch in range(epochs):
            total, steps_before, num_losses = torch.zeros((), device=party.device), steps, 0
            for batch in self._batches(epoch):
                batch_loss = (
                    self._private.step(batch, loss)
                    if self._private is not None
                    else self._step(batch, loss)
                )
                steps += 1
                # A batch that is drawn for differential privacy may be empty.
                if batch_loss is not None:
                    total += batch_loss
                    num_losses += 1
            # Without a step, the privacy budget is used up.
            if steps == steps_before:
                break
            mean_loss = total.item() / num_losses if num_losses else mean_loss
            self._schedule.step()
            party.tick(self.name, round_, self.rounds, epoch + 1, epochs)
        zero_late_weights(self._models["top"], party.recipe, self._uploads.late)
        metrics = {"loss": mean_loss}
        if self._private is not None:
            return RoundReport(
                steps,
                {"train": {**metrics, "epsilon": self._private.epsilon}},
                note=self._private.note,
            )
        return RoundReport(steps, {"train": metrics})

    def _make_held_batch(
        self, held: HeldRows, batch: Rows, own_BD: list[Tensor], step: int
    ) -> HeldBatch:
        """Returns a batch with the received representations of its rows. ``batch``: positions in
        the training rows.
        """
        party, rows = self._party, self._rows[batch]
        uploads = self._uploads.by_party
        places_by_party = {name: places for name in uploads if len(places := held.of(name, rows))}
        r_RD = {}
        for name, party_places in places_by_party.items():
            # Positions among the training rows that this party holds, which it has sent in the
            # common order.
            sent_positions = np.searchsorted(held.of(name, self._rows), batch[party_places])
            r_RD[name] = party.take(uploads[name], sent_positions)
        return HeldBatch(len(rows), own_BD, r_RD, places_by_party, (step,), party.widths)

    def _batches(self, epoch: int) -> Iterable[Rows]:
        """Returns the batches of an epoch, as positions in the training rows."""
        if self._private is not None:
            return self._private.batches(epoch)
        party = self._party
        return batches(party.own_seed, self.name, epoch, self._positions, self._settings.batch_size)

    def _step(self, batch: Rows, loss: Callable[[Rows], Tensor]) -> Tensor:
        value = loss(batch)
        self._optimizer.zero_grad()
        if self._stand_ins is not None:
            self._stand_ins.zero_gradients()
        value.backward()  # type: ignore[no-untyped-call]
        clip(self._settings.optimizer, self._params)
        self._optimizer.step()
        return value.detach()

    def _embed_frozen(self) -> list[Tensor]:
        """Returns the active party's representations of the training rows, [N, D]; an empty list if
        the party has no features or trains its encoder.
        """
        if self._party.features is None or self._trains_encoder:
            return []
        return [embed(self._party, self._rows)]

    def _embed_own(self, frozen_ND: list[Tensor], batch: Rows, step: int) -> list[Tensor]:
        """Returns the active party's representations of a batch, [B, D]; an empty list if the party
        has no features. ``batch``: positions in the training rows. ``step``: the batch's number in
        the phase.
        """
        if not self._trains_encoder:
            return [self._party.take(rows_ND, batch) for rows_ND in frozen_ND]
        rows, views = self._rows[batch], self._views
        features = self._party.need_features()
        inputs = features.inputs(rows) if views is None else views.inputs(rows, step)
        return [self._models["encoder"](*inputs)]

    def finish(self) -> None:
        if self._private is not None:
            self._private.close()

    def state(self) -> Tree:
        private = self._private.state() if self._private is not None else None
        return {**self._uploads.state(), "private": private}

    def load_state(self, tree: Tree) -> None:
        self._uploads.load_state(tree)
        if self._private is not None:
            self._private.load_state(tree["private"])
