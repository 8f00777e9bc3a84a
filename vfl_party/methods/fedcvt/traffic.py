"""Lists FedCVT's exchanges before the phase begins."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.bundle import StepKey
from vfl_party.methods.fedcvt.batches import FedCVTBatches
from vfl_party.methods.fedcvt.exchanges import VALIDATION, declare_representations
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.methods.fedcvt.training import check_recipe
from vfl_party.outbound.declared import Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring_traffic


def traffic(party: Party, name: str, settings: FedCVTSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    check_recipe(party.recipe, name)
    return Traffic(_yield_occurrences(party, name, settings, FedCVTBatches(party, name, settings)))


def _yield_occurrences(
    party: Party, name: str, settings: FedCVTSettings, batches: FedCVTBatches
) -> Iterator[Occurrence]:
    exchange, sizes = (
        declare_representations(settings),
        {"width": party.embedding_size, "own": settings.get_own_batch_size("passive")},
    )
    for round_ in range(batches.rounds):
        step_sizes = batches.get_step_sizes(round_)
        for batch, rows in enumerate(step_sizes):
            yield Occurrence.of(exchange, StepKey(name, round_, batch), rows=rows, **sizes)
        yield from scoring_traffic(
            party, name, VALIDATION, round_, len(step_sizes), party.rows("validation")
        )
