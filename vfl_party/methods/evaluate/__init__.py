"""Evaluates the trained model jointly on held-out rows: the passive parties embed, the active party
scores.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.config.base import Section
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import Rows
from vfl_party.models.metrics import evaluate
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import Method
from vfl_party.phases.scoring import (
    chunks,
    joint_embeddings,
    outputs_of,
    scoring,
    scoring_traffic,
    send_embeddings,
)


class EvaluateSettings(Section):
    """The splits to evaluate; a split without rows is skipped."""

    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate; one without rows is skipped."""


def embeddings(party: Party) -> Exchange:
    """Declares the exchange of the rows of each split, with the noise of the phases before."""
    return scoring(party.sent_noise, name="embedding", when="once", how=party.protected)


class ActiveEvaluate(Phase):
    """Evaluates all splits, one after the other, in one round; also without each party that may
    have been away.
    """

    def __init__(self, party: Party, name: str, settings: EvaluateSettings) -> None:
        self.name, self.rounds = name, 1
        self._party, self._settings = party, settings
        self._scores = party.answering(name, embeddings(party), width=party.embedding_size)

    def run_round(self, round_: int) -> RoundReport:
        party, batch = self._party, 0
        labels, targets = party.need_labels()
        metrics: dict[str, dict[str, float]] = {}
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        # If training may go on without a party, people want to know what the model is worth without
        # it.
        some = party.features is not None or len(party.recipe.passives) > 1
        away = (
            [each.name for each in party.recipe.passives]
            if party.late_policy != "wait" and some
            else []
        )
        for split in self._settings.splits:
            rows = party.rows(split)
            found = [*joint_embeddings(party, self._scores, round_, batch, rows)]
            batch += len(found)
            if not len(rows):
                continue
            of = {split: found} | {
                f"{split} without {name}": [each.without(name) for each in found] for name in away
            }
            for name, each in of.items():
                outputs = outputs_of(party, each)
                metrics[name] = evaluate(
                    party.recipe.task, outputs, party.take(targets, rows), labels.unscale
                )
                predictions[name] = rows, outputs
        return RoundReport(0, metrics, predictions=predictions)

    def rows_at(self, exchange: str, step: StepKey) -> Rows | None:
        _ = exchange
        return [
            chunk for split in self._settings.splits for chunk in chunks(self._party.rows(split))
        ][step.batch]


class PassiveEvaluate(Phase):
    """Embeds the rows of all splits, one after the other, in one round."""

    def __init__(self, party: Party, name: str, settings: EvaluateSettings) -> None:
        self.name, self.rounds = name, 1
        self._party, self._settings = party, settings
        self._scores = party.asking(name, embeddings(party), width=party.embedding_size)

    def run_round(self, round_: int) -> RoundReport:
        party, batch = self._party, 0
        for split in self._settings.splits:
            batch = send_embeddings(party, self._scores, round_, batch, party.rows(split))
        return RoundReport(0)


def traffic(party: Party, name: str, settings: EvaluateSettings) -> Traffic:
    """See ``Method.traffic``."""
    found: list[Occurrence] = []
    exchange = embeddings(party)
    for split in settings.splits:
        found += scoring_traffic(party, name, exchange, 0, len(found), party.rows(split))
    return Traffic(found)


METHOD = Method(
    EvaluateSettings, ActiveEvaluate, PassiveEvaluate, trains=False, traffic=traffic, encodes=True
)
