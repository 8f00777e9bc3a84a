"""The passive side: one upload, and nothing after it."""

from __future__ import annotations

from vfl_common.phase import Phase, RoundReport
from vfl_party.context import Party
from vfl_party.methods.head.settings import UPLOAD, HeadSettings
from vfl_party.scoring import send_embeddings


class PassiveHead(Phase):
    """Two rounds: the upload, and the active party's training, in which this party has nothing to do."""

    def __init__(self, party: Party, name: str, _settings: HeadSettings) -> None:
        self.name, self.rounds, self._party = name, 2, party

    def run_round(self, round_: int) -> RoundReport:
        if round_ == UPLOAD:
            party, batch = self._party, 0
            for split in ("train", "validation"):
                batch = send_embeddings(party, self.name, round_, batch, party.rows(split))
        return RoundReport(0)
