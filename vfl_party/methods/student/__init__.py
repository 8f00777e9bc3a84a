"""A solo student: after joint training, the active party trains a model on its own columns, with
the joint model as its teacher; it then predicts without other parties (knowledge distillation).

APC-VFL (arXiv 2410.17648) and joint privileged learning (Semi-VFL, arXiv 2209.15635), in one form:
the other parties embed the common rows once more, and the active party does the rest.
"""

from __future__ import annotations

from torch import nn

from vfl_party.methods.student.active import ActiveStudent
from vfl_party.methods.student.exchanges import traffic
from vfl_party.methods.student.model import build_student
from vfl_party.methods.student.passive import PassiveStudent
from vfl_party.methods.student.settings import StudentSettings
from vfl_party.outbound.declared import Traffic
from vfl_party.phases.context import MakeEncoder, Party
from vfl_party.phases.method import WHOLE_TASK, Method


class SoloStudent(Method[StudentSettings]):
    """One pass of embeddings, then training at the active party."""

    def follows(self, settings: StudentSettings) -> frozenset[str]:
        _ = settings
        # The losses of these two compare rows, and a teacher's answer is for one row.
        return WHOLE_TASK - {"survival", "ranking"}

    def own_sizes(self, settings: StudentSettings) -> bool:
        _ = settings
        return True

    def solo(self, settings: StudentSettings, make: MakeEncoder) -> nn.Module:
        return build_student(settings, make)

    def traffic(self, party: Party, phase: str, settings: StudentSettings) -> Traffic:
        return traffic(party, phase, settings)


METHOD = SoloStudent(StudentSettings, ActiveStudent, PassiveStudent, encodes=True)
