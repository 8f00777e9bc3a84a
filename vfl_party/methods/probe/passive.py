"""A passive party's side: sends the latents of all its rows, once."""

from __future__ import annotations

from vfl_party.base.phase import Phase, RoundReport
from vfl_party.methods.probe.exchanges import TRAINING, check_bottom
from vfl_party.methods.probe.latents import LatentSender
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.phases.context import Party


class PassiveProbe(Phase):
    """Runs one round, in which it sends the latents of the rows of each split."""

    def __init__(self, party: Party, name: str, settings: ProbeSettings) -> None:
        self.name, self.rounds, self._party, self._settings = name, 1, party, settings
        check_bottom(party.recipe, name)
        self._latents = LatentSender(party, name)

    def run_round(self, round_: int) -> RoundReport:
        party, splits = self._party, (TRAINING, *self._settings.splits)
        plan = range(self._latents.count(splits))
        rows = {split: party.rows(split) for split in splits}
        for number, _ in zip(plan, self._latents.send(rows), strict=True):
            party.tick(self.name, round_, self.rounds, number + 1, len(plan))
        return RoundReport(0)
