"""Early stopping, both sides: the active party judges each validation and sends the verdict.

All parties keep their weights of the best validation, with which the phase ends. Plateau schedules
follow the same verdicts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from vfl_common.bundle import Kind, StepKey
from vfl_party.base.phase import RoundReport
from vfl_party.methods.splitnn.training import OwnTraining
from vfl_party.models.training import EarlyStopping
from vfl_party.outbound.declared import NOTHING, Exchange, Sent, u8
from vfl_party.phases.context import Party
from vfl_party.phases.stopping import check_stopping, get_monitored_value, is_better

# Bits of the verdict on a round.
_BEST, _STOP = 1, 2
VERDICT = Exchange("verdict", NOTHING, Sent(Kind.VERDICT, {"verdict": u8(1)}), when="every round")


class StoppingJudge:
    """The active side. Raises InputError if there is no metric to judge."""

    def __init__(
        self, party: Party, phase: str, rule: EarlyStopping, training: OwnTraining
    ) -> None:
        self._party, self._phase, self._rule, self._training = party, phase, rule, training
        # The value, round and metrics of the best round.
        self.best: dict[str, Any] | None = None
        check_stopping(party, phase, rule)
        self._verdicts = party.answering(phase, VERDICT)

    def judge(self, report: RoundReport, step: StepKey, rounds: int) -> RoundReport:
        """Adds to the report of a round with validation whether the phase ends and with which
        weights; sends the verdict to the passive parties at ``step``.

        ``rounds``: the number of rounds of the phase.
        """
        round_, training = step.round, self._training
        report = replace(report, judged=self._rule.metric)
        value = get_monitored_value(self._phase, self._rule, report.metrics["validation"])
        best = self.best
        if best is None or is_better(self._party.recipe.task, self._rule, value, best["value"]):
            best = self.best = {"value": value, "round": round_, "metrics": report.metrics}
        is_best = best["round"] == round_
        training.note_validation(best=is_best)
        validations = training.batches.validations
        stop = bool(validations(round_) - validations(best["round"]) >= self._rule.patience)
        verdict = torch.tensor([is_best * _BEST | stop * _STOP], dtype=torch.uint8)
        self._verdicts.reply_all(step, self._verdicts.collect(step), {"verdict": verdict})
        if is_best or not (stop or round_ + 1 == rounds):
            return replace(report, done=stop)
        note = (
            f"{self._phase} {'stops early after' if stop else 'ends with'} round {round_ + 1} "
            f"and keeps the weights of round {best['round'] + 1}"
        )
        return replace(report, done=stop, kept=best["metrics"], note=note)


class VerdictReceiver:
    """The passive side."""

    def __init__(self, party: Party, phase: str, training: OwnTraining) -> None:
        self._training, self._verdicts = training, party.asking(phase, VERDICT)

    def ends(self, step: StepKey) -> bool:
        """Returns whether the active party ends the phase with the round of ``step``."""
        verdict = int(self._verdicts.swap(step, {})["verdict"][0])
        self._training.note_validation(best=bool(verdict & _BEST))
        return bool(verdict & _STOP)
