"""Joint prediction with the head of a probe. The party that holds a row computes its latent."""

from __future__ import annotations

import numpy as np
import torch

from vfl_common.bundle import StepKey
from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows
from vfl_party.methods.probe.cut import compute_features, compute_latents
from vfl_party.methods.probe.exchanges import TRAINING, compute_message_rows, divide_rows
from vfl_party.methods.probe.latents import LatentCollector, LatentSender
from vfl_party.models.halves import Tail
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import Scored, compute_outputs


class ProbeScorer:
    """A ``vfl_party.phases.scoring.Scorer``. Each passive party passes the rows that it has, in its
    order. The active party passes the rows that it wants to score.

    If several parties send a row, the result of the first of them in the recipe counts.
    """

    def __init__(self, party: Party, phase: str) -> None:
        self._party = party
        self._collector: LatentCollector | None = None
        self._sender: LatentSender | None = None
        if party.role == "passive":
            self._sender = LatentSender(party, phase)
        elif party.recipe.passives:
            self._collector = LatentCollector(party, _get_tail(party), phase)

    @torch.no_grad()
    def score(self, rows: Rows, first: StepKey) -> Scored:
        """Scores the active party's rows. A row that no party sends gets NaN."""
        _ = first
        party, tail = self._party, _get_tail(self._party)
        for model in (tail, party.models["top"]):
            model.eval()
        outputs_NO = torch.full(
            (len(rows), party.recipe.task.outputs), torch.nan, device=party.device
        )
        if self._collector is None:
            for places in divide_rows(
                np.arange(len(rows), dtype=np.int64), compute_message_rows(tail.latent)
            ):
                features = compute_features(party, tail, compute_latents(party, rows[places]))
                outputs_NO[torch.from_numpy(places)] = compute_outputs(party, features)
            return Scored(outputs_NO, {}, 0)
        steps = 0
        outputs: dict[str, torch.Tensor] = {}
        # Parties are in the recipe's order.
        rows_by_party = {holder: np.zeros(len(rows), bool) for holder in party.data.holdings}
        unlisted = dict.fromkeys(rows_by_party, 0)
        for collected in self._collector.collect([TRAINING]):
            steps += 1
            for name, part in collected.parts.items():
                party_outputs = outputs.setdefault(name, torch.full_like(outputs_NO, torch.nan))
                if len(part.rows):
                    scores = compute_outputs(party, part.features)
                    party_outputs[torch.from_numpy(part.rows)] = scores
                rows_by_party[name][part.rows] = True
                unlisted[name] += collected.unknown[name]
        # Outputs are written in reverse order, so that the first party in the recipe counts.
        for name in reversed([holder for holder in rows_by_party if holder in outputs]):
            has_row_N = torch.from_numpy(rows_by_party[name])
            outputs_NO[has_row_N] = outputs[name][has_row_N]
        return Scored(outputs_NO, {}, steps, by=rows_by_party, unlisted=unlisted)

    def answer(self, rows: Rows, first: StepKey) -> int:
        """Sends the latents of all rows of a passive party."""
        _ = first
        assert self._sender is not None  # noqa: S101 - only passive parties answer
        return sum(1 for _ in self._sender.send({TRAINING: rows}))


def _get_tail(party: Party) -> Tail:
    tail = party.models.get("tail")
    if not isinstance(tail, Tail):
        raise InputError(
            Code.CONFIG_INVALID,
            f"recipe: phases: {party.name} has no features to predict from. Put a phase of kind "
            '"mocosfl" first.',
        )
    return tail
