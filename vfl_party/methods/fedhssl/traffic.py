"""Lists FedHSSL's exchanges before the phase begins."""

from __future__ import annotations

from collections.abc import Iterator

from vfl_common.bundle import StepKey
from vfl_party.methods.fedhssl.exchanges import declare_projection
from vfl_party.methods.fedhssl.phase import PassiveFedHSSL
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.outbound.declared import Exchange, Occurrence, Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import need_data
from vfl_party.selfsup.settings import make_plan
from vfl_party.selfsup.towers import require_rows


def traffic(party: Party, name: str, settings: FedHSSLSettings) -> Traffic:
    """Returns the exchanges of the phase; see ``Method.traffic``."""
    weights = None
    if settings.aggregate:
        need_data(party, name, "the weights that the server averages")
        if (name, "weights") not in party.exchanges:
            # Making the phase opens the exchange, whose shapes are taken from the models.
            PassiveFedHSSL(party, name, settings)
        weights = party.exchanges[name, "weights"].exchange
    return Traffic(_yield_occurrences(party, name, settings, weights))


def _yield_occurrences(
    party: Party, name: str, settings: FedHSSLSettings, weights: Exchange | None
) -> Iterator[Occurrence]:
    plan, projection, steps = (
        make_plan(settings, party.recipe.preset),
        declare_projection(settings),
        0,
    )
    # With keep = "concat", each of the two encoders computes half of the embedding.
    width = plan.width(party.embedding_size // (2 if settings.keep_rule == "concat" else 1))
    if settings.cross:
        steps = settings.cross_epochs * (
            len(require_rows(party, name, "aligned", plan.batch_size)) // plan.batch_size
        )
    for round_ in range(settings.rounds):
        for batch in range(steps):
            yield Occurrence.of(
                projection, StepKey(name, round_, batch), rows=plan.batch_size, width=width
            )
        if weights is not None:
            yield Occurrence.of(weights, StepKey(name, round_, 0))
