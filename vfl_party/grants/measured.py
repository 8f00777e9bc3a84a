"""What has been measured of exchanges like those of a recipe: one line each, with the page of
results that has the figures (a test compares them).

It is what attacks in ``vfl leaks`` read on public data. Other data leak more or less, and another
attack may read more: each line is a lower bound, and says on what it was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vfl_common.bundle import Kind
from vfl_common.text import list_names

NOTHING = (
    "nothing was measured of such an exchange; a rehearsal shows what it gives away: vfl leaks"
)
# Kinds of phases whose embeddings of a row leave once.
ONCE = frozenset({"contrastive", "fedonce", "head", "evaluate", "predict"})


@dataclass(frozen=True)
class Measured:
    """One line.

    Args:
        phases: the kinds of phases that it is about.
        role: of the party that sends.
        kind: what is sent.
        line: what was measured.
        page: of ``docs/results``.
        figures: those of ``line``, as the page writes them.
        defences: the words of the transforms under which it was measured, too, such as ``Marvell
            noise``.
    """

    phases: frozenset[str]
    role: Literal["active", "passive"]
    kind: Kind
    line: str
    page: str
    figures: tuple[str, ...]
    defences: tuple[str, ...] = ()

    def describe(self, transforms: Sequence[str]) -> str:
        """Returns the line for an exchange that passes ``transforms``, in words; it begins with
        those that were not measured.
        """
        others = [transform for transform in transforms if not transform.startswith(self.defences)]
        if not others:
            return self.line
        return f"nothing was measured with {list_names(others)}; without it, {self.line}"


_CREDIT = "on credit default without a defence"
MEASURED = (
    Measured(
        frozenset({"splitnn"}),
        "passive",
        Kind.EMBEDDING,
        f"{_CREDIT}, the active party read ten columns from embeddings of 8 numbers with R² 0.920, "
        "and found 80 % of the people among 500, with 2,000 rows known",
        "leaks-columns.md",
        ("0.920", "0.801"),
    ),
    Measured(
        ONCE,
        "passive",
        Kind.EMBEDDING,
        f"{_CREDIT}, the active party read ten columns from embeddings that were sent once with R² "
        "0.805 to 0.944, with 2,000 rows known",
        "leaks-columns.md",
        ("0.805", "0.944"),
    ),
    Measured(
        frozenset({"splitnn"}),
        "active",
        Kind.GRADIENT,
        "on credit default, the passive party read the labels from gradients with AUC 1.00, "
        "without a defence and with Marvell noise, with no label known",
        "leaks-labels.md",
        ("1.00 / 1.000",),
        ("Marvell noise",),
    ),
    Measured(
        frozenset({"fedhssl"}),
        "active",
        Kind.WEIGHTS,
        "on MNIST in halves, shared weights told which rows were trained on with AUC 0.529 at "
        "most; chance is 0.545 in one shuffle of twenty",
        "leaks-fedhssl.md",
        ("0.529", "0.545"),
    ),
    Measured(
        frozenset({"fedhssl"}),
        "passive",
        Kind.WEIGHTS,
        "on MNIST in halves, shared weights told which rows were trained on with AUC 0.524 at "
        "most; chance is 0.545 in one shuffle of twenty",
        "leaks-fedhssl.md",
        ("0.524", "0.545"),
    ),
    Measured(
        frozenset({"secureboost"}),
        "passive",
        Kind.ROWS,
        "on credit default, the active party read ten columns from the sides of splits of 30 trees "
        "with R² 0.836, with 2,000 rows known",
        "secureboost.md",
        ("0.836",),
    ),
    Measured(
        frozenset({"secureboost"}),
        "active",
        Kind.ROWS,
        "on credit default, the passive party read labels from the nodes of 30 trees with AUC "
        "0.734; its own columns give 0.685",
        "secureboost.md",
        ("0.734", "0.685"),
    ),
)


def get_measurement(phase_kind: str, role: str, kind: str) -> Measured | None:
    """Returns what was measured of an exchange; None if nothing was."""
    return next(
        (
            measurement
            for measurement in MEASURED
            if phase_kind in measurement.phases
            and (measurement.role, measurement.kind.label) == (role, kind)
        ),
        None,
    )
