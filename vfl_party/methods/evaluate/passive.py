"""A passive party's side: sends the embeddings of the rows of all splits."""

from __future__ import annotations

from pathlib import Path

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.methods.evaluate import importance
from vfl_party.methods.evaluate.exchanges import embeddings
from vfl_party.methods.evaluate.settings import EvaluateSettings
from vfl_party.methods.evaluate.telling import MetricsReceiver, count_metrics_steps
from vfl_party.phases import stand_in
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import SplitScorer


class PassiveEvaluate(Phase):
    """Sends embeddings of the rows of all splits, one after the other, in one round. Then it
    receives metrics, sends the mean embedding that replaces this party, and sends embeddings with
    each column permuted, as far as the recipe enables these.
    """

    def __init__(self, party: Party, name: str, settings: EvaluateSettings) -> None:
        self.name, self.rounds = name, 1
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party, settings))
        self._receiver = MetricsReceiver(party, name, settings.splits)
        self._writer = importance.ImportanceWriter(party, name, settings)
        self._importance = (
            importance.PassiveImportance(party, name, settings, self._scorer.asking)
            if settings.importance
            else None
        )

    def keep(self, folder: Path) -> None:
        self._writer.folder = folder
        self._receiver.keep(folder)

    def run_round(self, round_: int) -> RoundReport:
        party, settings, batch = self._party, self._settings, 0
        for split in settings.splits:
            first = StepKey(self.name, round_, batch)
            batch += self._scorer.answer(party.joint_rows(split), first)
        self._receiver.receive(StepKey(self.name, round_, batch))
        batch += count_metrics_steps(party)
        if settings.subsets:
            step = StepKey(self.name, round_, batch)
            stand_in.give(self._scorer.asking, party, settings.absent, step)
            batch += stand_in.count_steps(settings.absent)
        if self._importance is not None:
            ranking = self._importance.run(StepKey(self.name, round_, batch))
            self._writer(ranking)
        return RoundReport(0)
