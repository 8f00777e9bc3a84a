"""Lists split training's exchanges before the phase begins."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.bundle import StepKey
from vfl_party.methods.splitnn.batches import Batches
from vfl_party.methods.splitnn.exchanges import embedding, validation
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.stopping import VERDICT
from vfl_party.outbound.declared import Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring_traffic, split_into_chunks


def traffic(party: Party, name: str, settings: SplitNNSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    stops_early = settings.early_stopping is not None
    batches = Batches(party, name, settings)
    # Nothing is sent to or by an absent party.
    may_end_early = stops_early or settings.late_policy != "wait"
    occurrences = _yield_occurrences(party, name, batches, settings)
    # Each part has at least one row, so there are at most as many parts as rows.
    parts = min(settings.micro_batches, settings.batch_size)
    return Traffic(
        occurrences,
        may_end_early=may_end_early,
        in_flight=settings.in_flight * parts,
        parts=parts,
        bound=party.bound,
    )


def _yield_occurrences(
    party: Party, name: str, batches: Batches, settings: SplitNNSettings
) -> Iterator[Occurrence]:
    exchange, validation_exchange = embedding(settings), validation(settings)
    for round_ in range(batches.rounds):
        sizes = batches.sizes(round_)
        if party.data.held is None:
            for batch, rows in enumerate(sizes):
                yield from party.occurrences(exchange, StepKey(name, round_, batch), rows=rows)
        else:
            for batch, part in enumerate(batches.exchange_rows(round_)):
                yield from party.joint_occurrences(exchange, StepKey(name, round_, batch), part)
        if not batches.validates(round_):
            continue
        validation_occurrences = scoring_traffic(
            party, name, validation_exchange, round_, len(sizes), party.joint_rows("validation")
        )
        yield from validation_occurrences
        steps = len(sizes) + len(split_into_chunks(party.joint_rows("validation")))
        if settings.early_stopping is not None:
            yield Occurrence.of(VERDICT, StepKey(name, round_, steps))
