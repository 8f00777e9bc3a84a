"""Computes the distance between the outputs of student and teacher, which distillation minimizes.

The method is from Hinton, Vinyals and Dean 2015 (arXiv 1503.02531, section 2). The teacher is the
joint model, which uses columns that the student never has. This is learning with privileged
information (Lopez-Paz et al. 2015, arXiv 1511.03643; Semi-VFL, arXiv 2209.15635; APC-VFL, arXiv
2410.17648).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - as everywhere

from vfl_common.config.task import TaskSettings


def distillation_distance(
    task: TaskSettings, temperature: float, s_BO: Tensor, t_BO: Tensor
) -> Tensor:
    """Returns the distance of each row's output from the teacher's output, float32 [B].

    Multiclass: T² · KL(softmax(t/T) ‖ softmax(s/T)). Binary and multilabel: the same with sigmoids
    instead of softmax, as a mean over the labels. Regression: (s − t)², on scaled values, or on
    logarithms if the task predicts counts. The factor T² keeps the size of the gradient when T
    changes.

    Args:
        task: A multiclass, binary, multilabel or regression task.
        temperature: The temperature T.
        s_BO: The student's outputs [B, O]: logits, or values.
        t_BO: The teacher's outputs [B, O]: logits, or values.
    """
    if task.kind == "regression":
        return (s_BO - t_BO).square().mean(dim=1)
    s_BO, t_BO = s_BO / temperature, t_BO / temperature
    if task.kind == "multiclass":
        log_t_BO = t_BO.log_softmax(dim=1)
        each_B = (log_t_BO.exp() * (log_t_BO - s_BO.log_softmax(dim=1))).sum(dim=1)
    else:
        each_B = (
            t_BO.sigmoid() * (F.logsigmoid(t_BO) - F.logsigmoid(s_BO))
            + (-t_BO).sigmoid() * (F.logsigmoid(-t_BO) - F.logsigmoid(-s_BO))
        ).mean(dim=1)
    return temperature**2 * each_B
