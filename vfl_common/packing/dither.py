"""Random numbers for stochastic rounding, derived from a seed, so that a repeated step gives the
same bytes.

The dither is public: anybody with the recipe can compute it. It makes the mean of rounded numbers
right; it does not protect anything.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

# The count of 16-bit numbers in one draw of 64 bits.
_A_WORD = 4


def derive(root: int, *names: object) -> int:
    """Derives a 63-bit seed from a seed and a path of names; different paths give unrelated "
    "seeds."""
    text = "\x1f".join([str(root), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class Dither:
    """A stream of random numbers, row after row, which is the same on every machine and with every
    numpy version (SFC64, raw words).
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.SFC64(seed)

    def sixteenths(self, rows: int, width: int) -> npt.NDArray[np.uint16]:
        """Returns numbers of 16 random bits, [rows, width rounded up to whole draws of four]."""
        words = self._bits.random_raw(rows * -(-width // _A_WORD))
        return words.astype("<u8", copy=False).view("<u2").reshape(rows, -1)

    def keys(self, rows: int, width: int) -> npt.NDArray[np.uint64]:
        """Returns numbers of 64 random bits, [rows, width]."""
        return self._bits.random_raw(rows * width).reshape(rows, width)
