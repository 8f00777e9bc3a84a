"""Seeds that every party derives for itself, so that orders and splits never cross the wire."""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt


def derive_seed(root: int, *names: object) -> int:
    """A 63-bit seed from the recipe's seed and a path of names: the same at every party, independent between paths."""
    text = "\x1f".join([str(root), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def permutation(seed: int, n: int) -> npt.NDArray[np.int64]:
    """A permutation of ``range(n)``, the same on every machine and numpy version (Philox, raw 64-bit keys)."""
    keys = np.random.Philox(key=seed).random_raw(n)
    return np.argsort(keys, kind="stable").astype(np.int64)


def split_rows(
    root: int, n: int, *, validation: float, test: float, aligned: float = 1.0, labelled: int | None = None
) -> dict[str, npt.NDArray[np.int64]]:
    """Row numbers of the splits, each ascending; the shares are rounded to whole rows.

    ``test`` and ``validation``; of the others, which are for training: ``local`` all of them, ``aligned`` the share
    that counts as known to all parties, ``train`` those of the aligned ones whose labels count as known (all where
    ``labelled`` is None, as many as there are where it is more). Of one seed, fewer rows are a part of more rows. Rows
    are positions in the canonical order of the ids.
    """
    order = permutation(derive_seed(root, "split"), n)
    n_test, n_validation = round(n * test), round(n * validation)
    local = order[n_test + n_validation :]
    common = local[: round(len(local) * aligned)]
    return {
        "test": np.sort(order[:n_test]),
        "validation": np.sort(order[n_test : n_test + n_validation]),
        "train": np.sort(common[:labelled]),
        "aligned": np.sort(common),
        "local": np.sort(local),
    }


def batches(root: int, phase: str, epoch: int, rows: npt.NDArray[np.int64], size: int) -> list[npt.NDArray[np.int64]]:
    """The batches of one epoch over ``rows``, shuffled; a last batch of one row is left out (no BatchNorm on it)."""
    order = rows[permutation(derive_seed(root, phase, epoch), len(rows))]
    cut = [order[start : start + size] for start in range(0, len(order), size)]
    return cut[:-1] if size > 1 and len(cut) > 1 and len(cut[-1]) == 1 else cut


def full_batches(
    root: int, phase: str, epoch: int, rows: npt.NDArray[np.int64], size: int
) -> list[npt.NDArray[np.int64]]:
    """As ``batches``, without a last one that is smaller than ``size``: statistics of few rows mislead SSL losses."""
    return [batch for batch in batches(root, phase, epoch, rows, size) if len(batch) == size]
