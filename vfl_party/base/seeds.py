"""Derives seeds, orders and splits, and divides rows among parties. Every party derives them by
itself, so they are never sent.

Values that several parties share (splits, the order of common batches, equal initial weights) are
derived from the recipe's seed. Values that only one party needs are derived from
``Party.own_seed``, which may be secret (decision 29).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError
from vfl_common.packing.bits import derive_subseed

# Row numbers, in the canonical order of the ids.
Rows = npt.NDArray[np.int64]

# The maximum length of a permutation that is cached, 8 MiB.
_MAX_CACHED = 1 << 20
# The number of keys that are compared at once.
_CHUNK = 1 << 20
# Seeds of at least this value are secret. They have 128 bits, too many to try them all.
SECRET = 1 << 127
Mask = npt.NDArray[np.bool_]
How = Literal["even", "classes", "dirichlet"]
# The maximum number of draws of Dirichlet shares until every party has enough rows.
_TRIES = 100


def derive_seed(root: int, *names: object) -> int:
    """Derives a seed from another seed and a path of names. The same arguments give the same seed,
    and seeds of different paths are unrelated.

    The result has 63 bits if ``root`` is derived from the recipe's seed, which all parties know. It
    is secret if ``root`` is secret.
    """
    if root < SECRET:
        return derive_subseed(root, *names)
    return _derive_secret("\x1f".join([str(root), *map(str, names)]).encode())


def secret_seed(secret: bytes) -> int:
    """Returns a root for ``derive_seed`` that only the holder of ``secret`` can compute."""
    return _derive_secret(secret)


def _derive_secret(text: bytes) -> int:
    return SECRET | int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


def draw_permutation(seed: int, n: int) -> npt.NDArray[np.int64]:
    """Returns a read-only permutation of ``range(n)``, int64 [n]. It is the same on every machine
    and with every NumPy version, because it sorts raw 64-bit keys from Philox.
    """
    return _cached_permutation(seed, n) if n <= _MAX_CACHED else _draw_permutation(seed, n)


def _draw_permutation(seed: int, n: int) -> npt.NDArray[np.int64]:
    keys = np.random.Philox(key=seed).random_raw(n)
    # An unstable sort is five times as fast, and gives the same order if no two keys are equal.
    order = np.argsort(keys)
    starts = range(0, n, _CHUNK)
    # In chunks, because all keys at once need twice the memory.
    blocks = (keys[order[start : start + _CHUNK + 1]] for start in starts)
    if any(bool((block_keys[1:] == block_keys[:-1]).any()) for block_keys in blocks):
        order = np.argsort(keys, kind="stable")
    order = order.astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


# The parties of one process need the same permutation one after the other.
_cached_permutation = lru_cache(maxsize=1)(_draw_permutation)


def split_rows(
    root: int,
    n: int,
    *,
    validation: float,
    test: float,
    aligned: float = 1.0,
    labelled: int | None = None,
    folds: int | None = None,
    fold: int | None = None,
    drawn: bool = True,
) -> dict[str, npt.NDArray[np.int64]]:
    """Returns the row numbers of each split, ascending.

    The splits are ``test`` and ``validation``, and three training splits: ``local``, all training
    rows; ``aligned``, the share that all parties hold; ``train``, the aligned rows with known
    labels. With one seed, a smaller split is a subset of a larger one. Row numbers are positions in
    the canonical order of the ids.

    Args:
        root: The seed.
        n: The number of rows.
        validation: The share of validation rows, rounded to whole rows.
        test: The share of test rows. Ignored with ``folds``.
        aligned: The share of the training rows that all parties hold.
        labelled: The maximum number of rows in ``train``; None for all.
        folds: The number of folds; see ``move_fold_first``.
        fold: The fold that becomes the test rows, from 1.
        drawn: Whether to shuffle the rows. False is enough if only the sizes matter.
    """
    order = draw_permutation(derive_seed(root, "split"), n) if drawn else np.arange(n)
    order, n_test = move_fold_first(order, round(n * test), folds, fold)
    return cut_order(order, n_test, round(n * validation), aligned, labelled)


def move_fold_first(
    order: Rows, n_test: int, folds: int | None, fold: int | None
) -> tuple[Rows, int]:
    """Moves a fold to the front of an order of the rows, where the test rows are. Returns the new
    order and the number of test rows.

    The folds are ``folds`` consecutive parts of ``order``, whose sizes differ by at most one.
    ``fold`` counts from 1. A fold of a stratified order has its share of each class. Without folds,
    returns ``order`` and ``n_test`` unchanged.
    """
    if folds is None or fold is None:
        return order, n_test
    folds_rows = np.array_split(order, folds)
    test_rows = folds_rows.pop(fold - 1)
    return np.concatenate([test_rows, *folds_rows]), len(test_rows)


def stratify_order(root: int, classes_N: npt.NDArray[np.int64]) -> Rows:
    """Returns an order of the rows in which each class is spread evenly, so that every part of the
    order has its share of each class.

    The rows of a class are in a random order, at equal distances from a random start (systematic
    sampling). Row k of the n_c rows of class c gets the position (k + u_c) / n_c, from 0 to 1.
    """
    order = draw_permutation(derive_seed(root, "split"), len(classes_N))
    starts = np.random.Philox(key=derive_seed(root, "split", "strata")).random_raw(
        int(classes_N.max(initial=0)) + 1
    )
    place_N = np.empty(len(classes_N), np.float64)
    for class_ in np.unique(classes_N):
        rows = order[classes_N[order] == class_]
        place_N[rows] = (np.arange(len(rows)) + starts[class_] / 2.0**64) / len(rows)
    return order[np.argsort(place_N[order], kind="stable")]


def cut_order(
    order: Rows, n_test: int, n_validation: int, aligned: float = 1.0, labelled: int | None = None
) -> dict[str, Rows]:
    """Cuts an order of the rows into the splits of ``split_rows``. Test rows come first, then
    validation rows.
    """
    test, validation, local = np.split(order, [n_test, n_test + n_validation])
    aligned_rows = local[: round(len(local) * aligned)]
    splits = {"test": np.sort(test), "validation": np.sort(validation), "local": np.sort(local)}
    # Splits with the same rows share one array.
    splits["aligned"] = (
        splits["local"] if len(aligned_rows) == len(local) else np.sort(aligned_rows)
    )
    train = aligned_rows[:labelled]
    splits["train"] = splits["aligned"] if len(train) == len(aligned_rows) else np.sort(train)
    return splits


def compute_batch_sizes(rows: int, size: int) -> list[int]:
    """Returns the sizes of an epoch's batches over ``rows`` rows, see ``batches``."""
    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    return sizes[:-1] if size > 1 and len(sizes) > 1 and sizes[-1] == 1 else sizes


def batches(
    root: int, phase: str, epoch: int, rows: npt.NDArray[np.int64], size: int
) -> list[npt.NDArray[np.int64]]:
    """Returns the shuffled batches of an epoch over ``rows``, without a last batch of one row
    (BatchNorm needs two).
    """
    order = rows[draw_permutation(derive_seed(root, phase, epoch), len(rows))]
    sizes = compute_batch_sizes(len(rows), size)
    return [order[size * number : size * number + count] for number, count in enumerate(sizes)]


def full_batches(
    root: int, phase: str, epoch: int, rows: npt.NDArray[np.int64], size: int
) -> list[npt.NDArray[np.int64]]:
    """Returns ``batches`` without a last batch of fewer than ``size`` rows, because self-supervised
    losses need statistics of many rows.
    """
    return [batch for batch in batches(root, phase, epoch, rows, size) if len(batch) == size]


@dataclass(frozen=True, eq=False)
class HeldRows:
    """The holders of the N rows of a run, if not every party holds all rows. The active party holds
    all of them.

    Args:
        splits: For each split, its positions in the order of all rows; see ``PartyData``.
        by: For each passive party, bool [N], whether it holds each row. A passive party has only
            its own entry.
    """

    splits: Mapping[str, Rows]
    by: Mapping[str, Mask]

    def of(self, party: str, rows: Rows) -> Rows:
        """Returns the positions in ``rows`` of the rows that a passive party holds, ascending."""
        return np.flatnonzero(self.by[party][rows])

    def own(self, party: str, rows: Rows) -> Rows:
        """Returns the rows among ``rows`` that a passive party holds, numbered as in its table."""
        return self._row_counts[party][rows[self.by[party][rows]]]

    def counts(self, rows: Rows) -> dict[str, int]:
        """Returns how many of ``rows`` each passive party holds, without parties that hold none."""
        totals = {name: int(held[rows].sum()) for name, held in self.by.items()}
        return {name: count for name, count in totals.items() if count}

    def by_holders(self, rows: Rows) -> list[tuple[tuple[str, ...], Rows]]:
        """Groups ``rows`` by their holders. Returns for each group the passive parties that hold
        its rows, and the positions of its rows in ``rows``. Groups are in the order of ``by``.
        """
        return group_rows(list(self.by), [held[rows] for held in self.by.values()])

    @cached_property
    def _row_counts(self) -> dict[str, Rows]:
        """For each passive party, the number of its rows before each row, [N]."""
        return {name: np.cumsum(held) - held for name, held in self.by.items()}


def group_rows(names: Sequence[str], held: Sequence[Mask]) -> list[tuple[tuple[str, ...], Rows]]:
    """Groups rows with the same holders; see ``by_holders``. ``held``: For each name, bool [N],
    whether it holds each row.
    """
    patterns, group_N = np.unique(np.stack(held, axis=1), axis=0, return_inverse=True)
    group_N = group_N.reshape(-1)
    return [
        (
            tuple(name for name, is_holder in zip(names, mask, strict=True) if is_holder),
            np.flatnonzero(group_N == number),
        )
        for number, mask in enumerate(patterns)
    ]


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
