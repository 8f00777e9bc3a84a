"""The active party's side with boosted trees as the head: collects representations once, then grows
the trees on them and on its own columns.
"""

from __future__ import annotations

import logging

import numpy as np
import torch
from torch import Tensor

from vfl_common.config.models import GbdtTop, RawSettings
from vfl_common.errors import Code, InputError, InternalError
from vfl_party.base.phase import Phase, RoundReport, Tree
from vfl_party.base.seeds import Rows, derive_seed
from vfl_party.methods.head.settings import TRAIN, UPLOAD, HeadSettings
from vfl_party.methods.head.upload import Uploads, get_upload_splits
from vfl_party.models.losses import loss_fn
from vfl_party.models.trees import BoostedTrees, Matrix, TreeArrays, check_loss, grow, lightgbm
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import compute_outputs, embed, split_into_chunks
from vfl_party.phases.sets import check as check_sets

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
        if not len(party.rows("train")):
            raise InputError(
                Code.CONFIG_INVALID,
                f"{where}: there are no labelled training rows. Add rows with labels to the "
                "training split.",
            )
        if top.early_stopping is not None and not len(party.rows("validation")):
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
            for name, column in party.need_features().columns.items()
        }
        largest = sorted(own_shares.items(), key=lambda item: -item[1])[:_SHOWN]
        return shares | {name: share for name, share in largest if share}

    def _count_columns(self) -> dict[str, int]:
        """Returns {party: the number of its columns in the matrix}, in the matrix's order."""
        party = self._party
        own = {party.name: party.embedding_size} if party.features is not None else {}
        return own | party.widths

    def _make_matrix(self, split: str) -> Matrix:
        """Returns the matrix of a split: this party's own columns, then the passive parties'
        representations in the recipe's order. Values are missing where a party does not hold a row.
        """
        party, rows = self._party, self._party.rows(split)
        own = [embed(party, rows)] if party.features is not None else []
        others = [self._get_received(passive.name, split) for passive in party.recipe.passives]
        _, targets = party.need_labels()
        weights = party.row_weights(party.rows("train"))
        return Matrix(
            torch.cat([*own, *others], dim=1).double().cpu().numpy(),
            party.take(targets, rows).reshape(-1).double().cpu().numpy(),
            None if weights is None else party.take(weights, rows).double().cpu().numpy(),
        )

    def _get_received(self, name: str, split: str) -> Tensor:
        """Returns a party's representations of the rows of a split, [N, D]."""
        party, held_rows, start = self._party, self._party.data.held, 0
        for uploaded_split in get_upload_splits(party.recipe):
            rows = party.rows(uploaded_split)
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
        party, rows = self._party, self._party.rows("train")
        x_NF = torch.from_numpy(train.x).float().to(party.device)
        parts = [
            compute_outputs(party, party.take(x_NF, at))
            for at in split_into_chunks(np.arange(len(rows)))
        ]
        _, targets = party.need_labels()
        weights = party.row_weights(rows)
        w_N = None if weights is None else party.take(weights, rows)
        return loss_fn(party.recipe.task)(torch.cat(parts), party.take(targets, rows), w_N).item()

    def state(self) -> Tree:
        return self._uploads.state()

    def load_state(self, tree: Tree) -> None:
        self._uploads.load_state(tree)
