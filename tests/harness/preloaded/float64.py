"""Runs parties, servers and references in float64, where rounding hides no error.

    python -P float64.py vfl-party run bank.toml

The switch is not part of the product: it replaces the product's one definition of real numbers
(``vfl_party.base.devices``, and their size on the wire) in this process. All processes of a run need
it. Codecs do not work with it.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from vfl.launcher.child import PROGRAMS
from vfl_common.bundle import ITEM_BYTES, DType
from vfl_party.base.devices import TORCH, WIRE
from vfl_party.outbound import declared


def turn_on() -> None:
    """Computes and exchanges real numbers in float64 from now on."""
    _set(torch.float64)


def _set(dtype: torch.dtype) -> None:
    TORCH[DType.FLOAT32], ITEM_BYTES[DType.FLOAT32] = dtype, dtype.itemsize
    WIRE.clear()
    WIRE.update({each: wire for wire, each in TORCH.items()})
    torch.set_default_dtype(dtype)
    # It holds specs with sizes in bytes.
    declared._make_spec.cache_clear()


def is_on() -> bool:
    return TORCH[DType.FLOAT32] is torch.float64


@contextmanager
def float64() -> Iterator[None]:
    """Turns float64 on for the block, and for the programs that a test starts in it."""
    turn_on()
    try:
        yield
    finally:
        _set(torch.float32)


def started_with_it(args: Sequence[str]) -> list[str]:
    """Returns the command that starts the installed program ``args``, or a torchrun of it, in
    float64.
    """
    at = next(place for place, word in enumerate(args) if Path(word).name in PROGRAMS)
    return [*args[:at], sys.executable, "-P", __file__, *args[at:]]


def main() -> None:
    """Runs the program that the other arguments name."""
    turn_on()
    sys.argv = sys.argv[1:]
    PROGRAMS[Path(sys.argv[0]).name]()


if __name__ == "__main__":
    main()
