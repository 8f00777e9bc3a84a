"""Divides the rows of one data set among parties, for experiments on one machine.

Every row goes to exactly one party. The same labels, seed and numbers always give the same
division.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_party.base.seeds import Rows, derive_seed, permutation

How = Literal["even", "classes", "dirichlet"]

# The most draws of Dirichlet shares until every party has enough rows.
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
    """Deals the rows of a data set to ``parts`` parties: row numbers of each, ascending.

    ``even`` (IID) deals all rows at random, in numbers that differ by at most one. ``classes``
    gives each party rows of ``classes`` different classes (MocoSFL and FedEMA: 2 of CIFAR-10's);
    each class is cut into shards of one size, and every class goes round as often as the others.
    ``dirichlet`` draws, for each class, the shares of the parties from a symmetric Dirichlet
    distribution (Yurochkin et al. 2019; Li et al. 2022): the smaller ``alpha``, the more unlike.

    Args:
        labels_N: the class of each row, in any dtype that numpy can sort.
        parts: the number of parties.
        classes: ``classes``: how many classes each party has.
        alpha: ``dirichlet``: the concentration, above 0.
        min_rows: the fewest rows of a party.

    Raises InputError (DATA_INVALID) if a party gets fewer rows than ``min_rows``, and
    (CONFIG_INVALID) if a number is invalid.
    """
    labels_N = np.asarray(labels_N)
    if labels_N.ndim != 1:
        raise _config_error(
            f"labels: shape must be [N] (got {labels_N.shape}). Give one class for each row."
        )
    names, codes_N = np.unique(labels_N, return_inverse=True)
    _check(how, parts, len(names), classes, alpha)
    if how == "even":
        order = permutation(derive_seed(seed, "deal"), len(codes_N))
        dealt = [np.sort(rows) for rows in np.array_split(order, parts)]
    elif how == "classes":
        dealt = _by_classes(codes_N, len(names), parts, classes, seed)
    else:
        dealt = _by_shares(codes_N, len(names), parts, alpha, min_rows, seed)
    smallest = min(map(len, dealt))
    if smallest < min_rows:
        raise InputError(
            Code.DATA_INVALID,
            f"deal {how!r}: a party gets {smallest:,} of {len(codes_N):,} rows, fewer than "
            f"{min_rows:,}. Use fewer than {parts:,} parties or a larger alpha."
            if how == "dirichlet"
            else f"deal {how!r}: a party gets {smallest:,} of {len(codes_N):,} rows, fewer than "
            f"{min_rows:,}. Use fewer than {parts:,} parties.",
        )
    return dealt


def _by_classes(
    codes_N: npt.NDArray[Any], C: int, parts: int, per_party: int, seed: int
) -> list[Rows]:
    """Gives each party ``per_party`` classes, in turn from random orders of all classes, and a
    shard of each of them.
    """
    waiting: list[int] = []
    takers: list[list[int]] = [[] for _ in range(C)]
    turn = 0
    for part in range(parts):
        mine: set[int] = set()
        while len(mine) < per_party:
            free = next((c for c in waiting if c not in mine), None)
            if free is None:
                waiting += map(int, permutation(derive_seed(seed, "deal", "turn", turn), C))
                turn += 1
                continue
            waiting.remove(free)
            mine.add(free)
            takers[free].append(part)
    dealt: list[list[Rows]] = [[] for _ in range(parts)]
    for c, those in enumerate(takers):
        rows = _shuffle_class(codes_N, c, seed)
        for part, shard in zip(those, np.array_split(rows, len(those)), strict=True):
            dealt[part].append(shard)
    return [np.sort(np.concatenate(shards)) for shards in dealt]


def _by_shares(
    codes_N: npt.NDArray[Any], C: int, parts: int, alpha: float, min_rows: int, seed: int
) -> list[Rows]:
    """Cuts each class by shares from a Dirichlet distribution; draws again, up to 100 times, while
    a party has too few rows.
    """
    by_class = [_shuffle_class(codes_N, c, seed) for c in range(C)]
    random = np.random.Generator(np.random.Philox(key=derive_seed(seed, "deal", "shares")))
    dealt: list[Rows] = []
    for _ in range(_TRIES):
        cut = []
        for rows in by_class:
            ends = np.cumsum(random.dirichlet(np.full(parts, alpha)))[:-1] * len(rows)
            cut.append(np.split(rows, np.round(ends).astype(np.int64)))
        dealt = [np.sort(np.concatenate(shards)) for shards in zip(*cut, strict=True)]
        if min(map(len, dealt)) >= min_rows:
            break
    return dealt


def _shuffle_class(codes_N: npt.NDArray[Any], c: int, seed: int) -> Rows:
    rows = np.flatnonzero(codes_N == c)
    return rows[permutation(derive_seed(seed, "deal", "class", c), len(rows))]


def _check(how: str, parts: int, C: int, classes: int, alpha: float) -> None:
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
