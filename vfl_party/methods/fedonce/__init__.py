"""The local part of FedOnce (Wu et al. 2022): learns encoders without labels, so that one upload is
enough.

Every passive party trains alone, without any exchange (Alg. 1, lines 2 to 15). The upload (line 16)
and the active party's training (lines 18 to 30) are ``head`` with ``own_encoder = "trained"``;
``splitnn`` after it is multi-round FedOnce.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from vfl_common.config.recipe import Recipe
from vfl_party.methods.fedonce.phase import FedOnce, make_learnt_encoder
from vfl_party.methods.fedonce.settings import FedOnceSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import Method, MethodFacts
from vfl_party.privacy.plan import PrivatePhase


class FedOnceMethod(Method[FedOnceSettings]):
    """FedOnce: every party trains its encoder alone."""

    def facts(self, settings: FedOnceSettings) -> MethodFacts:
        dp = "with dp clips the gradient of each row separately"
        return MethodFacts(
            own_sizes=True,
            follows=None,
            idle="" if settings.active else "active",
            no_partial="",
            one_process="" if settings.dp is None else dp,
        )

    def encoder(self, settings: FedOnceSettings, make: MakeEncoder) -> nn.Module | None:
        return make_learnt_encoder(settings, make)

    def traffic(self, party: Party, phase: str, settings: FedOnceSettings) -> Traffic:
        _ = party, phase, settings
        return Traffic()

    def private(
        self, phase: str, settings: FedOnceSettings, recipe: Recipe, rows: int
    ) -> PrivatePhase | None:
        _ = rows
        if settings.dp is None:
            return None
        learners = [party.name for party in recipe.passives]
        if settings.active and recipe.active.features:
            learners.append(recipe.active.name)
        return PrivatePhase(
            phase, settings.dp, tuple(learners), settings.batch_size, settings.epochs
        )

    def follows_preset(self, written: Mapping[str, Any]) -> bool:
        # Only the contrastive objective draws views, whose augmentations depend on the preset.
        return written.get("objective") == "contrastive"


METHOD = FedOnceMethod(FedOnceSettings, FedOnce, FedOnce)
