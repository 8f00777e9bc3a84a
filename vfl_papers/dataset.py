"""The description of a data set for ``vfl prepare``, its rows, and each party's part of them.

Features are read in blocks, to save memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
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
# The fix in errors about official files.
AGAIN = "Download it again"


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


def compute_md5(path: Path) -> str:
    """Returns the MD5 digest of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        # MD5 only detects differences here, because the publishers give no other digest.
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


@dataclass(frozen=True)
class Need:
    """A file or folder of a data set.

    Args:
        name: The published name of the file or folder.
        others: Other possible names, such as the name of the unpacked file.
        bytes: The published size in bytes, if any; for a folder, the size of its archive.
        md5: The published MD5 digest, if any.
        folder: Whether this is a folder.
        optional: Whether the data set can be read without this file.
    """

    name: str
    others: tuple[str, ...] = ()
    bytes: int | None = None
    md5: str | None = None
    folder: bool = False
    optional: bool = False


# {official name of a file: its path}
Files = Mapping[str, Path]


@dataclass(frozen=True)
class Request:
    """The user's choices for dividing a data set, with defaults filled in.

    Args:
        parties: The number of parties with features.
        active: The number of the party with the labels, from 1.
        seed: The seed of all random draws.
        deal: The way to deal rows to parties: ``even``, ``classes:N`` or ``dirichlet:ALPHA``.
        options: The values of the data set's own settings.
    """

    parties: int
    active: int = 1
    seed: int = 0
    deal: str = "even"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """A form in which the data set is available: a set of files, and a function that reads them.

    Args:
        needs: The files of this form.
        read: A function that reads the files. It raises InputError for an invalid file.
        rows: {split: published number of rows}, with the key ``""`` if there are no splits.
        unofficial: A description of the files, if they are not the complete official files.
    """

    needs: tuple[Need, ...]
    read: Callable[[Files, Request], Content]
    rows: Mapping[str, int] = field(default_factory=dict)
    unofficial: str | None = None


@dataclass(frozen=True)
class Division:
    """A way to divide a data set among parties.

    Args:
        says: A description, such as ``quarters of each image``.
        make: A function that returns the part of each party, the active party first.
        parties: The possible numbers of parties; empty if any number is possible.
        aligned: Whether the parties have the same rows.
        settings: The names of the data set's settings that apply only to this division.
    """

    says: str
    make: Callable[[Content, Request], Sequence[ContentPart]]
    parties: tuple[int, ...] = ()
    aligned: bool = True
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperUse:
    """A paper's use of the data set.

    Args:
        paper: The name of the paper, such as ``FedOnce``.
        where: The tables and figures of the paper that use the data set.
        division: The name of the division.
        parties: The number of parties with features.
        recipe: The recipe's tables ``model`` and ``phases``, and optionally keys of ``rows``.
        deal: The way to deal rows to clients, for a division by rows.
        validation: The share of the training rows for validation.
        silent: Sentences about details that the paper does not specify, and the choice made here.
    """

    paper: str
    where: str
    division: str
    parties: int
    recipe: Mapping[str, Any]
    deal: str = "even"
    validation: float = 0.0
    silent: str = ""


@dataclass(frozen=True)
class DataSet:
    """A data set that ``vfl prepare`` supports.

    Args:
        title: The usual name of the data set.
        publisher: The publisher of the files, and the name under which they are published.
        holds: A description of the rows, such as ``grey images of 28 × 28``.
        rows: The number of rows.
        task: The recipe's table ``task``.
        forms: The sets of files that can be read; the official files come first.
        divisions: {name of a division: division}.
        uses: The uses of the data set by papers; the first use is the default.
        memory: The memory that ``vfl prepare`` needs for this data set, as text.
        options: {setting of the data set: (default, description)}.
    """

    title: str
    publisher: str
    holds: str
    rows: int
    task: Mapping[str, Any]
    forms: tuple[Form, ...]
    divisions: Mapping[str, Division]
    uses: tuple[PaperUse, ...]
    memory: str
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)

    @property
    def bytes(self) -> int | None:
        """The size of the official files; None if not all sizes are known."""
        sizes = [need.bytes for need in self.forms[0].needs if not need.optional]
        return sum(size for size in sizes if size is not None) if None not in sizes else None


def damage_error(source: object, problem: str) -> InputError:
    """Returns the error for an official file that differs from the published one."""
    return InputError(Code.FILE_INVALID, f"{source}: {problem}. {AGAIN}.")
