"""Gradient-boosted decision trees with LightGBM at the active party alone, on its own columns: a
baseline.

If a recipe has only one party, with all columns, the trees use all columns (``combined`` in a
study). Nothing is exchanged, and the trees are discarded after the phase.
"""

from vfl_party.methods.gbdt.phase import ActiveGbdt, PassiveGbdt
from vfl_party.methods.gbdt.settings import GbdtSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import Method


class Gbdt(Method[GbdtSettings]):
    """Boosted trees: only the active party trains."""

    def follows(self, settings: GbdtSettings) -> frozenset[str]:
        _ = settings
        return frozenset({"loss", "class_weight", "weight"})

    def traffic(self, party: Party, phase: str, settings: GbdtSettings) -> Traffic:
        _ = party, phase, settings
        return Traffic()


METHOD = Gbdt(GbdtSettings, ActiveGbdt, PassiveGbdt, model="none")
