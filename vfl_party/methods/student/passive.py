"""The passive side: embeds the rows once and is then idle; if no phase follows, it may leave."""

from __future__ import annotations

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.methods.student.exchanges import KEPT, embeddings, get_kept_step, rows_to_ask
from vfl_party.methods.student.settings import ASK, StudentSettings
from vfl_party.methods.student.training import epochs_of, rounds_of
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import SplitScorer


class PassiveStudent(Phase):
    """Sends embeddings in the first round. Its models do not change."""

    alone_from = ASK + 1

    def __init__(self, party: Party, name: str, settings: StudentSettings) -> None:
        self.name, self.rounds = name, rounds_of(party, settings)
        self.epochs = epochs_of(party, settings)
        self.skippable = tuple(range(self.rounds))
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party))
        self._kept = party.asking(name, KEPT)

    def run_round(self, round_: int) -> RoundReport:
        if round_ != ASK:
            return RoundReport(0)
        step = StepKey(self.name, ASK, 0)
        for rows in rows_to_ask(self._party, self._settings).values():
            done = self._scorer.answer(rows, step)
            step = StepKey(step.phase, ASK, step.batch + done)
        self._kept.swap(get_kept_step(self._party, self.name, self._settings), {})
        return RoundReport(0, checkpoint=True)
