"""A passive party's side: sends one upload. If no phase follows, the party may then leave."""

from __future__ import annotations

import numpy as np

from vfl_common.bundle import StepKey
from vfl_party.base.phase import Phase, RoundReport
from vfl_party.methods.head.settings import TRAIN, UPLOAD, HeadSettings
from vfl_party.methods.head.upload import declare_upload, get_upload_splits
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import embed
from vfl_party.phases.sets import check as check_sets


class PassiveHead(Phase):
    """Runs two rounds: the upload, and the active party's training, during which this party is
    idle.
    """

    alone_from = TRAIN
    # The upload round may be skipped on resume: the active party has the upload in a checkpoint, or
    # asks for it again.
    skippable = (UPLOAD,)

    def __init__(self, party: Party, name: str, settings: HeadSettings) -> None:
        self.name, self.rounds, self._party = name, 2, party
        self.epochs = settings.epochs_over(len(party.joint_rows("train")))
        check_sets(party, name, settings)
        self._upload = party.asking(
            name, declare_upload(settings, party.course.protected), width=party.embedding_size
        )

    def run_round(self, round_: int) -> RoundReport:
        if round_ != UPLOAD:
            return RoundReport(0)
        party = self._party
        rows = np.concatenate([party.rows(split) for split in get_upload_splits(party.recipe)])
        reply = self._upload.swap(StepKey(self.name, round_, 0), {"z": embed(party, rows)}, rows)
        used = all(bool(flag) for flag in reply.values())
        note = "" if used else "our upload came after deadline_s: the model is trained without it"
        return RoundReport(0, note=note, checkpoint=True)
