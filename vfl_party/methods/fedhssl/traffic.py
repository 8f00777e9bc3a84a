"""What FedHSSL exchanges in a round: projections of the aligned rows, and the tops of the local encoders."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from vfl_common.bundle import BundleSpec, Kind, StepKey
from vfl_common.config.base import Section
from vfl_party.context import Party
from vfl_party.exchange import expect
from vfl_party.methods.fedhssl.phase import PassiveFedHSSL
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.selfsup.local import require_rows
from vfl_party.selfsup.plan import make_plan
from vfl_party.traffic import Exchange, Traffic, need_data, with_active, with_server


def traffic(party: Party, name: str, settings: Section) -> Traffic:
    """See ``Method.traffic``."""
    assert isinstance(settings, FedHSSLSettings)  # noqa: S101 - parsed by our own METHOD
    weights = None
    if settings.aggregate:
        need_data(party, name, "the weights that the server averages")
        weights = PassiveFedHSSL(party, name, settings).aggregates  # the models themselves know best
    return Traffic(_exchanges(party, name, settings, weights))


def _exchanges(party: Party, name: str, settings: FedHSSLSettings, weights: BundleSpec | None) -> Iterator[Exchange]:
    plan = make_plan(settings, party.recipe.preset)
    z = expect(Kind.EMBEDDING, z=(torch.float32, (plan.batch_size, plan.widths[-1])))
    steps = 0
    if settings.cross:
        steps = settings.cross_epochs * (len(require_rows(party, name, "aligned", plan.batch_size)) // plan.batch_size)
    for round_ in range(settings.rounds):
        for batch in range(steps):
            yield with_active(party, StepKey(name, round_, batch), z, z)
        if weights is not None:
            yield with_server(party, StepKey(name, round_, 0), weights)
