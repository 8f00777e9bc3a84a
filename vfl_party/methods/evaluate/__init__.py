"""Evaluates the trained model jointly on held-out rows. The passive parties compute embeddings. The
active party computes the outputs and the contribution of each party.
"""

from __future__ import annotations

from vfl_party.methods.evaluate.phase import ActiveEvaluate, PassiveEvaluate, traffic
from vfl_party.methods.evaluate.settings import EvaluateSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import Party
from vfl_party.phases.method import Method, MethodFacts


class Evaluate(Method[EvaluateSettings]):
    """Evaluation: every party encodes the rows of each split, and the active party computes the
    outputs.
    """

    def facts(self, settings: EvaluateSettings) -> MethodFacts:
        importance = "importance needs rows that all parties hold"
        no_partial = importance if settings.importance else ""
        return MethodFacts(own_sizes=True, follows=None, no_partial=no_partial)

    def traffic(self, party: Party, phase: str, settings: EvaluateSettings) -> Traffic:
        return traffic(party, phase, settings)


METHOD = Evaluate(EvaluateSettings, ActiveEvaluate, PassiveEvaluate, trains=False, encodes=True)
