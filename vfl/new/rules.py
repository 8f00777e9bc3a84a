"""Reads a party's table in the same way as a run does, so that the new files are valid for a run.

The rules for the defaults of ``vfl new`` are pure functions of names, counts and texts.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, Literal, cast, get_args

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from vfl_common.config.data import DataSettings
from vfl_common.config.task import class_text
from vfl_common.errors import Code, InputError
from vfl_party.data import Table, first_rows, load_table, read_rows, tabulate
from vfl_party.data.checks import count_cells
from vfl_party.data.notes import find_smells, find_target_leakage
from vfl_party.data.table import Columns, Rows, count_words

Kind = Literal["binary", "multiclass", "regression"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# {value of the label: number of rows}
Counts = Mapping[str | float, int]
# The maximum number of integer classes. A label with more different numbers is a quantity.
MAX_NUMBERED = 20
MAX_CLASSES = 100
# The minimum average number of rows of a class or a category.
ROWS_A_CLASS = 10
# Up to this number of different texts, a column always has categories, even with few rows.
FEW = 50
# The minimum share of different values in a column with the name of an id.
ALMOST_ALL = 0.9
# The maximum number of ids whose spelling is checked.
_LOOKED_AT = 10_000
_PEOPLE = {
    "account",
    "client",
    "contract",
    "customer",
    "member",
    "patient",
    "person",
    "policy",
    "user",
    "kunde",
    "kunden",
}
_NUMBERS = {
    "code",
    "email",
    "iban",
    "id",
    "ids",
    "key",
    "mail",
    "no",
    "nr",
    "num",
    "number",
    "nummer",
    "phone",
    "ssn",
}


_NUMBERS |= {"idx", "kdnr", "knr", "kundennr", "kundennummer", "pid", "uid", "uuid"}


_LABELS = {"class", "churn", "churned", "default", "label", "outcome", "target", "y"}
_DECIMAL = re.compile(r"\s*[-+]?\d*[.,]\d+\s*")


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of the model and the training for a number of rows.

    ``hidden``, ``top``: the widths of the hidden layers of an encoder and of the top model.
    ``validation``: the share of rows for early stopping.
    """

    hidden: int
    embedding_size: int
    top: int
    batch_size: int
    epochs: int
    patience: int
    validation: float


# (upper bound of the active party's rows, sizes). With more rows, layers are wider, batches larger
# and epochs fewer. Early stopping may end training before the last epoch.
_SIZES: tuple[tuple[int, ModelSizes], ...] = (
    (1_000, ModelSizes(32, 8, 32, batch_size=32, epochs=200, patience=20, validation=0.2)),
    (10_000, ModelSizes(64, 16, 64, batch_size=64, epochs=100, patience=12, validation=0.15)),
    (100_000, ModelSizes(64, 16, 64, batch_size=256, epochs=60, patience=8, validation=0.1)),
    (1_000_000, ModelSizes(128, 32, 64, batch_size=1024, epochs=30, patience=5, validation=0.1)),
)
_MANY = ModelSizes(128, 32, 64, batch_size=4096, epochs=15, patience=3, validation=0.05)


def choose_sizes(rows: int) -> ModelSizes:
    """Returns the sizes of the model and the training for a table of ``rows`` rows."""
    return next((sizes for below, sizes in _SIZES if rows < below), _MANY)


def compute_min_common_rows(rows: int) -> int:
    """Returns the minimum number of common rows: a tenth of the active party's, from 10 to 100."""
    return max(10, min(100, rows // 10))


@dataclass(frozen=True)
class Task:
    """The prediction task.

    ``classes``: the number of classes of a multiclass task. ``positive``: the positive class of a
    binary task, if chosen.
    """

    kind: Kind
    classes: int | None = None
    positive: str | int | float | None = None


def choose_task(counts: Counts, what: str, name: str, wanted: str | None = None) -> Task:
    """Returns the prediction task for the values of a label.

    Args:
        counts: the number of rows of each value.
        what: the file and the column, for errors.
        name: the column's name.
        wanted: the kind of the task; None: guess it.

    Raises InputError if the label cannot be learnt, or does not fit the kind ``wanted``.
    """
    values, rows = len(counts), sum(counts.values())
    if values == 1:
        raise _make_error(
            f"{what}: has the same value in all rows, so there is nothing to learn. Name "
            "another column."
        )
    has_text = any(isinstance(value, str) for value in counts)
    if wanted == "binary":
        _refuse_similar(counts, what)
    if wanted is not None:
        return _make_wanted_task(wanted, values, has_text, what)
    if values == 2:
        _refuse_similar(counts, what)
        return Task("binary")
    if has_text:
        if values > MAX_CLASSES or rows < 2 * values:
            raise _make_error(
                f"{what}: looks like an id or free text (got {values:,} different texts in "
                f"{rows:,} rows). Name another column, or give --task multiclass if these are "
                "classes."
            )
        _refuse_similar(counts, what)
        return Task("multiclass", values)
    numbers = cast(Iterable[float], counts)
    are_integers = all(float(value).is_integer() for value in numbers)
    if (
        are_integers
        and values == rows
        and (looks_like_id(name) or max(numbers) - min(numbers) == rows - 1)
    ):
        raise _make_error(
            f"{what}: looks like an id, with a different integer in each row. Name another "
            "column, or give --task regression if it is a quantity."
        )
    if are_integers and values <= MAX_NUMBERED and rows >= ROWS_A_CLASS * values:
        return Task("multiclass", values)
    return Task("regression")


def set_positive(task: Task, counts: Counts, what: str, wanted: str | None) -> Task:
    """Returns the task with the positive class ``wanted``; None: the unchanged task.

    ``what``: the file and the column, for errors. Raises InputError if the task is not binary, or
    the label has no such value.
    """
    if wanted is None:
        return task
    if task.kind != "binary":
        raise _make_error(
            f"{what}: the task is {task.kind}, but --positive needs a binary task. Remove "
            "--positive."
        )
    positive = next((value for value in counts if class_text(value) == wanted.strip()), None)
    if positive is None:
        raise _make_error(f"{what}: has no value {wanted!r}. Correct --positive.")
    is_integer = isinstance(positive, float) and positive.is_integer()
    return replace(task, positive=int(positive) if is_integer else positive)


def _refuse_similar(counts: Counts, what: str) -> None:
    """Raises InputError if values differ only by case or blanks, which is usually a mistake."""
    texts = [value for value in counts if isinstance(value, str)]
    if len({" ".join(text.casefold().split()) for text in texts}) < len(texts):
        raise _make_error(
            f"{what}: has values that differ only by case or blanks. Write them the same way, "
            "or give --task multiclass if they are different classes."
        )


def _make_wanted_task(wanted: str, values: int, text: bool, what: str) -> Task:
    if wanted == "binary" and values != 2:
        raise _make_error(
            f"{what}: a binary task needs two different values (got {values:,}). Give another "
            "--task."
        )
    if wanted == "regression" and text:
        raise _make_error(
            f"{what}: holds text, but a regression needs numbers. Give another --task."
        )
    return Task(cast(Kind, wanted), values if wanted == "multiclass" else None)


def make_rows_table(
    rows: int, task: Task, align: str, id_rules: tuple[str, ...], *, label_free: bool
) -> dict[str, Any]:
    """Returns the recipe's table ``[rows]``. Splits are stratified for a classification, unless no
    message may depend on labels (``label_free``).
    """
    table: dict[str, Any] = (
        {"align": "psi", "at_least": compute_min_common_rows(rows)} if align == "psi" else {}
    )
    table |= {"id_rules": list(id_rules), "validation": choose_sizes(rows).validation}
    # The other parties can compute the order of a stratified split from the recipe's seed, so the
    # split reveals labels.
    at_random = label_free or task.kind == "regression"
    return table if at_random else table | {"split": "stratified"}


@dataclass(frozen=True)
class Values:
    """The values of an id of one or several columns: the number of rows, and the different values
    as text.
    """

    rows: int
    different: Sequence[str]

    @property
    def share(self) -> float:
        """The number of different values divided by the number of rows."""
        return len(self.different) / self.rows


@dataclass(frozen=True)
class IdGuess:
    """A guess of the id column. ``name``: the likely column; '' for no guess. ``sure``: whether the
    user need not be asked. ``others``: other possible columns.
    """

    name: str
    sure: bool
    others: tuple[str, ...] = ()


def guess_id(names: Sequence[str], values: Callable[[str], Values | None]) -> IdGuess:
    """Guesses the id column: a column with the name of an id and (almost) unique values.

    With several such columns, the guess is the first, and is unsure. Without such a column, the
    guess is the first column with unique values, and is unsure. Decimal numbers are not ids.
    ``values``: reads a column, and returns None if it cannot be an id.
    """
    candidates = [
        name for name in names if looks_like_id(name) and _is_unique(values(name), ALMOST_ALL)
    ]
    if candidates:
        return IdGuess(candidates[0], len(candidates) == 1, tuple(candidates[1:]))
    unique = [name for name in names if _is_unique(values(name), 1.0)]
    return IdGuess(unique[0], False, tuple(unique[1:])) if unique else IdGuess("", False)


def _is_unique(values: Values | None, share: float) -> bool:
    if values is None or values.share < share:
        return False
    return not any(_DECIMAL.fullmatch(text) for text in values.different[:_LOOKED_AT])


def looks_like_id(name: str) -> bool:
    """Returns whether a column has the name of an id, such as ``customer``, ``client_no`` or
    ``PatientID``, but not ``customer_age``.
    """
    words = re.findall(r"[^\W\d_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).casefold())
    return bool(words) and (words[-1] in _NUMBERS or all(word in _PEOPLE for word in words))


def guess_label(names: Sequence[str], few: Sequence[str]) -> str:
    """Returns the proposed label: a column with the name of a label, or the only column with few
    values (``few``); '' if there is none.
    """
    by_name = next((name for name in reversed(names) if name.casefold() in _LABELS), "")
    return by_name or (few[0] if len(few) == 1 else "")


def choose_id_rules(ids: Sequence[str]) -> tuple[str, ...]:
    """Returns rules that normalise ids, chosen by the spelling of the ids.

    E-mail addresses get ``email``. Other ids get ``trim``, ``nfkc`` if they have characters outside
    ASCII, and ``casefold`` if they have letters, because the other parties may write them with
    other blanks or case.
    """
    sample = ids[:_LOOKED_AT]
    if sum("@" in text for text in sample) > len(sample) / 2:
        return ("email",)
    rules = ["trim"]
    if not all(text.isascii() for text in sample):
        rules.insert(0, "nfkc")
    if any(letter.isalpha() for text in sample for letter in text):
        rules.append("casefold")
    return tuple(rules)


def is_useless_text(values: Values | None) -> bool:
    """Returns whether a column of text has too many different values to be categories, such as
    names, addresses or notes.
    """
    return values is not None and len(values.different) > max(FEW, values.rows / ROWS_A_CLASS)


def is_id_number(name: str, values: Callable[[str], Values | None]) -> bool:
    """Returns whether a column of numbers is an id, by its name and unique values."""
    return looks_like_id(name) and _is_unique(values(name), 1.0)


def make_recipe_name(label: str, parties: Sequence[str]) -> str:
    """Returns a name for a recipe and its runs: the parties (the first of more than three) and the
    label.
    """
    words = [*parties[: 3 if len(parties) <= 3 else 1], label]
    name = "-".join(re.sub(r"[^A-Za-z0-9]+", "-", word).strip("-") for word in words)
    return name.strip("-")[:60].strip("-")


def _make_error(text: str) -> InputError:
    return InputError(Code.DATA_INVALID, text)


# The number of first rows in which different values are counted to propose a label.
SAMPLE = 10_000
# A function that reads the columns of an id; returns None if the columns cannot be an id.
Read = Callable[[tuple[str, ...]], Values | None]


@dataclass(frozen=True)
class Look:
    """The contents of a table.

    rows: the number of rows with a label and a unique id. all_rows: the number of rows in the
    source. left_out: a text about the rows that are left out. repeated, unlabelled: the number of
    rows with a repeated id, and without a label. numbers, categories: the names of the feature
    columns. drop: {column: the reason why it is left out}. missing: the numeric columns with
    missing cells. blank: the categorical columns with missing cells. ids: the ids after the id
    rules. notes: the guesses of the table reader. odd: texts about possible mistakes. label_leaks:
    texts about columns that reveal the label, if it has classes. labels: {value of the label:
    number of rows}; empty if no label was read.
    """

    rows: int
    all_rows: int
    left_out: str
    repeated: int
    unlabelled: int
    numbers: tuple[str, ...]
    categories: tuple[str, ...]
    missing: tuple[str, ...]
    blank: tuple[str, ...]
    ids: Sequence[str] = field(repr=False)
    notes: tuple[str, ...] = ()
    odd: tuple[str, ...] = ()
    label_leaks: tuple[str, ...] = ()
    drop: dict[str, str] = field(default_factory=dict)
    labels: Counts = field(default_factory=dict)


def make_reader(table: DataSettings) -> Read:
    """Returns a function that reads columns of a table, with a cache."""
    return cache(lambda names: _values(table, names))


def _values(table: DataSettings, names: tuple[str, ...]) -> Values | None:
    """Reads columns as an id. Returns None if they cannot be an id. Raises InputError for an
    unreadable file.
    """
    try:
        return read_values(table, names)
    except InputError as error:
        if error.code != Code.DATA_INVALID:
            raise
        return None


def read_values(table: DataSettings, names: tuple[str, ...]) -> Values:
    """Reads columns as an id. Raises InputError if they cannot be an id."""
    id_settings: dict[str, Any] = {
        "id": names,
        "columns": (),
        "numeric": (),
        "categorical": (),
        "duplicates": "first",
    }
    rows = load_table(table.model_copy(update=id_settings), with_label=False)
    return Values(rows.counts.rows if rows.counts is not None else len(rows), rows.ids)


def find_label_candidates(table: DataSettings, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the columns with two to twenty different values in the first rows; empty if the rows
    cannot be read.
    """
    columns: list[str] = []
    with contextlib.suppress(InputError, pa.ArrowNotImplementedError):
        for name, column in first_rows(table, names, SAMPLE).items():
            values = pc.unique(pc.drop_null(column))
            if 2 <= len(values) <= MAX_NUMBERED:
                columns.append(name)
    return tuple(columns)


def inspect_table(
    source: DataSettings,
    id_: tuple[str, ...],
    rules: tuple[str, ...],
    values: Callable[[str], Values | None],
    *,
    label: str | None = None,
    drop: Sequence[str] = (),
    max_categories: int | None = None,
) -> Look:
    """Reads a table as a run does, and returns its contents.

    Args:
        source: the data settings of the table.
        id_: the id columns.
        rules: the recipe's rules for ids.
        values: a function that reads a single column; see ``make_reader``.
        label: the label column, for the active party.
        drop: the columns to leave out.
        max_categories: the maximum number of categories of a column, including missing cells; None
            for no maximum.

    Raises InputError.
    """
    columns: dict[str, Any] = {"id": id_, "id_rules": rules, "label": label, "drop": tuple(drop)}
    lenient = {"duplicates": "first", "missing": "mean", "unlabelled": "drop"}
    settings = source.model_copy(update=columns | lenient)
    rows = read_rows(settings, label is not None)
    odd = list(find_smells(rows, settings))
    table = tabulate(rows, settings, label is not None)
    mostly = {smell.column: smell.mostly for smell in odd if smell.mostly}
    useless, chosen_by_user = (
        dict.fromkeys(drop, "as you say"),
        {*settings.categorical, *settings.numeric},
    )
    for name in table.categorical_names:
        if name not in chosen_by_user and is_useless_text(values(name)):
            kind = mostly.get(name)
            useless[name] = (
                f"most cells are {kind}, but some cannot be read"
                if kind
                else "too many different texts"
            )
    counts = _count_categories(table)
    for name, cells in counts.items():
        if (
            max_categories is not None
            and np.count_nonzero(cells) > max_categories
            and name not in {*chosen_by_user, *useless}
        ):
            useless[name] = f"more than {max_categories} different texts, the maximum for trees"
    for name in table.numeric_names:
        if name not in chosen_by_user and is_id_number(name, values):
            useless[name] = "looks like an id"
    useless |= dict.fromkeys(
        (name for name in _find_missing(rows, all_rows=True) if name not in chosen_by_user),
        "empty in all rows",
    )
    return Look(
        rows=len(table),
        all_rows=len(rows),
        left_out=table.counts.left_out if table.counts is not None else "",
        repeated=table.counts.repeated if table.counts is not None else 0,
        unlabelled=table.counts.unlabelled if table.counts is not None else 0,
        numbers=tuple(name for name in table.numeric_names if name not in useless),
        categories=tuple(name for name in table.categorical_names if name not in useless),
        missing=tuple(name for name in _find_missing(rows) if name not in useless),
        blank=tuple(name for name, cells in counts.items() if cells[-1] and name not in useless),
        ids=table.ids,
        notes=table.notes,
        odd=tuple(smell.text for smell in odd if smell.mostly or smell.column not in useless),
        label_leaks=tuple(
            leak.text
            for leak in find_target_leakage(rows, label or "")
            if leak.column not in useless
        ),
        drop=useless,
        labels=_count_labels(table),
    )


def _find_missing(rows: Rows, *, all_rows: bool = False) -> tuple[str, ...]:
    """Returns the numeric columns with missing cells, in all rows of the source.

    ``all_rows``: whether to return only columns in which all cells are missing.
    """
    if not isinstance(rows.features, Columns):
        return ()
    cells, names = count_cells(rows.features.numeric_NF, np.isnan), rows.features.numeric_names
    return tuple(names[k] for k in cells.columns if not all_rows or cells.counts[k] == len(rows))


def _count_categories(table: Table) -> dict[str, npt.NDArray[np.int64]]:
    """Returns {categorical column: the number of cells of each category, and last of missing
    cells}.
    """
    words = table.categorical
    return (
        {}
        if words is None
        else {name: count_words(words, k) for k, name in enumerate(table.categorical_names)}
    )


def _count_labels(table: Table) -> Counts:
    return {} if table.labels is None else Counter(table.labels.tolist())
