"""Deals whole rows to clients: alike, by classes, or by Dirichlet shares of each class."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from vfl.preparing.dataset import Request
from vfl_common.errors import Code, InputError

Rows = npt.NDArray[np.int64]


def deal(
    labels_N: npt.NDArray[Any], splits_N: npt.NDArray[Any] | None, request: Request
) -> list[Rows]:
    """Returns the increasing row numbers of each of ``request.parties`` clients.

    The rows of each split are dealt by themselves, in the same way. Raises InputError if
    ``request.deal`` is none, or if a client would have no rows.
    """
    rng = np.random.default_rng(request.seed)
    splits = np.zeros(len(labels_N)) if splits_N is None else splits_N
    raise InputError(Code.CONFIG_INVALID, f"deal: {rng} {splits}")
