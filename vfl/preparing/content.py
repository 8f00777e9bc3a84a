"""The content of a data set, and each party's part of it. Rows come in blocks, so that little is in
memory at once.
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
# The size of the images that are in memory at once, in bytes, without what a reader needs.
BLOCK_BYTES = 32 * 2**20
# The number of rows of columns that are in memory at once.
BLOCK_ROWS = 65_536
TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True)
class Content:
    """A data set's rows, whose features are read later.

    Args:
        labels: [N] class numbers from 0, or numbers of a regression.
        splits: [N] of ``train`` and ``test``, as published; None if not published.
        blocks: yields the features of rows, in blocks; takes increasing row numbers.
        ids: [N] texts; the row's number if None.
        classes: the names of the classes, in the order of their numbers; none for a regression.
        groups: [N] the group of each row, such as a patient, if that matters for dividing rows.
        notes: sentences about what the reader has left out or changed.
        differs: sentences about differences from the published files.
        split_says: a sentence about the origin of ``splits``.
        afterwards: returns more notes, when all blocks have been read.
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
    """One party's part.

    Args:
        name: the party's.
        pick: takes the party's features out of a block; None for a party without features.
        rows: the numbers of its rows, increasing; None for all rows that are used.
        label: whether it has the labels, as the active party.
        settings: other keys of its ``[data]`` than source, id, label and split.
        encoder: the party's own encoder; None for the recipe's.
    """

    name: str
    pick: Callable[[Block], Block] | None
    rows: Rows | None = None
    label: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] | None = None


def blocks_of(images: Array) -> Callable[[Rows], Iterator[Block]]:
    """Returns a function that yields blocks of images in memory or mapped. ``images``: [N, …]."""

    def blocks(rows: Rows) -> Iterator[Block]:
        for some in in_blocks(rows, images[:1].nbytes):
            yield images[some]

    return blocks


def in_blocks(rows: Rows, row_bytes: int) -> Iterator[Rows]:
    """Yields rows in blocks of at most ``BLOCK_BYTES``. ``row_bytes``: the size of a row."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def default_ids(n: int) -> Array:
    """Returns row numbers from 0 as ids, with leading zeros so that they sort by row."""
    width = len(str(max(n - 1, 0)))
    return np.char.zfill(np.arange(n).astype(f"S{width}"), width)


def require_classes(content: Content, task: Mapping[str, Any]) -> None:
    """Raises InputError if a label is not a class of the recipe's ``task``."""
    classes = {"binary": 2, "multiclass": task.get("classes", 0)}.get(task["kind"])
    if classes is None or content.labels.dtype.kind not in "iu":
        return
    wrong = (content.labels < 0) | (content.labels >= classes)
    if wrong.any():
        at = int(wrong.argmax())
        raise InputError(
            Code.FILE_INVALID,
            f"{int(wrong.sum()):,} rows have a label outside the classes 0 to {classes - 1} "
            f"(got {content.labels[at]} in row {at + 1:,}). Download the files again.",
        )
