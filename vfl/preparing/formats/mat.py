"""Reads images of MATLAB files, the format of SVHN."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError


def read_mat(path: Path) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Returns ``X`` as images [N, H, W, 3] of bytes, and ``y`` as [N] numbers. In the file, X is
    [H, W, 3, N] and y [N, 1]. Raises InputError.
    """
    from scipy.io import loadmat

    try:
        found = loadmat(path, variable_names=("X", "y"))
        images, labels = np.moveaxis(found["X"], -1, 0), found["y"].reshape(-1).astype(np.int64)
        if images.dtype != np.uint8 or images.ndim != 4 or images.shape[3] != 3:
            raise ValueError("no images")
        if len(images) != len(labels):
            raise ValueError("numbers differ")
    # The reader of a damaged file fails in any way.
    except Exception:  # noqa: BLE001
        text = f"{path}: is no MATLAB file with images X [H, W, 3, N] and classes y [N, 1]"
        raise InputError(Code.FILE_INVALID, f"{text}; get it from its makers again") from None
    return images, labels
