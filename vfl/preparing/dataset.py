"""How a data set describes itself to ``vfl prepare``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vfl.preparing.content import Content, Part


@dataclass(frozen=True)
class Need:
    """A file or folder that a data set is read from.

    Args:
        name: as its makers publish it.
        others: other names under which it may lie, such as the unpacked file's.
        bytes: its size, if it is published; of a folder, that of its archive.
        md5: its digest, if it is published.
        folder: whether it is a folder.
        optional: whether the data set can be read without it.
    """

    name: str
    others: tuple[str, ...] = ()
    bytes: int | None = None
    md5: str | None = None
    folder: bool = False
    optional: bool = False


# {the official name of a need: where it lies}.
Files = Mapping[str, Path]


@dataclass(frozen=True)
class Request:
    """What a person asks of ``vfl prepare``, with the data set's defaults filled in.

    Args:
        parties: how many parties have features.
        active: which of them has the labels, from 1.
        seed: of everything that is drawn.
        deal: how whole rows are dealt to parties: ``even``, ``classes:N`` or ``dirichlet:ALPHA``.
        options: the data set's own settings.
    """

    parties: int
    active: int = 1
    seed: int = 0
    deal: str = "even"
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Form:
    """A set of files that is the data set, or a part of it.

    Args:
        needs: its files.
        read: reads them. It raises InputError if a file is not what its name says.
        rows: {split, or ``""`` without splits: how many rows its makers publish}.
        unofficial: what it is, if these are not its makers' files or not all of them.
    """

    needs: tuple[Need, ...]
    read: Callable[[Files, Request], Content]
    rows: Mapping[str, int] = field(default_factory=dict)
    unofficial: str | None = None


@dataclass(frozen=True)
class Division:
    """A way to divide a data set among parties.

    Args:
        says: in words, such as ``quarters of each image``.
        make: returns each party's part, the active party's first.
        parties: the numbers of parties that are possible; none given: any.
        aligned: whether the parties have the same rows, and not rows of their own.
        settings: those of the data set's settings that no other division reads.
    """

    says: str
    make: Callable[[Content, Request], Sequence[Part]]
    parties: tuple[int, ...] = ()
    aligned: bool = True
    settings: tuple[str, ...] = ()


@dataclass(frozen=True)
class PaperUse:
    """What a paper does with the data set.

    Args:
        paper: its name, such as ``FedOnce``.
        where: its tables and figures.
        division: the name of the division.
        parties: how many parties have features.
        recipe: the recipe's tables ``model`` and ``phases``, and keys of ``rows`` if they matter.
        deal: how whole rows are dealt, if they are.
        validation: the share of the training rows that is set apart for validation.
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
        publisher: who publishes its files, and under which name they are found.
        holds: what a row is, such as ``grey images of 28 × 28``.
        rows: how many there are.
        task: the recipe's table ``task``.
        forms: the files it may be read from; the official ones come first.
        divisions: {name: how it may be divided}.
        uses: the papers' uses; the first one is the default.
        memory: the memory that preparing needs, in words.
        options: {the data set's own setting: (its default, what it means)}.
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
        sizes = [each.bytes for each in self.forms[0].needs if not each.optional]
        return sum(size for size in sizes if size is not None) if None not in sizes else None
