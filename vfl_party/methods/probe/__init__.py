"""Probes frozen features of rows that different parties hold, with a linear model and with a
nearest-neighbour vote.
"""

from vfl_party.methods.probe.exchanges import traffic
from vfl_party.methods.probe.phase import ActiveProbe, PassiveProbe, ProbeScorer
from vfl_party.methods.probe.settings import ProbeSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import WHOLE_TASK, Method, MethodFacts


class Probe(Method[ProbeSettings]):
    """Probe: passive parties send frozen features, and the active party trains a head on them."""

    def facts(self, settings: ProbeSettings) -> MethodFacts:
        # A head with hidden layers is discarded after the phase.
        return MethodFacts(scores_own_rows=not settings.hidden, follows=WHOLE_TASK)

    def traffic(self, party: Party, phase: str, settings: ProbeSettings) -> Traffic:
        return traffic(party, phase, settings)

    def scores(self, party: Party, phase: str, settings: ProbeSettings) -> ProbeScorer | None:
        return ProbeScorer(party, phase) if not settings.hidden else None


METHOD = Probe(ProbeSettings, ActiveProbe, PassiveProbe, rows="own")
