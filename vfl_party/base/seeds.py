"""Derives seeds, orders and splits. Every party derives them by itself, so they are never sent.

Values that several parties share (splits, the order of common batches, equal initial weights) are
derived from the recipe's seed. Values that only one party needs are derived from
``Party.own_seed``, which may be secret (decision 29).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from vfl_common.packing.bits import derive_subseed

# Row numbers, in the canonical order of the ids.
Rows = npt.NDArray[np.int64]

# The maximum length of a permutation that is cached, 8 MiB.
_MAX_CACHED = 1 << 20
# The number of keys that are compared at once.
_CHUNK = 1 << 20


# Seeds of at least this value are secret. They have 128 bits, too many to try them all.
SECRET = 1 << 127


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
