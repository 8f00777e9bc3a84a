"""Both sides of early stopping. The active party evaluates each validation and sends a verdict.

All parties keep the weights of the best validation, and use them at the end of the phase. Plateau
schedules use the same verdicts.
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

# The bits of the verdict on a round: it is the best so far, or the phase ends.
_BEST, _STOP = 1, 2
VERDICT = Exchange("verdict", NOTHING, Sent(Kind.VERDICT, {"verdict": u8(1)}), when="every round")


class StoppingJudge:
    """The active party's side, which decides on early stopping. Raises InputError if there is no
    metric to monitor.
    """

    def __init__(
        self, party: Party, phase: str, rule: EarlyStopping, training: OwnTraining
    ) -> None:
        self._party, self._phase, self._rule, self._training = party, phase, rule, training
        # The monitored value, number and metrics of the best round.
        self.best: dict[str, Any] | None = None
        check_stopping(party, phase, rule)
        self._verdicts = party.answering(phase, VERDICT)

    def judge(self, report: RoundReport, step: StepKey, rounds: int) -> RoundReport:
        """Decides after a round with validation whether the phase ends, and sends the verdict to
        the passive parties at ``step``. Returns the report with the decision and the weights that
        are kept.

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
        stops = bool(validations(round_) - validations(best["round"]) >= self._rule.patience)
        verdict = torch.tensor([is_best * _BEST | stops * _STOP], dtype=torch.uint8)
        self._verdicts.reply_all(step, self._verdicts.collect(step), {"verdict": verdict})
        if is_best or not (stops or round_ + 1 == rounds):
            return replace(report, done=stops)
        note = (
            f"{self._phase} {'stops early after' if stops else 'ends with'} round {round_ + 1} "
            f"and keeps the weights of round {best['round'] + 1}"
        )
        return replace(report, done=stops, kept=best["metrics"], note=note)


class VerdictReceiver:
    """A passive party's side, which receives the verdicts."""

    def __init__(self, party: Party, phase: str, training: OwnTraining) -> None:
        self._training, self._verdicts = training, party.asking(phase, VERDICT)

    def receive_verdict(self, step: StepKey) -> bool:
        """Receives the verdict at ``step``. Returns whether the phase ends with this round."""
        verdict = int(self._verdicts.swap(step, {})["verdict"][0])
        self._training.note_validation(best=bool(verdict & _BEST))
        return bool(verdict & _STOP)
