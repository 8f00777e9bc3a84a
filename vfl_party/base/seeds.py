"""Derives seeds, orders and splits at every party by itself, so that they never cross the wire.

What several parties must share (splits, the order of common batches, weights that start equal)
follows from the recipe's seed. What only one party needs follows from ``Party.own_seed``, which may
be secret: decision 29.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vfl_common.packing.dither import derive

# Row numbers, in the canonical order of the ids.
Rows = npt.NDArray[np.int64]

# The longest permutation that is cached: 8 MiB.
_MAX_CACHED = 1 << 20
# Numbers that are compared at once.
_CHUNK = 1 << 20


# Seeds from here on are secret, and have 128 bits: too many to try them all.
SECRET = 1 << 127


def derive_seed(root: int, *names: object) -> int:
    """Derives a seed from another one and a path of names: equal wherever ``root`` is known,
    unrelated per path.

    It has 63 bits if ``root`` follows from the recipe's seed, which all parties know. If ``root``
    is secret, so is it.
    """
    if root < SECRET:
        return derive(root, *names)
    return _secret("\x1f".join([str(root), *map(str, names)]).encode())


def secret_seed(secret: bytes) -> int:
    """Returns the root of the seeds that only the holder of ``secret`` can derive."""
    return _secret(secret)


def _secret(text: bytes) -> int:
    return SECRET | int.from_bytes(hashlib.sha256(text).digest()[:16], "little")


def permutation(seed: int, n: int) -> npt.NDArray[np.int64]:
    """Returns a permutation of ``range(n)``, equal on every machine and numpy version (Philox, raw
    64-bit keys).

    It cannot be written to.
    """
    return _cached_permutation(seed, n) if n <= _MAX_CACHED else _draw_permutation(seed, n)


def _draw_permutation(seed: int, n: int) -> npt.NDArray[np.int64]:
    keys = np.random.Philox(key=seed).random_raw(n)
    # Five times as fast as a stable sort, and the same if no two keys are equal.
    order = np.argsort(keys)
    starts = range(0, n, _CHUNK)
    # In chunks, because all keys at once need twice the memory.
    blocks = (keys[order[start : start + _CHUNK + 1]] for start in starts)
    if any(bool((some[1:] == some[:-1]).any()) for some in blocks):
        order = np.argsort(keys, kind="stable")
    order = order.astype(np.int64, copy=False)
    order.setflags(write=False)
    return order


# Parties of one process ask for the same one after the other.
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
    """Returns the row numbers of the splits, each ascending; the shares are rounded to whole rows.

    The splits are ``test``, ``validation`` and, for training: ``local``, all training rows;
    ``aligned``, the share that all parties hold; ``train``, the aligned rows with known labels.
    ``train`` has at most ``labelled`` rows; all if it is None. With one seed, a smaller split is a
    subset of a larger one. Row numbers are positions in the canonical order of the ids.
    ``folds``, ``fold``: see ``with_fold_first``; then ``test`` has no effect. ``drawn``: whether
    the rows are in a random order; if only their numbers matter, they need not be.
    """
    order = permutation(derive_seed(root, "split"), n) if drawn else np.arange(n)
    order, n_test = move_fold_first(order, round(n * test), folds, fold)
    return cut_order(order, n_test, round(n * validation), aligned, labelled)


def move_fold_first(
    order: Rows, n_test: int, folds: int | None, fold: int | None
) -> tuple[Rows, int]:
    """Moves a fold to the front of an order of the rows, where test rows stand; returns the order
    and their number.

    The folds are ``folds`` runs of successive rows of ``order``, of one size, give or take one row;
    ``fold`` counts from 1. So they are disjoint and have all rows; those of a stratified order have
    their share of each class. Without folds, nothing moves, and ``n_test`` is returned.
    """
    if folds is None or fold is None:
        return order, n_test
    parts = np.array_split(order, folds)
    tests = parts.pop(fold - 1)
    return np.concatenate([tests, *parts]), len(tests)


def stratify_order(root: int, classes_N: npt.NDArray[np.int64]) -> Rows:
    """Returns an order of the rows in which each class is spread evenly, so that every part has its
    share of each.

    The rows of a class come in a random order, at equal distances, from a random start (systematic
    sampling): row k of the n_c rows of class c is at (k + u_c) / n_c of the whole.
    """
    order = permutation(derive_seed(root, "split"), len(classes_N))
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
    """Cuts an order of the rows into the splits that ``split_rows`` describes: test rows first,
    then validation.
    """
    test, validation, local = np.split(order, [n_test, n_test + n_validation])
    common = local[: round(len(local) * aligned)]
    splits = {"test": np.sort(test), "validation": np.sort(validation), "local": np.sort(local)}
    # Splits that are the same share one array.
    splits["aligned"] = splits["local"] if len(common) == len(local) else np.sort(common)
    train = common[:labelled]
    splits["train"] = splits["aligned"] if len(train) == len(common) else np.sort(train)
    return splits


def batch_sizes(rows: int, size: int) -> list[int]:
    """Returns the sizes of an epoch's batches over ``rows`` rows, see ``batches``."""
    sizes = [min(size, rows - start) for start in range(0, rows, size)]
    return sizes[:-1] if size > 1 and len(sizes) > 1 and sizes[-1] == 1 else sizes


def batches(
    root: int, phase: str, epoch: int, rows: npt.NDArray[np.int64], size: int
) -> list[npt.NDArray[np.int64]]:
    """Returns the shuffled batches of an epoch over ``rows``, without a last batch of one row
    (BatchNorm needs two).
    """
    order = rows[permutation(derive_seed(root, phase, epoch), len(rows))]
    sizes = batch_sizes(len(rows), size)
    return [order[size * at : size * at + count] for at, count in enumerate(sizes)]


def full_batches(
    root: int, phase: str, epoch: int, rows: npt.NDArray[np.int64], size: int
) -> list[npt.NDArray[np.int64]]:
    """Returns ``batches`` without a last one below ``size``: statistics of few rows mislead
    self-supervised losses.
    """
    return [batch for batch in batches(root, phase, epoch, rows, size) if len(batch) == size]
