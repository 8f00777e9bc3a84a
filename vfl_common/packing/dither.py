"""Random numbers for stochastic rounding, derived from a seed, so that a repeated step gives the
same bytes.

The random numbers are public: anybody with the recipe can compute them. They keep the mean of
rounded values, and give no privacy.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

# The number of 16-bit numbers in one draw of 64 bits.
_NUMBERS_PER_WORD = 4


def derive_subseed(root: int, *names: object) -> int:
    """Derives a 63-bit seed from a seed and a path of names; different paths give unrelated
    seeds.
    """
    text = "\x1f".join([str(root), *map(str, names)])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


class Dither:
    """A stream of random numbers that is the same on every machine and with every numpy version
    (raw words of SFC64).
    """

    def __init__(self, seed: int) -> None:
        self._bits = np.random.SFC64(seed)

    def sixteenths(self, rows: int, width: int) -> npt.NDArray[np.uint16]:
        """Returns random 16-bit numbers, [rows, width rounded up to a multiple of 4]."""
        words = self._bits.random_raw(rows * -(-width // _NUMBERS_PER_WORD))
        return words.astype("<u8", copy=False).view("<u2").reshape(rows, -1)

    def keys(self, rows: int, width: int) -> npt.NDArray[np.uint64]:
        """Returns random 64-bit numbers, [rows, width]."""
        return self._bits.random_raw(rows * width).reshape(rows, width)
