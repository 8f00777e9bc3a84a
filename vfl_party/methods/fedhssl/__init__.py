"""FedHSSL (He et al. 2022), self-supervised pretraining across parties and within each party, and
its sub-procedures.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from vfl_party.methods.fedhssl.phase import (
    ActiveFedHSSL,
    PassiveFedHSSL,
    make_kept_encoder,
    select_encoder,
    traffic,
)
from vfl_party.methods.fedhssl.settings import FedHSSLSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import Method, MethodFacts


class FedHSSLMethod(Method[FedHSSLSettings]):
    """FedHSSL: each party trains a cross-party and a local encoder, and keeps one or both."""

    def facts(self, settings: FedHSSLSettings) -> MethodFacts:
        _ = settings
        return MethodFacts(follows=None, one_process="")

    def encoder(self, settings: FedHSSLSettings, make: MakeEncoder) -> nn.Module:
        return make_kept_encoder(settings, make)

    def part(self, encoder: nn.Module, name: str) -> nn.Module:
        return select_encoder(encoder, name)

    def traffic(self, party: Party, phase: str, settings: FedHSSLSettings) -> Traffic:
        return traffic(party, phase, settings)

    def follows_preset(self, written: Mapping[str, Any]) -> bool:
        _ = written
        return True


METHOD = FedHSSLMethod(FedHSSLSettings, ActiveFedHSSL, PassiveFedHSSL)
