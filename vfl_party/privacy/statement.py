"""Words a report's statement on differential privacy."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vfl_party.privacy.settings import Mode


def statement(mode: Mode, epsilon: float, delta: float, without: Sequence[str] = ()) -> str:
    """Returns one sentence on what is covered and what is not. ε is rounded up.

    A row less would move the targets of others, which belong to places in the order of rows, and
    the split. So neighbours are tables of the same ids, of which one has an empty row, whose
    gradient is nothing (zero-out, Kairouz et al. 2021, on DP-FTRL); and the models depend on
    statistics of all rows. FedOnce-L1 protects the trained models of all parties together, and all
    results computed with them (section 4.1). The representations go to an active party that is
    trusted (section 4.2). ``matched``: the Hungarian match couples records, so clipping a record's
    gradient does not bound its influence. ``without``: phases that train without accounted privacy;
    models trained from their results are not covered.
    """
    outside = "the uploaded representations and the reported training loss"
    trusted = f"{outside} are not covered: the active party is trusted with them"
    if math.isinf(epsilon):
        return (
            f"No guarantee: gradients were clipped, but a party added no noise to them; {trusted}."
        )
    rounded = math.ceil(round(epsilon * 100, 6)) / 100
    figures = f"epsilon = {rounded:.2f}, delta = {delta:g}"
    if without:
        named = f"No guarantee: the training of {' and '.join(without)} is not covered"
        return f"{named}, and the accountant's {figures} counts the other phases alone; {trusted}."
    if mode == "matched":
        return (
            "Guarantee not established: the targets were matched over batches, so that a record "
            f"moves the targets of others, and the accountant's {figures} does not hold; {trusted}."
        )
    return (
        f"The trained models of all parties together are ({figures})-differentially private for "
        "one training record against an empty one in its place (zero-out adjacency), given the "
        "ids, the number of rows, and the vocabularies, means and scales of all columns and of "
        f"the label; {trusted}."
    )
