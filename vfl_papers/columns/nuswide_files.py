"""The files of NUS-WIDE (Chua et al. 2009): low-level features, tags and concepts of 269,648
images.

Features are numbers in ``.dat`` files, a line an image, between spaces; tags are 0 and 1 between
tabs; each concept has its own files of 0 and 1. The images of training come first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from vfl_papers.columns.official import (
    BYTE,
    FLOAT,
    ColumnFiles,
    FileTree,
    damage_error,
    file,
    join_columns,
    select_rows,
)
from vfl_papers.dataset import TEST, TRAIN, Array, Block, Need, Rows

FEATURES, TAGS, TRUTH = "NUS_WID_Low_Level_Features", "NUS_WID_Tags", "Groundtruth"
PUBLISHER = (
    "the National University of Singapore, LMS (search for NUS-WIDE), as three zip files of these "
    "names"
)
# {kind of feature: its numbers}: colour histogram, moments, correlogram, edges, wavelets.
VIEWS = {"CH": 64, "CM55": 225, "CORR": 144, "EDH": 73, "WT": 128}
TAG_COLUMNS = [f"tag{at}" for at in range(1, 1001)]
ROWS = {TRAIN: 161_789, TEST: 107_859}
_PARTS = {TRAIN: "Train", TEST: "Test"}


def needs(names: Sequence[str], *, packed: bool) -> tuple[Need, ...]:
    """Returns the files: zip files as they are published, or the folders in them."""
    return tuple(Need(f"{name}.zip") if packed else Need(name, folder=True) for name in names)


def of_view(view: str) -> list[str]:
    """Returns the columns of a kind of feature: ``ch1``, ``ch2`` and so on."""
    return [f"{view.lower()}{at}" for at in range(1, VIEWS[view] + 1)]


class Concepts:
    """The concepts that the images show. ``path``: the folder of the ground truth."""

    def __init__(self, path: Path) -> None:
        self._place = FileTree(path)

    @cached_property
    def names(self) -> list[str]:
        """The concepts, the one with the most images first. Raises InputError."""
        files = (Path(name).name for name in self._place.names)
        names = [
            name.removeprefix("Labels_").removesuffix("_Train.txt")
            for name in files
            if name.startswith("Labels_") and name.endswith("_Train.txt")
        ]
        if not names:
            raise damage_error(str(self._place.path), "holds no files Labels_…_Train.txt")
        counts = {name: sum(int(part.sum()) for part in self._each(name)) for name in names}
        return sorted(names, key=lambda name: (-counts[name], name))

    def read(self, names: Sequence[str]) -> tuple[npt.NDArray[np.bool_], Array]:
        """Returns whether each image shows each concept, [N, C], and the images' splits. Raises
        InputError.
        """
        parts = [self._each(name) for name in names]
        if len({tuple(map(len, part)) for part in parts}) > 1:
            raise damage_error(str(self._place.path), "has files with different numbers of rows")
        splits = np.repeat(np.array([*_PARTS], object), [*map(len, parts[0])])
        return np.stack([np.concatenate(part) for part in parts], axis=1) > 0, splits

    def _each(self, name: str) -> list[Array]:
        names = [f"Labels_{name}_{part}.txt" for part in _PARTS.values()]
        return _columns(self._place, names, ["shown"], BYTE).by_file("shown")


class ImageFeatures:
    """The low-level features of all images, and their tags if ``tags`` is given."""

    def __init__(self, features: Path, tags: Path | None = None) -> None:
        self._source, place = str(features), FileTree(features)
        self._tables = [
            _columns(
                place,
                [f"{part}_Normalized_{view}.dat" for part in _PARTS.values()],
                of_view(view),
                FLOAT,
            )
            for view in VIEWS
        ]
        if tags is not None:
            names = [f"{part}_Tags1k.dat" for part in _PARTS.values()]
            self._tables.append(_columns(FileTree(tags), names, TAG_COLUMNS, BYTE))

    def blocks(self, rows: Rows) -> Iterator[Block]:
        """Yields the features of images. Raises InputError."""
        whole = join_columns([table.batches() for table in self._tables], self._source)
        yield from select_rows(whole, rows, self._source)


def _columns(
    place: FileTree, files: Sequence[str], names: Sequence[str], kind: pa.DataType
) -> ColumnFiles:
    layout = {"format": "text", "separator": "whitespace", "names": tuple(names)}
    sources = tuple(file(place.source(name), **layout) for name in files)
    return ColumnFiles(sources, dict.fromkeys(names, kind))
