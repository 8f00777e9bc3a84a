"""The active side: collects features of all rows, trains a linear model on the rows with known
labels, and lets neighbours vote.
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
from vfl_party.methods.probe.exchanges import TRAINING, check_bottom, parts_of, rows_per_message
from vfl_party.methods.probe.head import KnownRows, ProbeHead, select_labelled
from vfl_party.methods.probe.latents import Collector
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.models.halves import Tail
from vfl_party.phases.advice import advise
from vfl_party.phases.context import Party
from vfl_party.phases.measure import compute_metrics

# The number of rows whose neighbours are searched at once.
_VOTERS = 512
# The smallest share of votes, so that its logarithm is finite.
_MIN_SHARE = 1e-12


class ActiveProbe(Phase):
    """One round: collects, trains the top model on the features of the training rows, and
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
        self._latents = Collector(party, tail, name)

    def run_round(self, round_: int) -> RoundReport:
        party, (_, targets) = self._party, self._party.need_labels()
        known = self._collect(round_)
        train = known[TRAINING]
        if not len(train.rows):
            raise InputError(
                Code.DATA_INVALID,
                f"phase {self.name}: {party.name} has no label for any training row of the other "
                "parties. Add labels with the ids that they use, and start again: the trained "
                "models are kept.",
            )
        train = select_labelled(party, self.name, train, self._settings)
        y_N = party.take(targets, train.rows)
        steps_, loss = self._head.train(train, y_N)
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        scored: dict[str, tuple[Rows, Tensor]] = {}
        for split in self._settings.splits:
            of = known[split]
            if not len(of.rows):
                continue
            votes = self._votes(of.features, train.features, y_N)
            predictions[split] = of.rows, self._head.outputs(of.features)
            scored |= {split: predictions[split], f"{split} by neighbours": (of.rows, votes)}
        metrics = {"train": {"loss": loss}} | compute_metrics(party, scored, train.rows)
        counted = ", ".join(
            f"{len(of.rows):,} {'training' if s == TRAINING else s}" for s, of in known.items()
        )
        repeated = _note_repeated(known)
        if repeated:
            advise(party.show, f"phase {self.name}: {repeated}")
        used = len(train.rows)
        some = f"trained on {used:,} of them" if used < len(known[TRAINING].rows) else ""
        notes = [f"rows with labels: {counted}", some, repeated]
        note = "; ".join(filter(None, notes))
        return RoundReport(steps_, metrics, note=note, predictions=predictions)

    def _collect(self, round_: int) -> dict[str, KnownRows]:
        """Returns {split: the rows with known labels, and their features}."""
        self._tail.eval()
        if not self._party.recipe.passives:
            return {
                split: self._own("train" if split == TRAINING else split) for split in self._splits
            }
        party, parts = self._party, dict[str, list[KnownRows]]()
        plan = range(self._latents.count(self._splits))
        for number, collected in zip(plan, self._latents.collect(self._splits), strict=True):
            for part in collected.parts.values():
                parts.setdefault(collected.split, []).append(part)
            party.tick(self.name, round_, self.rounds, number + 1, len(plan))
        nothing = KnownRows(
            np.empty(0, np.int64), torch.empty(0, party.embedding_size, device=party.device)
        )
        return {split: _join(parts.get(split, [nothing])) for split in self._splits}

    @torch.no_grad()
    def _own(self, split: str) -> KnownRows:
        """Returns this party's own rows of a split and their features, if it is the only party."""
        party = self._party
        rows, bottom = party.rows(split), party.models["encoder"]
        bottom.eval()
        parts = [
            self._tail.features(bottom(*party.need_features().inputs(of)))
            for of in parts_of(rows, rows_per_message(self._tail.latent))
        ]
        return KnownRows(
            rows,
            torch.cat(parts)
            if parts
            else torch.empty(0, party.embedding_size, device=party.device),
        )

    @torch.no_grad()
    def _votes(self, features_NE: Tensor, bank_ME: Tensor, y_M: Tensor) -> Tensor:
        """Returns logits of the neighbours' votes [N, O]: Wu et al. 2018, section 3.4."""
        settings, task = self._settings, self._party.recipe.task
        bank_ME = functional.normalize(bank_ME, dim=1)
        classes = y_M.long().reshape(-1)
        outputs = []
        for part in torch.split(features_NE, _VOTERS):
            near = (functional.normalize(part, dim=1) @ bank_ME.T).topk(
                min(settings.neighbours, len(bank_ME)), dim=1
            )
            # The nearest row has weight 1.
            weights = ((near.values - near.values[:, :1]) / settings.temperature).exp()
            votes = torch.zeros(len(part), max(2, task.outputs), device=part.device)
            votes.scatter_add_(1, classes[near.indices], weights)
            shares = (votes / votes.sum(dim=1, keepdim=True)).clamp_min(_MIN_SHARE)
            logits = shares.log()
            outputs.append(logits if task.kind == "multiclass" else logits[:, 1:] - logits[:, :1])
        return torch.cat(outputs)


def _note_repeated(known: Mapping[str, KnownRows]) -> str:
    """Returns a note on the known rows that several parties hold, and on those of them that are not
    only for training; '' if there are no such rows.
    """
    rows = np.concatenate([of.rows for of in known.values()])
    unique, times = np.unique(rows, return_counts=True)
    several = unique[times > 1]
    if not len(several):
        return ""
    both = np.intersect1d(
        known[TRAINING].rows, np.concatenate([of.rows for s, of in known.items() if s != TRAINING])
    )
    if not len(both):
        return f"several parties hold {len(several):,} of the ids"
    return (
        f"several parties hold {len(several):,} of the ids, and {len(both):,} of these are both in "
        "training and in evaluation: the scores are too high"
    )


def _join(parts: list[KnownRows]) -> KnownRows:
    return KnownRows(
        np.concatenate([part.rows for part in parts]), torch.cat([part.features for part in parts])
    )
