"""What split training exchanges: embeddings and gradients of each batch, embeddings for validation, verdicts."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vfl_common.bundle import Kind, StepKey
from vfl_common.config.base import Section
from vfl_party.context import Party
from vfl_party.exchange import NOTHING, expect
from vfl_party.methods.splitnn.batches import Batches
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.training import VERDICT
from vfl_party.scoring import scoring_traffic
from vfl_party.traffic import Exchange, Traffic, with_active


def traffic(party: Party, name: str, settings: Section) -> Traffic:
    """See ``Method.traffic``."""
    assert isinstance(settings, SplitNNSettings)  # noqa: S101 - parsed by our own METHOD
    stops = settings.early_stopping is not None
    return Traffic(_exchanges(party, name, Batches(party, name, settings), stops), may_end_early=stops)


def _exchanges(party: Party, name: str, batches: Batches, stops: bool) -> Iterator[Exchange]:
    for round_ in range(batches.rounds):
        sizes = batches.sizes(round_)
        for batch, rows in enumerate(sizes):
            z_or_dz = torch.float32, (rows, party.embedding_size)
            up, down = expect(Kind.EMBEDDING, z=z_or_dz), expect(Kind.GRADIENT, dz=z_or_dz)
            yield with_active(party, StepKey(name, round_, batch), up, down)
        validation = scoring_traffic(party, name, round_, len(sizes), party.rows("validation"))
        yield from validation
        if stops:
            yield with_active(party, StepKey(name, round_, len(sizes) + len(validation)), NOTHING, VERDICT)
