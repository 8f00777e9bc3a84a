"""The rows of a data set, and each party's part of them. Features are read in blocks to save
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from vfl_common.errors import Code, InputError

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.int64]
# An array of images, [n, H, W] or [n, H, W, C], or several views of each, [n, V, H, W, C]; or an
# Arrow table of columns.
Block: TypeAlias = Any
# The maximum size of a block of images, in bytes.
BLOCK_BYTES = 32 * 2**20
# The maximum number of rows in a block of columns.
BLOCK_ROWS = 65_536
TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True)
class Content:
    """The rows of a data set. Their features are read later, in blocks.

    Args:
        labels: [N] The labels: class numbers from 0, or the numbers to predict in a regression.
        splits: [N] The published split of each row, ``train`` or ``test``; None if the publisher
            defines no splits.
        blocks: A function that takes increasing row numbers and yields their features in blocks.
        ids: [N] The id of each row as text; None to use row numbers as ids.
        classes: The names of the classes, in the order of their numbers; empty for a regression.
        groups: [N] The group of each row, such as a patient, for divisions that keep groups
            together.
        notes: Sentences about rows or columns that the reader left out or changed.
        differs: Sentences about differences from the published files.
        split_says: A sentence about the origin of ``splits``.
        afterwards: A function that returns more notes after all blocks have been read.
    """

    labels: Array
    splits: Array | None
    blocks: Callable[[Rows], Iterator[Block]]
    ids: Array | None = None
    classes: tuple[str, ...] = ()
    groups: Array | None = None
    notes: tuple[str, ...] = ()
    differs: tuple[str, ...] = ()
    split_says: str = "The makers' split is kept"
    afterwards: Callable[[], Sequence[str]] = tuple

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class ContentPart:
    """The part of a data set that one party gets.

    Args:
        name: The name of the party.
        pick: A function that selects the party's features from a block; None for a party without
            features.
        rows: The numbers of the party's rows, increasing; None for all rows that are used.
        label: Whether the party has the labels, as the active party.
        settings: Keys of the party's ``[data]`` besides source, id, label and split.
        encoder: The settings of the party's own encoder; None to use the recipe's encoder.
    """

    name: str
    pick: Callable[[Block], Block] | None
    rows: Rows | None = None
    label: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] | None = None


def blocks_of(images: Array) -> Callable[[Rows], Iterator[Block]]:
    """Returns a function that yields blocks of an array of images. ``images``: [N, …]."""

    def blocks(rows: Rows) -> Iterator[Block]:
        for block_rows in split_into_blocks(rows, images[:1].nbytes):
            yield images[block_rows]

    return blocks


def split_into_blocks(rows: Rows, row_bytes: int) -> Iterator[Rows]:
    """Splits row numbers into blocks of at most ``BLOCK_BYTES``.

    ``row_bytes``: The size of a row.
    """
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def default_ids(n: int) -> Array:
    """Returns row numbers as ids, from 0, with leading zeros so that ids sort in row order."""
    width = len(str(max(n - 1, 0)))
    return np.char.zfill(np.arange(n).astype(f"S{width}"), width)


def require_classes(content: Content, task: Mapping[str, Any]) -> None:
    """Raises InputError if a label is not one of the classes of the recipe's ``task``."""
    classes = {"binary": 2, "multiclass": task.get("classes", 0)}.get(task["kind"])
    if classes is None or content.labels.dtype.kind not in "iu":
        return
    wrong = (content.labels < 0) | (content.labels >= classes)
    if wrong.any():
        row = int(wrong.argmax())
        raise InputError(
            Code.FILE_INVALID,
            f"{int(wrong.sum()):,} rows have a label outside the classes 0 to {classes - 1} "
            f"(got {content.labels[row]} in row {row + 1:,}). Download the files again.",
        )
