"""Evaluates the trained model jointly on held-out rows: the passive parties embed, the active party
scores.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from torch import Tensor

from vfl_common.bundle import StepKey
from vfl_common.config.base import Section
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.base.seeds import Rows
from vfl_party.methods.evaluate.telling import Telling, Told, telling_traffic
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.measure import measured
from vfl_party.phases.method import Method
from vfl_party.phases.scoring import SplitScorer, chunks, scoring, scoring_traffic


class EvaluateSettings(Section):
    """The splits to evaluate; a split without rows is skipped."""

    splits: tuple[Literal["train", "validation", "test"], ...] = ("validation", "test")
    """The splits to evaluate; one without rows is skipped."""


def embeddings(party: Party) -> Exchange:
    """Declares the exchange of the rows of each split, with the noise of the phases before."""
    course = party.course
    return scoring(course.sent_noise, name="embedding", when="once", how=course.protected)


class ActiveEvaluate(Phase):
    """Evaluates all splits, one after the other, in one round; also without each party that may
    have been away.
    """

    def __init__(self, party: Party, name: str, settings: EvaluateSettings) -> None:
        self.name, self.rounds = name, 1
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party))
        self._telling = Telling(party, name, settings.splits)

    def run_round(self, round_: int) -> RoundReport:
        party, batch = self._party, 0
        predictions: dict[str, tuple[Rows, Tensor]] = {}
        # If training may go on without a party, people want to know what the model is worth without
        # it.
        some = party.features is not None or len(party.recipe.passives) > 1
        away = (
            [each.name for each in party.recipe.passives]
            if party.course.late_policy != "wait" and some
            else []
        )
        for split in self._settings.splits:
            rows = party.rows(split)
            first = StepKey(self.name, round_, batch)
            found = [*self._scorer.embeddings(rows, first)]
            batch += len(found)
            if not len(rows):
                continue
            of = {split: found} | {
                f"{split} without {name}": [each.without(name) for each in found] for name in away
            }
            for name, each in of.items():
                predictions[name] = rows, self._scorer.scored(each).outputs
        metrics = measured(party, predictions)
        self._telling.tell(StepKey(self.name, round_, batch), metrics)
        return RoundReport(0, metrics, predictions=predictions)


class PassiveEvaluate(Phase):
    """Embeds the rows of all splits, one after the other, in one round."""

    def __init__(self, party: Party, name: str, settings: EvaluateSettings) -> None:
        self.name, self.rounds = name, 1
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party))
        self._told = Told(party, name, settings.splits)

    def keep(self, folder: Path) -> None:
        self._told.keep(folder)

    def run_round(self, round_: int) -> RoundReport:
        batch = 0
        for split in self._settings.splits:
            first = StepKey(self.name, round_, batch)
            batch += self._scorer.answer(self._party.rows(split), first)
        self._told.hear(StepKey(self.name, round_, batch))
        return RoundReport(0)


class Evaluate(Method[EvaluateSettings]):
    """Nothing is trained: every party encodes the rows of each split, and the active one scores."""

    def follows(self, settings: EvaluateSettings) -> frozenset[str] | None:
        _ = settings
        return None

    def own_sizes(self, settings: EvaluateSettings) -> bool:
        _ = settings
        return True

    def traffic(self, party: Party, phase: str, settings: EvaluateSettings) -> Traffic:
        found: list[Occurrence] = []
        exchange, steps = embeddings(party), 0
        for split in settings.splits:
            rows = party.rows(split)
            found += scoring_traffic(party, phase, exchange, 0, steps, rows)
            steps += len(chunks(rows))
        found += telling_traffic(party, StepKey(phase, 0, steps), settings.splits)
        return Traffic(found)


METHOD = Evaluate(EvaluateSettings, ActiveEvaluate, PassiveEvaluate, trains=False, encodes=True)
