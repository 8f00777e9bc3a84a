"""Probes frozen features of rows that different parties hold, with a linear model and with a
nearest-neighbour vote.
"""

from vfl_party.methods.probe.exchanges import traffic
from vfl_party.methods.probe.phase import ActiveProbe, PassiveProbe, ProbeScorer
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import WHOLE_TASK, Method


class Probe(Method[ProbeSettings]):
    """Probe: passive parties send frozen features, and the active party trains a head on them."""

    def follows(self, settings: ProbeSettings) -> frozenset[str]:
        _ = settings
        return WHOLE_TASK

    def traffic(self, party: Party, phase: str, settings: ProbeSettings) -> Traffic:
        return traffic(party, phase, settings)

    def scores_own_rows(self, settings: ProbeSettings) -> bool:
        # A head with hidden layers is discarded after the phase.
        return not settings.hidden

    def scores(self, party: Party, phase: str, settings: ProbeSettings) -> ProbeScorer | None:
        return ProbeScorer(party, phase) if self.scores_own_rows(settings) else None


METHOD = Probe(ProbeSettings, ActiveProbe, PassiveProbe, rows="own")
