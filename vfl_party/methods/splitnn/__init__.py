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
from vfl_party.phases.absence import LatePolicy
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import WHOLE_TASK, Method
from vfl_party.phases.sets import Learnt


class SplitNN(Method[SplitNNSettings]):
    """Split training: passive parties send embeddings and receive gradients, step by step."""

    def follows(self, settings: SplitNNSettings) -> frozenset[str]:
        _ = settings
        return WHOLE_TASK

    def own_sizes(self, settings: SplitNNSettings) -> bool:
        _ = settings
        return True

    def encoder(self, settings: SplitNNSettings, make: MakeEncoder) -> nn.Module | None:
        return make_stochastic_encoder(settings, make)

    def protects(self, settings: SplitNNSettings) -> str:
        return describe_protection(settings)

    def traffic(self, party: Party, phase: str, settings: SplitNNSettings) -> Traffic:
        return traffic(party, phase, settings)

    def in_flight(self, settings: SplitNNSettings) -> int:
        return settings.under_way

    def late_policy(self, settings: SplitNNSettings) -> LatePolicy:
        return settings.late_policy

    def no_partial(self, settings: SplitNNSettings) -> str:
        return settings.no_partial

    def learns(self, settings: SplitNNSettings) -> Learnt:
        return settings.learns


METHOD = SplitNN(SplitNNSettings, ActiveSplitNN, PassiveSplitNN, encodes=True)
