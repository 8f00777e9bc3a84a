"""Data sets of image files: a row is one image, or several, such as views of one object, of which
each party has one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from vfl_papers.dataset import (
    Block,
    Content,
    ContentPart,
    Division,
    Request,
    Rows,
    split_into_blocks,
)
from vfl_papers.dividing import make_parts
from vfl_papers.formats.pictures import PictureDecoder


class Pictured:
    """Collects rows of image files, which are decoded when a block is read.

    ``size``: the height and width of the images; ``single``: whether a row is one
    image, and has no views.
    """

    def __init__(self, size: int, *, single: bool = False) -> None:
        self._files: list[Sequence[Path]] = []
        self._labels: list[int] = []
        self._splits: list[str] = []
        self._ids: list[bytes] = []
        self._decoder, self._single = PictureDecoder(size), single

    def __len__(self) -> int:
        return len(self._files)

    def add(self, files: Sequence[Path], label: int, split: str, name: str) -> None:
        """Adds a row; ``name``: its id."""
        self._files.append(files)
        self._labels.append(label)
        self._splits.append(split)
        self._ids.append(name.encode())

    def content(
        self, classes: Sequence[str], split_says: str, notes: Sequence[str], differs: Sequence[str]
    ) -> Content:
        """Returns the rows that were added; the arguments are those of ``Content``."""
        return Content(
            labels=np.array(self._labels, np.int64),
            splits=np.array(self._splits, object),
            blocks=self._blocks,
            ids=np.array(self._ids),
            classes=tuple(classes),
            notes=tuple(notes),
            differs=tuple(differs),
            split_says=split_says,
            afterwards=self._decoder.notes,
        )

    def _blocks(self, rows: Rows) -> Iterator[Block]:
        """Yields blocks [n, H, W, 3], or [n, V, H, W, 3] of rows with V images."""
        for some in split_into_blocks(rows, len(self._files[0]) * self._decoder.bytes):
            flat = [path for row in some for path in self._files[row]]
            pixels = self._decoder.of(flat, flat)
            yield pixels if self._single else pixels.reshape(len(some), -1, *pixels.shape[1:])


def _view(number: int, block: Block) -> Block:
    return block[:, number]


def _views(_: Content, request: Request) -> list[ContentPart]:
    return make_parts(request, [partial(_view, number) for number in range(request.parties)])


def views(says: str, parties: tuple[int, ...]) -> Division:
    """Returns the division in which each party has one image of each row, in their order."""
    return Division(says, _views, parties)
