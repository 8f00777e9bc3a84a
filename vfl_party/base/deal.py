"""Divides the rows of one data set among parties, for experiments on one machine.

Every row goes to exactly one party. The same labels, seed and numbers always give the same
division.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, derive_seed, draw_permutation

How = Literal["even", "classes", "dirichlet"]

# The maximum number of draws of Dirichlet shares until every party has enough rows.
_TRIES = 100


def deal(
    labels_N: npt.ArrayLike,
    parts: int,
    how: How = "even",
    *,
    seed: int = 0,
    classes: int = 2,
    alpha: float = 0.5,
    min_rows: int = 1,
) -> list[Rows]:
    """Divides the rows of a data set among ``parts`` parties. Returns the row numbers of each
    party, ascending.

    ``even`` (IID) divides the rows at random into parts whose sizes differ by at most one.
    ``classes`` gives each party rows of ``classes`` different classes; MocoSFL and FedEMA use 2
    classes of CIFAR-10. Each class is cut into shards of the same size, and all classes are used
    equally often. ``dirichlet`` draws the shares of the parties in each class from a symmetric
    Dirichlet distribution (Yurochkin et al. 2019; Li et al. 2022). With a smaller ``alpha`` the
    parties differ more.

    Args:
        labels_N: The class of each row, [N], in any dtype that NumPy can sort.
        parts: The number of parties.
        how: The method: ``even``, ``classes`` or ``dirichlet``.
        seed: The seed of all random draws.
        classes: The number of classes of each party, for ``classes``.
        alpha: The concentration, greater than 0, for ``dirichlet``.
        min_rows: The minimum number of rows of a party.

    Raises InputError: DATA_INVALID if a party gets fewer rows than ``min_rows``; CONFIG_INVALID if
    an argument is invalid.
    """
    labels_N = np.asarray(labels_N)
    if labels_N.ndim != 1:
        raise _config_error(
            f"labels: shape must be [N] (got {labels_N.shape}). Give one class for each row."
        )
    names, codes_N = np.unique(labels_N, return_inverse=True)
    _check_arguments(how, parts, len(names), classes, alpha)
    if how == "even":
        order = draw_permutation(derive_seed(seed, "deal"), len(codes_N))
        rows_by_party = [np.sort(rows) for rows in np.array_split(order, parts)]
    elif how == "classes":
        rows_by_party = _divide_by_classes(codes_N, len(names), parts, classes, seed)
    else:
        rows_by_party = _divide_by_shares(codes_N, len(names), parts, alpha, min_rows, seed)
    smallest = min(map(len, rows_by_party))
    if smallest < min_rows:
        raise InputError(
            Code.DATA_INVALID,
            f"deal {how!r}: a party gets {smallest:,} of {len(codes_N):,} rows, fewer than "
            f"{min_rows:,}. Use fewer than {parts:,} parties or a larger alpha."
            if how == "dirichlet"
            else f"deal {how!r}: a party gets {smallest:,} of {len(codes_N):,} rows, fewer than "
            f"{min_rows:,}. Use fewer than {parts:,} parties.",
        )
    return rows_by_party


def _divide_by_classes(
    codes_N: npt.NDArray[Any], C: int, parts: int, per_party: int, seed: int
) -> list[Rows]:
    """Gives each party shards of ``per_party`` classes. The classes are taken in turn from random
    orders of all classes.
    """
    class_queue: list[int] = []
    parties_by_class: list[list[int]] = [[] for _ in range(C)]
    round_ = 0
    for part in range(parts):
        party_classes: set[int] = set()
        while len(party_classes) < per_party:
            next_class = next((c for c in class_queue if c not in party_classes), None)
            if next_class is None:
                class_queue += map(
                    int, draw_permutation(derive_seed(seed, "deal", "turn", round_), C)
                )
                round_ += 1
                continue
            class_queue.remove(next_class)
            party_classes.add(next_class)
            parties_by_class[next_class].append(part)
    rows_by_party: list[list[Rows]] = [[] for _ in range(parts)]
    for c, class_parties in enumerate(parties_by_class):
        rows = _shuffle_class(codes_N, c, seed)
        for part, shard in zip(
            class_parties, np.array_split(rows, len(class_parties)), strict=True
        ):
            rows_by_party[part].append(shard)
    return [np.sort(np.concatenate(shards)) for shards in rows_by_party]


def _divide_by_shares(
    codes_N: npt.NDArray[Any], C: int, parts: int, alpha: float, min_rows: int, seed: int
) -> list[Rows]:
    """Cuts each class by shares from a Dirichlet distribution. Draws again, up to ``_TRIES`` times,
    if a party has too few rows.
    """
    by_class = [_shuffle_class(codes_N, c, seed) for c in range(C)]
    random = np.random.Generator(np.random.Philox(key=derive_seed(seed, "deal", "shares")))
    rows_by_party: list[Rows] = []
    for _ in range(_TRIES):
        shards_by_class = []
        for rows in by_class:
            ends = np.cumsum(random.dirichlet(np.full(parts, alpha)))[:-1] * len(rows)
            shards_by_class.append(np.split(rows, np.round(ends).astype(np.int64)))
        rows_by_party = [
            np.sort(np.concatenate(shards)) for shards in zip(*shards_by_class, strict=True)
        ]
        if min(map(len, rows_by_party)) >= min_rows:
            break
    return rows_by_party


def _shuffle_class(codes_N: npt.NDArray[Any], c: int, seed: int) -> Rows:
    rows = np.flatnonzero(codes_N == c)
    return rows[draw_permutation(derive_seed(seed, "deal", "class", c), len(rows))]


def _check_arguments(how: str, parts: int, C: int, classes: int, alpha: float) -> None:
    if how not in get_args(How):
        raise _config_error(
            f"deal: unknown method (got {how!r}). Choose one of {', '.join(get_args(How))}."
        )
    if parts < 1:
        raise _config_error(f"parts: must be at least 1 (got {parts}). Set 1 or more parties.")
    if how == "classes" and not 1 <= classes <= C:
        raise _config_error(
            f"classes: must be between 1 and {C}, the classes of the rows (got {classes}). Set 1 "
            f"to {C}."
        )
    if how == "classes" and parts * classes < C:
        raise _config_error(
            f"classes: {parts} parties with {classes} classes per party cannot hold all {C} "
            "classes. Set more classes, or more parties."
        )
    if how == "dirichlet" and not 0 < alpha < np.inf:
        raise _config_error(
            f"alpha: must be greater than 0 and finite (got {alpha}). Set a positive number."
        )


def _config_error(text: str) -> InputError:
    return InputError(Code.CONFIG_INVALID, text)
