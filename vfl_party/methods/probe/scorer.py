"""Joint prediction with the head of a probe: the party that holds a row embeds it."""

from __future__ import annotations

import numpy as np
import torch

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.cut import features_of, latents_of
from vfl_party.methods.probe.exchanges import TRAINING, parts_of, rows_per_message
from vfl_party.methods.probe.latents import Collector, Sender
from vfl_party.models.halves import Tail
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Scored, outputs_of


class ProbeScorer:
    """A ``vfl_party.phases.scoring.Scorer`` to which each party gives the rows that it has, in its
    own order, and the active party those that it wants to score.

    If several parties send a row, the first of them in the recipe counts.
    """

    def __init__(self, party: Party, phase: str) -> None:
        self._party = party
        self._collector: Collector | None = None
        self._sender: Sender | None = None
        if party.role == "passive":
            self._sender = Sender(party, phase)
        elif party.recipe.passives:
            self._collector = Collector(party, _tail(party), phase)

    @torch.no_grad()
    def score(self, rows: Rows, first: StepKey) -> Scored:
        """Scores all rows of the active party. A row that no party sends has NaN."""
        _ = first
        party, tail = self._party, _tail(self._party)
        for model in (tail, party.models["top"]):
            model.eval()
        outputs_NO = torch.full(
            (len(rows), party.recipe.task.outputs), torch.nan, device=party.device
        )
        if self._collector is None:
            for at in parts_of(np.arange(len(rows), dtype=np.int64), rows_per_message(tail.latent)):
                features = features_of(party, tail, latents_of(party, rows[at]))
                outputs_NO[torch.from_numpy(at)] = outputs_of(party, features)
            return Scored(outputs_NO, {}, 0)
        steps = 0
        outputs: dict[str, torch.Tensor] = {}
        # In the recipe's order.
        by = {holder: np.zeros(len(rows), bool) for holder in party.data.holdings}
        unlisted = dict.fromkeys(by, 0)
        for collected in self._collector.collect([TRAINING]):
            steps += 1
            for name, part in collected.parts.items():
                mine = outputs.setdefault(name, torch.full_like(outputs_NO, torch.nan))
                if len(part.rows):
                    scores = outputs_of(party, part.features)
                    mine[torch.from_numpy(part.rows)] = scores
                by[name][part.rows] = True
                unlisted[name] += collected.unknown[name]
        # Written in reverse order, so that the first party in the recipe wins.
        for name in reversed([holder for holder in by if holder in outputs]):
            of = torch.from_numpy(by[name])
            outputs_NO[of] = outputs[name][of]
        return Scored(outputs_NO, {}, steps, by=by, unlisted=unlisted)

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Sends the latents of all rows of a passive party."""
        _ = first
        assert self._sender is not None  # noqa: S101 - of a passive party
        return sum(1 for _ in self._sender.send({TRAINING: rows}))


def _tail(party: Party) -> Tail:
    tail = party.models.get("tail")
    if not isinstance(tail, Tail):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {party.name} has no features to predict from. Put a phase of kind "
            '"mocosfl" first.',
        )
    return tail
