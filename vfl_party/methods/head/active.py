"""The active party's side: collects representations once, then trains the top model and, if the
recipe enables this, the active party's encoder, or grows boosted trees on the representations and
on its own columns.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vfl_common.config.models import GbdtTop, RawSettings, TopSettings
from vfl_common.errors import Code, InputError, InternalError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import HeldRows, Rows, batches, derive_seed
from vfl_party.methods.head.settings import TRAIN, UPLOAD, HeadSettings
from vfl_party.methods.head.upload import Uploads, get_upload_splits, zero_late_weights
from vfl_party.models import combine
from vfl_party.models.losses import loss_fn
from vfl_party.models.top import STAND_INS, learnt_stand_ins
from vfl_party.models.training import build_optimizer, build_schedule, clip
from vfl_party.models.trees import BoostedTrees, Matrix, TreeArrays, check_loss, grow, lightgbm
from vfl_party.phases.context import Party
from vfl_party.phases.passes import HeldBatch, compute_losses, make_passes
from vfl_party.phases.scoring import compute_outputs, embed, split_into_chunks
from vfl_party.phases.sets import Sets, sum_losses
from vfl_party.phases.sets import check as check_sets
from vfl_party.privacy.dpsgd import PrivateSteps
from vfl_party.selfsup.augment import BatchViews


class ActiveHead(Phase):
    """Runs two rounds: the upload and the training."""

    alone_from = TRAIN

    def __init__(self, party: Party, name: str, settings: HeadSettings) -> None:
        self.name, self.rounds = name, 2
        self._party, self._settings = party, settings
        self._loss, self._sets = loss_fn(party.recipe.task), Sets(party, name, settings)
        self._stand_ins = learnt_stand_ins(party.models)
        self._rows = party.rows.get("train")
        self._weights = party.rows.compute_weights(self._rows) if len(self._rows) else None
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
        if self._trains_encoder and party.rows.features is None:
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
        _, targets = party.rows.need_labels()
        y_N = party.rows.take(targets, self._rows)
        r_ND = {
            passive.name: self._uploads.by_party[passive.name] for passive in party.recipe.passives
        }
        w_N = None if self._weights is None else party.rows.take(self._weights, self._rows)
        own_ND = self._embed_frozen()
        epochs, held_rows = self._epochs, party.rows.data.held

        def loss(batch: Rows) -> Tensor:
            own_BD = self._embed_own(own_ND, batch, steps)
            y_B = party.rows.take(y_N, batch)
            weights_B = None if w_N is None else party.rows.take(w_N, batch)
            if held_rows is not None:
                groups = make_passes(
                    combine_rule, self._sets, self._make_held_batch(held_rows, batch, own_BD, steps)
                )
                outputs = [top(combine(combine_rule, group.embeddings)) for group in groups]
                return sum_losses(
                    compute_losses(self._loss, outputs, y_B, weights_B, groups), groups
                )
            r_BD = {name: party.rows.take(rows_ND, batch) for name, rows_ND in r_ND.items()}
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
            party.hooks.tick(self.name, round_, self.rounds, epoch + 1, epochs)
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
            r_RD[name] = party.rows.take(uploads[name], sent_positions)
        return HeldBatch(len(rows), own_BD, r_RD, places_by_party, (step,), party.exchanges.widths)

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
        if self._party.rows.features is None or self._trains_encoder:
            return []
        return [embed(self._party, self._rows)]

    def _embed_own(self, frozen_ND: list[Tensor], batch: Rows, step: int) -> list[Tensor]:
        """Returns the active party's representations of a batch, [B, D]; an empty list if the party
        has no features. ``batch``: positions in the training rows. ``step``: the batch's number in
        the phase.
        """
        if not self._trains_encoder:
            return [self._party.rows.take(rows_ND, batch) for rows_ND in frozen_ND]
        rows, views = self._rows[batch], self._views
        features = self._party.rows.need_features()
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


log = logging.getLogger(__name__)
# The maximum number of this party's columns in the log.
_SHOWN = 10


class TreesHead(Phase):
    """Runs two rounds: the upload and the growth of all trees."""

    alone_from = TRAIN

    def __init__(self, party: Party, name: str, settings: HeadSettings) -> None:
        self.name, self.rounds = name, 2
        self._party, self._settings = party, settings
        top, where = party.recipe.model.top, f"recipe: phases: {name}"
        if not isinstance(top, GbdtTop):
            raise InternalError(f"{where}: the top model does not consist of trees")
        self._top = top
        check_sets(party, name, settings)
        check_loss(party.recipe.task, top.library, where)
        if top.library == "lightgbm":
            lightgbm("recipe: model.top")
        if not len(party.rows.get("train")):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: there are no labelled training rows. Add rows with labels to the "
                "training split.",
            )
        if top.early_stopping is not None and not len(party.rows.get("validation")):
            raise InputError(
                Code.CONFIG_INVALID,
                "recipe: model.top: early_stopping needs validation rows (got none). Set "
                "rows.validation or data.split.",
            )
        self._uploads = Uploads(party, name, settings)

    def run_round(self, round_: int) -> RoundReport:
        if round_ == UPLOAD:
            return self._uploads.collect()
        self._uploads.acknowledge()
        party, top = self._party, self._party.models["top"]
        if not isinstance(top, BoostedTrees):
            raise InternalError(f"phase {self.name}: the top model has no trees")
        matrices = {split: self._make_matrix(split) for split in get_upload_splits(party.recipe)}
        seed = derive_seed(party.recipe.seed, self.name)
        train, validation = matrices["train"], matrices.get("validation")
        trees = grow(party.recipe.task, self._top, train, validation, seed)
        top.take(trees)
        # The loss is only logged, because a report would disclose information about labels to the
        # server before the evaluation.
        log.info(
            "phase %s: %d of at most %d boosting rounds, training loss %.4g; share of the gain: %s",
            self.name,
            len(trees.roots),
            self._top.trees,
            self._compute_loss(train),
            ", ".join(
                f"{name} {share:.1%}" for name, share in self._compute_gain_shares(trees).items()
            ),
            extra={"event": "importance"},
        )
        return RoundReport(0)

    def _compute_gain_shares(self, trees: TreeArrays) -> dict[str, float]:
        """Returns the share of the gain of all splits that each party's columns have, followed by
        the largest shares of this party's own columns.
        """
        party, start, shares = self._party, 0, {}
        sizes = self._count_columns()
        gain_F = trees.gains(sum(sizes.values()))
        gain_F /= gain_F.sum() or 1.0
        for name, count in sizes.items():
            shares[name] = float(gain_F[start : start + count].sum())
            start += count
        make = party.make_encoder
        if make is None or not isinstance(make.settings, RawSettings):
            return shares
        own_shares = {
            f"{party.name}.{name}": float(gain_F[column.numbers].sum())
            for name, column in party.rows.need_features().columns.items()
        }
        largest = sorted(own_shares.items(), key=lambda item: -item[1])[:_SHOWN]
        return shares | {name: share for name, share in largest if share}

    def _count_columns(self) -> dict[str, int]:
        """Returns {party: the number of its columns in the matrix}, in the matrix's order."""
        party = self._party
        own = {party.name: party.exchanges.width} if party.rows.features is not None else {}
        return own | party.exchanges.widths

    def _make_matrix(self, split: str) -> Matrix:
        """Returns the matrix of a split: this party's own columns, then the passive parties'
        representations in the recipe's order. Values are missing where a party does not hold a row.
        """
        party, rows = self._party, self._party.rows.get(split)
        own = [embed(party, rows)] if party.rows.features is not None else []
        others = [self._get_received(passive.name, split) for passive in party.recipe.passives]
        _, targets = party.rows.need_labels()
        weights = party.rows.compute_weights(party.rows.get("train"))
        return Matrix(
            torch.cat([*own, *others], dim=1).double().cpu().numpy(),
            party.rows.take(targets, rows).reshape(-1).double().cpu().numpy(),
            None if weights is None else party.rows.take(weights, rows).double().cpu().numpy(),
        )

    def _get_received(self, name: str, split: str) -> Tensor:
        """Returns a party's representations of the rows of a split, [N, D]."""
        party, held_rows, start = self._party, self._party.rows.data.held, 0
        for uploaded_split in get_upload_splits(party.recipe):
            rows = party.rows.get(uploaded_split)
            places = np.arange(len(rows)) if held_rows is None else held_rows.of(name, rows)
            if uploaded_split == split:
                break
            start += len(places)
        r_RD = self._uploads.by_party[name][start : start + len(places)]
        all_rows_ND = r_RD.new_full((len(rows), r_RD.shape[1]), torch.nan)
        all_rows_ND[torch.from_numpy(places).to(r_RD.device)] = r_RD
        if split == "train":
            all_rows_ND[self._draw_left_out(name, rows)] = torch.nan
        return all_rows_ND

    def _draw_left_out(self, name: str, rows: Rows) -> Tensor:
        """Draws the training rows in which ``party_dropout`` leaves a party out, bool [N]."""
        seed = derive_seed(self._party.recipe.seed, self.name, "party_dropout", name)
        # Each 64 random bits become a number from 0 to 1.
        drawn_N = np.random.Philox(key=seed).random_raw(len(rows)) / 2.0**64
        is_out_N = torch.from_numpy(drawn_N < self._settings.party_dropout)
        return is_out_N.to(self._party.device)

    @torch.no_grad()
    def _compute_loss(self, train: Matrix) -> float:
        """Returns the task's loss on the training rows, as all top models report it."""
        party, rows = self._party, self._party.rows.get("train")
        x_NF = torch.from_numpy(train.x).float().to(party.device)
        parts = [
            compute_outputs(party, party.rows.take(x_NF, at))
            for at in split_into_chunks(np.arange(len(rows)))
        ]
        _, targets = party.rows.need_labels()
        weights = party.rows.compute_weights(rows)
        w_N = None if weights is None else party.rows.take(weights, rows)
        return loss_fn(party.recipe.task)(
            torch.cat(parts), party.rows.take(targets, rows), w_N
        ).item()

    def state(self) -> Tree:
        return self._uploads.state()

    def load_state(self, tree: Tree) -> None:
        self._uploads.load_state(tree)
