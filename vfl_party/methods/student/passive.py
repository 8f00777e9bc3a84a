"""A passive party's side: sends embeddings once and is then idle. If no phase follows, the party
may leave.
"""

from __future__ import annotations

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.methods.student.exchanges import KEPT, embeddings, get_asked_rows, get_kept_step
from vfl_party.methods.student.settings import ASK, StudentSettings
from vfl_party.methods.student.training import count_epochs, count_rounds
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import SplitScorer


class PassiveStudent(Phase):
    """Sends embeddings in the first round. Its models do not change."""

    alone_from = ASK + 1

    def __init__(self, party: Party, name: str, settings: StudentSettings) -> None:
        self.name, self.rounds = name, count_rounds(party, settings)
        self.epochs = count_epochs(party, settings)
        self.skippable = tuple(range(self.rounds))
        self._party, self._settings = party, settings
        self._scorer = SplitScorer(party, name, embeddings(party))
        self._kept = party.asking(name, KEPT)

    def run_round(self, round_: int) -> RoundReport:
        if round_ != ASK:
            return RoundReport(0)
        step = StepKey(self.name, ASK, 0)
        for rows in get_asked_rows(self._party, self._settings).values():
            num_steps = self._scorer.answer(rows, step)
            step = StepKey(step.phase, ASK, step.batch + num_steps)
        self._kept.swap(get_kept_step(self._party, self.name, self._settings), {})
        return RoundReport(0, checkpoint=True)
