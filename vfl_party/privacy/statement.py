"""Writes the sentence of a report on its differential privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vfl_party.privacy.settings import Mode


def describe_guarantee(
    mode: Mode, epsilon: float, delta: float, without: Sequence[str] = ()
) -> str:
    """Returns one sentence on what the guarantee covers and what not. ε is rounded up.

    Removing a row would shift the targets and the split of later rows. So two neighbouring tables
    have the same ids, and one of them has an empty row without a gradient (zero-out adjacency,
    Kairouz et al. 2021, on DP-FTRL). The statistics of all rows count as known. FedOnce-L1 protects
    the trained models of all parties together, and all results computed with them (section 4.1).
    The active party gets the representations and is trusted (section 4.2). With ``matched``,
    targets are assigned among rows, so clipping a row's gradient does not bound its influence.

    without: The names of the phases that train without accounted privacy. Models trained from their
    results are not covered.
    """
    uncovered = "the uploaded representations and the reported training loss"
    caveat = f"{uncovered} are not covered: the active party is trusted with them"
    if math.isinf(epsilon):
        return (
            f"No guarantee: gradients were clipped, but a party added no noise to them; {caveat}."
        )
    rounded = math.ceil(round(epsilon * 100, 6)) / 100
    budget = f"epsilon = {rounded:.2f}, delta = {delta:g}"
    if without:
        problem = f"No guarantee: the training of {' and '.join(without)} is not covered"
        return f"{problem}, and the accountant's {budget} counts only the other phases; {caveat}."
    if mode == "matched":
        return (
            "Guarantee not established: the targets were matched over batches, so that a record "
            f"moves the targets of others, and the accountant's {budget} does not hold; {caveat}."
        )
    return (
        f"The trained models of all parties together are ({budget})-differentially private for "
        "one training record against an empty one in its place (zero-out adjacency), given the "
        "ids, the number of rows, and the vocabularies, means and scales of all columns and of "
        f"the label; {caveat}."
    )
