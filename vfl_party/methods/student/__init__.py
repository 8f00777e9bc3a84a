"""A student that predicts without other parties (knowledge distillation). After joint training, the
active party trains a model on its own columns, with the joint model as its teacher.

This combines APC-VFL (arXiv 2410.17648) and joint privileged learning (Semi-VFL, arXiv 2209.15635).
The passive parties send embeddings of the common rows once more, and the active party does the
rest.
"""

from __future__ import annotations

from torch import nn

from vfl_party.methods.student.phase import ActiveStudent, PassiveStudent, traffic
from vfl_party.methods.student.settings import StudentSettings
from vfl_party.methods.student.training import build_student
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import WHOLE_TASK, Method, MethodFacts


class SoloStudent(Method[StudentSettings]):
    """Student: the passive parties send embeddings once, then the active party trains alone."""

    def facts(self, settings: StudentSettings) -> MethodFacts:
        _ = settings
        # The losses of survival and ranking tasks compare rows, but a teacher's output is for a
        # single row.
        return MethodFacts(own_sizes=True, follows=WHOLE_TASK - {"survival", "ranking"})

    def solo(self, settings: StudentSettings, make: MakeEncoder) -> nn.Module:
        return build_student(settings, make)

    def traffic(self, party: Party, phase: str, settings: StudentSettings) -> Traffic:
        return traffic(party, phase, settings)


METHOD = SoloStudent(StudentSettings, ActiveStudent, PassiveStudent, encodes=True)
