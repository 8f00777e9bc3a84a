"""Gradient-boosted decision trees with LightGBM, only at the active party: a baseline, on its own
columns.

In a recipe of one party with all columns, the trees use all of them (a study's ``combined``).
Nothing is exchanged, and the trees end with the phase.
"""

from vfl_party.methods.gbdt.phase import ActiveGbdt, PassiveGbdt
from vfl_party.methods.gbdt.settings import GbdtSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import Method


class Gbdt(Method[GbdtSettings]):
    """Only the active party works."""

    def follows(self, settings: GbdtSettings) -> frozenset[str]:
        _ = settings
        return frozenset({"loss", "class_weight", "weight"})

    def traffic(self, party: Party, phase: str, settings: GbdtSettings) -> Traffic:
        _ = party, phase, settings
        return Traffic()


METHOD = Gbdt(GbdtSettings, ActiveGbdt, PassiveGbdt, model="none")
