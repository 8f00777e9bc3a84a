"""What a data set's reader gives, and what of it each party gets. Rows come in blocks, so that
little is in memory at once.
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
# Bytes of images that are in memory at once, beside what a reader needs.
BLOCK_BYTES = 32 * 2**20
# Rows of columns that are in memory at once.
BLOCK_ROWS = 65_536
TRAIN, VALIDATION, TEST = "train", "validation", "test"


@dataclass(frozen=True)
class Content:
    """A data set's rows, whose features are read later.

    Args:
        labels: [N] class numbers from 0, or numbers of a regression.
        splits: [N] of ``train`` and ``test``, as its makers say; None if they say nothing.
        blocks: yields the features of rows, which are given as increasing numbers, in blocks.
        ids: [N] texts; the row's number if None.
        classes: the names of the classes, in the order of their numbers; none for a regression.
        groups: [N] who a row is of, such as a patient, if that matters for dividing rows.
        notes: sentences about what the reader has left out or changed.
        differs: sentences about what differs from what the makers publish.
        split_says: who has divided the rows into ``splits``.
        afterwards: returns more such sentences, when all blocks have been read.
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
class Part:
    """What one party gets.

    Args:
        name: the party's.
        pick: takes its features out of a block; None for a party without features.
        rows: the numbers of its rows, increasing; None for all rows that are used.
        label: whether it has the labels; it is the active party.
        settings: keys of its ``[data]`` beside source, id, label and split.
        encoder: of the party, if it has one of its own.
    """

    name: str
    pick: Callable[[Block], Block] | None
    rows: Rows | None = None
    label: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    encoder: dict[str, Any] | None = None


def blocks_of(images: Array) -> Callable[[Rows], Iterator[Block]]:
    """Returns what yields blocks of images that are in memory or mapped; ``images``: [N, …]."""

    def blocks(rows: Rows) -> Iterator[Block]:
        for some in in_blocks(rows, images[:1].nbytes):
            yield images[some]

    return blocks


def in_blocks(rows: Rows, row_bytes: int) -> Iterator[Rows]:
    """Yields rows in blocks of at most ``BLOCK_BYTES``, if one has so many bytes."""
    step = max(1, BLOCK_BYTES // max(1, row_bytes))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def default_ids(n: int) -> Array:
    """Returns row numbers from 0 as ids, with leading zeros, so that they sort in the rows'
    order.
    """
    width = len(str(max(n - 1, 0)))
    return np.char.zfill(np.arange(n).astype(f"S{width}"), width)


def require_classes(content: Content, task: Mapping[str, Any]) -> None:
    """Raises InputError if a label is no class of the recipe's ``task``."""
    classes = {"binary": 2, "multiclass": task.get("classes", 0)}.get(task["kind"])
    if classes is None or content.labels.dtype.kind not in "iu":
        return
    wrong = (content.labels < 0) | (content.labels >= classes)
    if wrong.any():
        at = int(wrong.argmax())
        text = f"{int(wrong.sum()):,} rows have a label that is no class from 0 to {classes - 1}"
        text = f"{text}: the first is row {at + 1:,}, with {content.labels[at]}"
        raise InputError(Code.FILE_INVALID, f"{text}; get the files from their makers again")
