"""FedCVT (Kang, Liu and Liang 2022): cross-view training of two parties that have few aligned rows,
and even fewer labelled ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from vfl_party.methods.fedcvt.phase import ActiveFedCVT, PassiveFedCVT
from vfl_party.methods.fedcvt.settings import FedCVTSettings
from vfl_party.methods.fedcvt.training import make_two_networks, traffic
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import Method


class FedCVT(Method[FedCVTSettings]):
    """FedCVT: each party's encoder consists of two networks. The preset decides the details of the
    losses.
    """

    def encoder(self, settings: FedCVTSettings, make: MakeEncoder) -> nn.Module:
        return make_two_networks(settings, make)

    def traffic(self, party: Party, phase: str, settings: FedCVTSettings) -> Traffic:
        return traffic(party, phase, settings)

    def follows_preset(self, written: Mapping[str, Any]) -> bool:
        _ = written
        return True


METHOD = FedCVT(FedCVTSettings, ActiveFedCVT, PassiveFedCVT, encodes=True)
