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
