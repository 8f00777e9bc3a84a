"""Lists split training's exchanges before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.bundle import StepKey
from vfl_party.context import Party
from vfl_party.declared import Exchange, Occurrence, Traffic
from vfl_party.methods.splitnn.batches import Batches
from vfl_party.methods.splitnn.exchanges import VALIDATION, VERDICT, embedding
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.scoring import scoring_traffic


def traffic(party: Party, name: str, settings: SplitNNSettings) -> Traffic:
    """See ``Method.traffic``."""
    stops = settings.early_stopping is not None
    batches = Batches(party, name, settings)
    fewer = stops or settings.late_policy != "wait"  # nothing crosses from and to a party that is away
    occurrences = _occurrences(party, name, batches, embedding(settings), stops)
    parts = min(settings.micro_batches, settings.batch_size)  # a part has at least one row
    return Traffic(occurrences, may_end_early=fewer, in_flight=settings.in_flight * parts, parts=parts)


def _occurrences(party: Party, name: str, batches: Batches, swap: Exchange, stops: bool) -> Iterator[Occurrence]:
    for round_ in range(batches.rounds):
        sizes = batches.sizes(round_)
        for batch, rows in enumerate(sizes):
            yield Occurrence.of(swap, StepKey(name, round_, batch), rows=rows, width=party.embedding_size)
        if not batches.validates(round_):
            continue
        validation = scoring_traffic(party, name, VALIDATION, round_, len(sizes), party.rows("validation"))
        yield from validation
        if stops:
            yield Occurrence.of(VERDICT, StepKey(name, round_, len(sizes) + len(validation)))
