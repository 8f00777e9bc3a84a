"""Computes rows in blocks, so that the bits of a row do not depend on the rows computed with it.

Libraries choose a kernel by the number of rows, vectorised loops end in scalar code, and large
operations are cut between threads. No library promises that a row keeps its bits, so ``checked``
runs a model at every number of rows that its blocks allow. The result holds for one model on one
machine with the same environment variables and number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The rows of a block of vectors: vectorised loops over a multiple of 32 rows have no scalar end,
# and MKL multiplies multiples of 32 rows in the same way in its STRICT mode.
ROWS = 32
# The most rows computed at once: torch computes up to 32,768 numbers of an elementwise operation on
# one thread, so 64 numbers a row, and every number of blocks can be checked.
_MAX = 512
# With larger images, a block of 32 would cost a single request three times as much as one of 8.
_IMAGES, _MAX_IMAGES, _SMALL_IMAGE = 8, 32, 64
# A GPU needs many rows at once, and its rows are not checked.
_MAX_GPU = 1024
# If other numbers of rows give other bits, all blocks have exactly this many. MKL limited to AVX2
# computes a row of such a block in the same way at every place, which it does not in blocks of 32.
_CONSTANT = 64

Compute = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Blocks:
    """How many rows a model computes at once: a multiple of ``rows``, and at most ``most``.

    ``why``: why a row's bits still depend on other rows; '' if they do not, or if the model
    was not checked.
    """

    rows: int
    most: int
    why: str = ""

    @classmethod
    def usual(cls, x: Tensor) -> Blocks:
        """Returns the blocks for a model's first input, [N, F], or [N, C, H, W] of images."""
        if x.device.type != "cpu":
            return cls(ROWS, _MAX_GPU)
        return cls(_IMAGES, _MAX_IMAGES) if _are_large(x.shape[1:]) else cls(ROWS, _MAX)


def in_blocks(compute: Compute, blocks: Blocks | None, *inputs: Tensor) -> Tensor:
    """Returns ``compute(*inputs)``, [N, …], computed in whole blocks: the last row is repeated up
    to the end of its block. ``inputs``: [N, …] each. ``blocks``: default ``Blocks.usual``.
    """
    n, blocks = len(inputs[0]), blocks or Blocks.usual(inputs[0])
    if not n:
        return compute(*inputs)
    if short := -n % blocks.rows:
        inputs = tuple(torch.cat([x, x[-1:].expand(short, *x.shape[1:])]) for x in inputs)
    parts = zip(*(torch.split(x, blocks.most) for x in inputs), strict=True)
    outputs = [compute(*part) for part in parts]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[:n]


def sample_rows(shape: Sequence[int]) -> int:
    """Returns how many rows ``checked`` needs of an input whose rows have this shape."""
    return _CONSTANT if _are_large(shape) else _MAX


def _are_large(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and math.prod(shape) > _SMALL_IMAGE


def find_blocks(compute: Compute, samples: Sequence[Inputs]) -> Blocks:
    """Runs a model at every number of blocks, and returns the blocks in which a row keeps its bits:
    the usual ones, else blocks of one constant size. If it keeps them in neither, ``why`` says so.

    ``samples``: inputs of ``sample_rows`` rows each; several if the model takes several shapes.
    """
    usual = Blocks.usual(samples[0][0])
    if samples[0][0].device.type != "cpu":
        return replace(usual, why=f"computed on {samples[0][0].device}, where rows are not checked")
    why = ""
    for blocks in (usual, Blocks(_CONSTANT, _CONSTANT)):
        differences = (_difference(compute, blocks, inputs) for inputs in samples)
        why = next(filter(None, differences), "")
        if not why:
            return blocks
    return replace(usual, why=why)


def _difference(compute: Compute, blocks: Blocks, inputs: Inputs) -> str:
    """Returns a text on the first number of rows at which a row has other bits; '' if none."""
    max_rows, rows = blocks.most, blocks.rows
    sizes = [m - 3 * (m // rows - 1) % rows for m in range(rows, max_rows + 1, rows)]
    try:
        want = in_blocks(compute, blocks, *(x[:max_rows] for x in inputs))
        for number, n in enumerate([1, rows // 2 + 1, *sizes], 1):
            # The places of the rows change with their number.
            at = (torch.arange(n) + 13 * number) % max_rows
            if not _same_bits(in_blocks(compute, blocks, *(x[at] for x in inputs)), want[at]):
                return f"a row has other bits among {n} rows than among {max_rows}"
    except Exception as error:  # noqa: BLE001 - the model may be a user's own, and raise anything
        return f"the check of its rows failed with {type(error).__name__}"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def describe_inexact(blocks: Mapping[str, Blocks]) -> str:
    """Returns why rows of a party's models, {name: its blocks}, do not keep their bits; '' if all
    do.
    """
    return "; ".join(f"{name}: {own.why}" for name, own in blocks.items() if own.why)
