"""The description of a data set for ``vfl prepare``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.preparing.content import Content, ContentPart


@dataclass(frozen=True)
class Need:
    """A file or folder of a data set.

    Args:
        name: the published name.
        others: other possible names, such as the unpacked file's.
        bytes: its size, if published; for a folder, that of its archive.
        md5: its digest, if published.
        folder: whether it is a folder.
        optional: whether the data set can be read without it.
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
    """The choices for a data set, with its defaults filled in.

    Args:
        parties: the number of parties with features.
        active: the number of the one that has the labels, from 1.
        seed: the seed of all draws.
        deal: how rows are dealt to parties: ``even``, ``classes:N`` or ``dirichlet:ALPHA``.
        options: the data set's settings.
    """

    parties: int
    active: int = 1
    seed: int = 0
    deal: str = "even"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """A set of files that holds the data set, or a part of it.

    Args:
        needs: its files.
        read: reads them. It raises InputError for an invalid file.
        rows: {split, or ``""`` without splits: the published number of rows}.
        unofficial: what it is, if these are not the official files or not all of them.
    """

    needs: tuple[Need, ...]
    read: Callable[[Files, Request], Content]
    rows: Mapping[str, int] = field(default_factory=dict)
    unofficial: str | None = None


@dataclass(frozen=True)
class Division:
    """A way to divide a data set among parties.

    Args:
        says: a description, such as ``quarters of each image``.
        make: returns each party's part, the active party's first.
        parties: the possible numbers of parties; empty: any.
        aligned: whether the parties have the same rows.
        settings: the data set's settings that only this division reads.
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
        paper: its name, such as ``FedOnce``.
        where: its tables and figures.
        division: the name of the division.
        parties: the number of parties with features.
        recipe: the recipe's tables ``model`` and ``phases``, and keys of ``rows`` if they matter.
        deal: how rows are dealt, if they are.
        validation: the share of the training rows for validation.
        silent: what the paper does not say, and what is done instead.
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
    """A data set that ``vfl prepare`` knows.

    Args:
        title: its usual name.
        publisher: who publishes its files, and under which name.
        holds: what a row is, such as ``grey images of 28 × 28``.
        rows: the number of rows.
        task: the recipe's table ``task``.
        forms: the files it may be read from; the official ones come first.
        divisions: {name: division}.
        uses: the papers' uses; the first one is the default.
        memory: the memory that preparing needs, in words.
        options: {setting: (its default, what it means)}.
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
