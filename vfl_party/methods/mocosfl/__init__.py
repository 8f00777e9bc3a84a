"""MocoSFL (Li et al. 2023): momentum contrast on rows that different parties hold, by split
federated learning.

The parties hold different rows of the same columns. Each party has a bottom model. The active party
has the tail (the upper half of the network), the memory of keys, and labels for a probe. The
aggregation server averages the bottom models. Together they are the two servers of SplitFed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from vfl_common.config.recipe import Recipe
from vfl_party.base.phase import Phase
from vfl_party.methods.mocosfl.phase import ActiveMocoSFL, PassiveMocoSFL, SinglePartyMocoSFL
from vfl_party.methods.mocosfl.settings import MocoSFLSettings, other_encoder_error
from vfl_party.methods.mocosfl.steps import build_bottom, sends_initial_bottom, tail, traffic
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import Method, MethodFacts


def _make_active(party: Party, name: str, settings: MocoSFLSettings) -> Phase:
    parties = len(party.recipe.passives)
    if not parties:
        return SinglePartyMocoSFL(party, name, settings)
    return ActiveMocoSFL(party, name, settings.adjust(parties))


def _make_passive(party: Party, name: str, settings: MocoSFLSettings) -> Phase:
    return PassiveMocoSFL(party, name, settings.adjust(len(party.recipe.passives)))


class MocoSFL(Method[MocoSFLSettings]):
    """MocoSFL: each party's encoder is the bottom model of a network whose tail the active party
    has.
    """

    def facts(self, settings: MocoSFLSettings) -> MethodFacts:
        _ = settings
        return MethodFacts(follows=None)

    def encoder(self, settings: MocoSFLSettings, make: MakeEncoder) -> nn.Module:
        if make.settings != make.recipe.model.encoder:
            raise other_encoder_error(f"party {make.party}: encoder")
        return build_bottom(make.recipe, settings)

    def upper(self, settings: MocoSFLSettings, recipe: Recipe, seed: int) -> dict[str, nn.Module]:
        models: dict[str, nn.Module] = {"tail": tail(recipe, settings, seed)}
        return models | (
            {"bottom": build_bottom(recipe, settings)} if sends_initial_bottom(recipe) else {}
        )

    def traffic(self, party: Party, phase: str, settings: MocoSFLSettings) -> Traffic:
        return traffic(party, phase, settings.adjust(len(party.recipe.passives)))

    def follows_preset(self, written: Mapping[str, Any]) -> bool:
        _ = written
        return True


METHOD = MocoSFL(MocoSFLSettings, _make_active, _make_passive, rows="own", protocol=8)
