"""The passive side: one upload, and nothing after it."""

from __future__ import annotations

from vfl_common.bundle import Kind, StepKey
from vfl_common.phase import Phase, RoundReport
from vfl_party.context import Party
from vfl_party.exchange import NOTHING
from vfl_party.methods.head.settings import UPLOAD, HeadSettings
from vfl_party.privacy.gaussian import GaussianNoise
from vfl_party.scoring import embed


class PassiveHead(Phase):
    """Two rounds: the upload, and the active party's training, in which this party has nothing to do."""

    others_work = True

    def __init__(self, party: Party, name: str, settings: HeadSettings) -> None:
        self.name, self.rounds, self._party = name, 2, party
        self._noise = GaussianNoise(settings.noise)

    def run_round(self, round_: int) -> RoundReport:
        if round_ == UPLOAD:
            party = self._party
            r_ND = self._noise.noise(embed(party, party.rows("train")))
            party.need_link().swap(StepKey(self.name, round_, 0), Kind.EMBEDDING, {"z": r_ND}, NOTHING)
        return RoundReport(0)
