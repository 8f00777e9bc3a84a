"""Measured leaks of exchanges like those of a recipe, with the page of results for each.

They are results of the attacks in ``vfl leaks`` on public data. Other data may leak more or less,
and another attack may reveal more, so each result is a lower bound. A test compares the numbers
with the pages of results.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from vfl_common.bundle import Kind
from vfl_common.text import list_names

NOTHING = "no leaks were measured for such an exchange; measure them in a rehearsal with vfl leaks"
# The kinds of phases that send the embedding of a row only once.
ONCE = frozenset({"contrastive", "fedonce", "head", "evaluate", "predict"})


@dataclass(frozen=True)
class Measured:
    """A measured leak of one kind of exchange.

    Args:
        phases: The kinds of phases with this exchange.
        role: The role of the sender.
        kind: The kind of values that are sent.
        line: The result in words.
        page: The page in ``docs/results``.
        figures: The numbers of ``line``, as they are written on the page.
        defences: The names of the transforms for which the result is also valid, such as ``Marvell
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
        """Returns the result in words for an exchange with these transforms.

        The text names the transforms for which nothing was measured.
        """
        unmeasured = [
            transform for transform in transforms if not transform.startswith(self.defences)
        ]
        if not unmeasured:
            return self.line
        return f"nothing was measured with {list_names(unmeasured)}; without it, {self.line}"


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
    """Returns the measured leak of an exchange, or None if none was measured."""
    return next(
        (
            measurement
            for measurement in MEASURED
            if phase_kind in measurement.phases
            and (measurement.role, measurement.kind.label) == (role, kind)
        ),
        None,
    )
