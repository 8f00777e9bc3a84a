"""Supervised split training: every party has an encoder, and the active party has the labels and
the top model.
"""

from __future__ import annotations

from torch import nn

from vfl_party.methods.splitnn.active import ActiveSplitNN
from vfl_party.methods.splitnn.exchanges import describe_protection, make_stochastic_encoder
from vfl_party.methods.splitnn.passive import PassiveSplitNN
from vfl_party.methods.splitnn.settings import SplitNNSettings
from vfl_party.methods.splitnn.training import traffic
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import WHOLE_TASK, Method, MethodFacts


class SplitNN(Method[SplitNNSettings]):
    """Split training: passive parties send embeddings and receive gradients, step by step."""

    def facts(self, settings: SplitNNSettings) -> MethodFacts:
        return MethodFacts(
            own_sizes=True,
            protects=describe_protection(settings),
            in_flight=settings.under_way,
            follows=WHOLE_TASK,
            late_policy=settings.late_policy,
            no_partial=settings.no_partial,
            learns=settings.learns,
        )

    def encoder(self, settings: SplitNNSettings, make: MakeEncoder) -> nn.Module | None:
        return make_stochastic_encoder(settings, make)

    def traffic(self, party: Party, phase: str, settings: SplitNNSettings) -> Traffic:
        return traffic(party, phase, settings)


METHOD = SplitNN(SplitNNSettings, ActiveSplitNN, PassiveSplitNN, encodes=True)
