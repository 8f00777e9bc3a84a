"""The passive side: the latents of all of its rows, once."""

from __future__ import annotations

import torch

from vfl_party.base.phase import Phase, RoundReport
from vfl_party.methods.probe.exchanges import (
    LATENTS,
    TRAINING,
    check_begun,
    digests,
    latent_of,
    parts_in,
    rows_a_message,
    sizes_of,
    steps,
)
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.phases.context import Party


class PassiveProbe(Phase):
    """One round: sends the latents of the rows of each split."""

    def __init__(self, party: Party, name: str, settings: ProbeSettings) -> None:
        self.name, self.rounds, self._party, self._settings = name, 1, party, settings
        check_begun(party.recipe, name)
        latent = latent_of(party)
        self._size = rows_a_message(latent)
        self._latents = party.asking(name, LATENTS, **sizes_of(latent))

    @torch.no_grad()
    def run_round(self, round_: int) -> RoundReport:
        party, bottom = self._party, self._party.models["encoder"]
        bottom.eval()
        splits = (TRAINING, *self._settings.splits)
        count = sum(parts_in(split, party.data.holdings, self._size) for split in splits)
        plan = steps(self.name, self._settings, party.data.holdings, self._size)
        for number, (split, step, part) in enumerate(plan, 1):
            rows = party.rows(split)[part * self._size : (part + 1) * self._size]
            if len(rows):
                z = bottom(*party.need_features().inputs(rows))
                self._latents.swap(
                    step,
                    {"z": z, "ids": digests(party.recipe, [party.data.ids[row] for row in rows])},
                    rows,
                )
            party.tick(self.name, round_, self.rounds, number, count)
        return RoundReport(0)
