"""Lists FedCVT's exchanges before it begins."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.bundle import StepKey
from vfl_party.methods.fedcvt.batches import FedCVTBatches
from vfl_party.methods.fedcvt.exchanges import VALIDATION, representations
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.methods.fedcvt.training import check_recipe
from vfl_party.outbound.declared import Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.scoring import scoring_traffic


def traffic(party: Party, name: str, settings: FedCVTSettings) -> Traffic:
    """See ``Method.traffic``."""
    check_recipe(party.recipe, name)
    return Traffic(_occurrences(party, name, settings, FedCVTBatches(party, name, settings)))


def _occurrences(
    party: Party, name: str, settings: FedCVTSettings, batches: FedCVTBatches
) -> Iterator[Occurrence]:
    swap, sizes = (
        representations(settings),
        {"width": party.embedding_size, "own": settings.own_batch("passive")},
    )
    for round_ in range(batches.rounds):
        aligned = batches.sizes(round_)
        for batch, rows in enumerate(aligned):
            yield Occurrence.of(swap, StepKey(name, round_, batch), rows=rows, **sizes)
        yield from scoring_traffic(
            party, name, VALIDATION, round_, len(aligned), party.rows("validation")
        )
