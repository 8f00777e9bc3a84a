"""Computes rows in blocks, so that the result for a row does not depend on the other rows.

Libraries choose a kernel by the number of rows, vectorised loops end in scalar code, and large
operations are split between threads. No library promises that the result for a row is the same in
every bit, so ``find_blocks`` runs a model at every number of rows that its blocks allow. The
finding is valid for one model on one machine with the same environment variables and number of
threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# The number of rows in a block of vectors. Vectorised loops over a multiple of 32 rows have no
# scalar end, and MKL in STRICT mode multiplies any multiple of 32 rows in the same way.
ROWS = 32
# The maximum number of rows computed at once. torch uses one thread for elementwise operations of
# up to 32,768 numbers, which is 64 numbers for each row. This also keeps the check short.
_MAX = 512
# Blocks of images are smaller, because a request for one large image takes three times as long in a
# block of 32 as in a block of 8.
_IMAGES, _MAX_IMAGES, _SMALL_IMAGE = 8, 32, 64
# A GPU needs many rows at once. Results on a GPU are not checked.
_MAX_GPU = 1024
# If the result depends on the number of rows, all blocks have exactly this number. MKL limited to
# AVX2 computes every row of a block of 64 in the same way, but not every row of a block of 32.
_CONSTANT = 64

Compute = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]


@dataclass(frozen=True)
class Blocks:
    """The number of rows that a model computes at once: a multiple of ``rows``, at most ``most``.

    ``why``: The reason why the result for a row still depends on other rows. '' if it does not, or
    if the model was not checked.
    """

    rows: int
    most: int
    why: str = ""

    @classmethod
    def by_shape(cls, x: Tensor) -> Blocks:
        """Returns the default blocks for inputs ``x``, [N, F] or images [N, C, H, W]."""
        if x.device.type != "cpu":
            return cls(ROWS, _MAX_GPU)
        return cls(_IMAGES, _MAX_IMAGES) if _are_large(x.shape[1:]) else cls(ROWS, _MAX)


def in_blocks(compute: Compute, blocks: Blocks | None, *inputs: Tensor) -> Tensor:
    """Returns ``compute(*inputs)``, [N, …], computed in whole blocks.

    The last row is repeated to fill the last block. ``inputs`` are tensors [N, …]. The default of
    ``blocks`` is ``Blocks.by_shape``.
    """
    n, blocks = len(inputs[0]), blocks or Blocks.by_shape(inputs[0])
    if not n:
        return compute(*inputs)
    if missing_rows := -n % blocks.rows:
        inputs = tuple(torch.cat([x, x[-1:].expand(missing_rows, *x.shape[1:])]) for x in inputs)
    chunks = zip(*(torch.split(x, blocks.most) for x in inputs), strict=True)
    outputs = [compute(*chunk) for chunk in chunks]
    return (outputs[0] if len(outputs) == 1 else torch.cat(outputs))[:n]


def sample_rows(shape: Sequence[int]) -> int:
    """Returns the number of rows that ``find_blocks`` needs of an input with rows of this shape."""
    return _CONSTANT if _are_large(shape) else _MAX


def _are_large(shape: Sequence[int]) -> bool:
    return len(shape) == 3 and math.prod(shape) > _SMALL_IMAGE


def find_blocks(compute: Compute, samples: Sequence[Inputs]) -> Blocks:
    """Finds blocks for a model in which the result for a row does not depend on the other rows.

    It runs the model at every number of rows, first with the default blocks and then with blocks of
    one constant size. If the results depend on other rows in both cases, ``why`` gives the reason.

    ``samples``: Inputs of ``sample_rows`` rows, one sample for each shape that the model takes.
    """
    default = Blocks.by_shape(samples[0][0])
    if samples[0][0].device.type != "cpu":
        return replace(
            default, why=f"computed on {samples[0][0].device}, where rows are not checked"
        )
    why = ""
    for blocks in (default, Blocks(_CONSTANT, _CONSTANT)):
        differences = (_describe_difference(compute, blocks, inputs) for inputs in samples)
        why = next(filter(None, differences), "")
        if not why:
            return blocks
    return replace(default, why=why)


def _describe_difference(compute: Compute, blocks: Blocks, inputs: Inputs) -> str:
    """Describes the first number of rows at which the result for a row differs, or returns ''."""
    max_rows, rows = blocks.most, blocks.rows
    sizes = [m - 3 * (m // rows - 1) % rows for m in range(rows, max_rows + 1, rows)]
    try:
        expected = in_blocks(compute, blocks, *(x[:max_rows] for x in inputs))
        for number, n in enumerate([1, rows // 2 + 1, *sizes], 1):
            # Each number of rows puts the rows at other positions of the batch.
            indices = (torch.arange(n) + 13 * number) % max_rows
            if not _same_bits(
                in_blocks(compute, blocks, *(x[indices] for x in inputs)), expected[indices]
            ):
                return f"a row has other bits among {n} rows than among {max_rows}"
    except Exception as error:  # noqa: BLE001 - a user's model may raise any exception
        return f"the check of its rows failed with {type(error).__name__}"
    return ""


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def describe_inexact(blocks: Mapping[str, Blocks]) -> str:
    """Describes the models of a party whose results for a row depend on other rows.

    ``blocks``: {name of a model: its blocks}. Returns '' if there is no such model.
    """
    return "; ".join(
        f"{name}: {model_blocks.why}" for name, model_blocks in blocks.items() if model_blocks.why
    )
