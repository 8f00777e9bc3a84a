"""Implements a party of a federation, active or passive: its data, its methods and its program."""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

# The code path that MKL reports if it computed before MKL_CBWR was set.
_UNSET = 1


def _set_mkl_branch() -> None:
    """Sets MKL_CBWR, so that Intel's MKL computes a row of a matrix product in the same way at
    every memory address (AUTO) and for every number of rows and threads (STRICT, on Intel
    processors).

    MKL reads the variable at its first product. A value that the environment sets takes precedence.
    Warns if torch has already computed a product.
    """
    if "MKL_CBWR" in os.environ:
        return
    os.environ["MKL_CBWR"] = "AUTO,STRICT"
    if "torch" in sys.modules and _has_multiplied(sys.modules["torch"]):
        warnings.warn(
            "vfl: torch was used before vfl was imported, so MKL computes without MKL_CBWR, and "
            "the last bits of a row's scores may depend on the rows scored with it. Restart Python "
            "and import vfl first, or set MKL_CBWR=AUTO,STRICT in the environment.",
            stacklevel=2,
        )


def _has_multiplied(torch: Any) -> bool:
    """Returns whether torch's MKL has already computed without MKL_CBWR; True if this is
    unknown.
    """
    import ctypes

    try:
        if not torch.backends.mkl.is_available():
            return False
        library = ctypes.CDLL(str(Path(torch.__file__).with_name("lib") / "libtorch_cpu.so"))
        return bool(library.mkl_serv_cbwr_get(1) == _UNSET)
    except (OSError, AttributeError):
        return True


_set_mkl_branch()
