"""The active party's side: collects features of all rows, trains a linear model on the rows with
known labels, and classifies by nearest neighbours.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from vfl_common.errors import Code, InputError
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.exchanges import (
    TRAINING,
    check_bottom,
    compute_message_rows,
    divide_rows,
)
from vfl_party.methods.probe.head import KnownRows, ProbeHead, select_labelled
from vfl_party.methods.probe.latents import LatentCollector
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.models.halves import Tail
from vfl_party.phases.advice import advise
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics

# The number of rows whose nearest neighbours are computed at once.
_QUERY_ROWS = 512
# The minimum share of votes, so that its logarithm is finite.
_MIN_SHARE = 1e-12


class ActiveProbe(Phase):
    """Runs one round: collects features, trains the top model on the training rows, and
    evaluates.
    """

    def __init__(self, party: Party, name: str, settings: ProbeSettings) -> None:
        self.name, self.rounds, self._party, self._settings = name, 1, party, settings
        check_bottom(party.recipe, name)
        tail = party.models.get("tail")
        if not isinstance(tail, Tail):
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {name}: there are no features to probe. Put a phase of kind "
                '"mocosfl" before this phase.',
            )
        if party.recipe.task.kind not in ("binary", "multiclass"):
            kind = party.recipe.task.kind
            raise InputError(
                Code.CONFIG_INVALID,
                f"recipe: phases: {name}: a probe needs a binary or multiclass task (got {kind}). "
                "Change task.kind, or remove the phase.",
            )
        self._tail, self._splits = tail, (TRAINING, *settings.splits)
        self._head = ProbeHead(party, name, settings)
        self._latents = LatentCollector(party, tail, name)

    def run_round(self, round_: int) -> RoundReport:
        party, (_, targets) = self._party, self._party.need_labels()
        rows_by_split = self._collect(round_)
        train = rows_by_split[TRAINING]
        if not len(train.rows):
            raise InputError(
                Code.DATA_INVALID,
                f"phase {self.name}: {party.name} has no label for any training row of the other "
                "parties. Add labels with the ids that they use, and start again: the trained "
                "models are kept.",
            )
        train = select_labelled(party, self.name, train, self._settings)
        y_N = party.take(targets, train.rows)
        num_steps, loss = self._head.train(train, y_N)
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        scored: dict[str, tuple[Rows, Tensor]] = {}
        for split in self._settings.splits:
            split_rows = rows_by_split[split]
            if not len(split_rows.rows):
                continue
            votes = self._compute_votes(split_rows.features, train.features, y_N)
            predictions[split] = split_rows.rows, self._head.compute_outputs(split_rows.features)
            scored |= {
                split: predictions[split],
                f"{split} by neighbours": (split_rows.rows, votes),
            }
        metrics = {"train": {"loss": loss}} | compute_metrics(party, scored, train.rows)
        counted = ", ".join(
            f"{len(split_rows.rows):,} {'training' if split_name == TRAINING else split_name}"
            for split_name, split_rows in rows_by_split.items()
        )
        repeated = _note_repeated(rows_by_split)
        if repeated:
            advise(party.show, f"phase {self.name}: {repeated}")
        num_used = len(train.rows)
        sample_note = (
            f"trained on {num_used:,} of them"
            if num_used < len(rows_by_split[TRAINING].rows)
            else ""
        )
        notes = [f"rows with labels: {counted}", sample_note, repeated]
        note = "; ".join(filter(None, notes))
        return RoundReport(num_steps, metrics, note=note, predictions=predictions)

    def _collect(self, round_: int) -> dict[str, KnownRows]:
        """Collects and returns {split: the rows with known labels, and their features}."""
        self._tail.eval()
        if not self._party.recipe.passives:
            return {
                split: self._compute_own("train" if split == TRAINING else split)
                for split in self._splits
            }
        party, received = self._party, dict[str, list[KnownRows]]()
        plan = range(self._latents.count(self._splits))
        for number, collected in zip(plan, self._latents.collect(self._splits), strict=True):
            for known_rows in collected.parts.values():
                received.setdefault(collected.split, []).append(known_rows)
            party.tick(self.name, round_, self.rounds, number + 1, len(plan))
        nothing = KnownRows(
            np.empty(0, np.int64), torch.empty(0, party.embedding_size, device=party.device)
        )
        return {split: _concatenate(received.get(split, [nothing])) for split in self._splits}

    @torch.no_grad()
    def _compute_own(self, split: str) -> KnownRows:
        """Returns the rows of a split and their features, if this party is the only party."""
        party = self._party
        rows, bottom = party.rows(split), party.models["encoder"]
        bottom.eval()
        parts = [
            self._tail.features(bottom(*party.need_features().inputs(part)))
            for part in divide_rows(rows, compute_message_rows(self._tail.latent))
        ]
        return KnownRows(
            rows,
            torch.cat(parts)
            if parts
            else torch.empty(0, party.embedding_size, device=party.device),
        )

    @torch.no_grad()
    def _compute_votes(self, features_NE: Tensor, bank_ME: Tensor, y_M: Tensor) -> Tensor:
        """Returns the logits [N, O] of the nearest neighbours' votes (Wu et al. 2018, section
        3.4).
        """
        settings, task = self._settings, self._party.recipe.task
        bank_ME = functional.normalize(bank_ME, dim=1)
        classes = y_M.long().reshape(-1)
        outputs = []
        for part in torch.split(features_NE, _QUERY_ROWS):
            nearest = (functional.normalize(part, dim=1) @ bank_ME.T).topk(
                min(settings.neighbours, len(bank_ME)), dim=1
            )
            # Weights are relative to the nearest row, whose weight is 1.
            weights = ((nearest.values - nearest.values[:, :1]) / settings.temperature).exp()
            votes = torch.zeros(len(part), max(2, task.outputs), device=part.device)
            votes.scatter_add_(1, classes[nearest.indices], weights)
            shares = (votes / votes.sum(dim=1, keepdim=True)).clamp_min(_MIN_SHARE)
            logits = shares.log()
            outputs.append(logits if task.kind == "multiclass" else logits[:, 1:] - logits[:, :1])
        return torch.cat(outputs)


def _note_repeated(rows_by_split: Mapping[str, KnownRows]) -> str:
    """Returns a note on rows that several parties hold, and on rows that are both in training and
    in evaluation; '' if no row is held by several parties.
    """
    rows = np.concatenate([split_rows.rows for split_rows in rows_by_split.values()])
    unique, counts = np.unique(rows, return_counts=True)
    repeated = unique[counts > 1]
    if not len(repeated):
        return ""
    leaked = np.intersect1d(
        rows_by_split[TRAINING].rows,
        np.concatenate(
            [split_rows.rows for split, split_rows in rows_by_split.items() if split != TRAINING]
        ),
    )
    if not len(leaked):
        return f"several parties hold {len(repeated):,} of the ids"
    return (
        f"several parties hold {len(repeated):,} of the ids, and {len(leaked):,} of these are both "
        "in training and in evaluation: the scores are too high"
    )


def _concatenate(parts: list[KnownRows]) -> KnownRows:
    return KnownRows(
        np.concatenate([part.rows for part in parts]), torch.cat([part.features for part in parts])
    )
