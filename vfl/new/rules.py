"""The rules for the defaults of ``vfl new``, as pure functions of names, counts and texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from vfl_common.config.task import class_text
from vfl_common.errors import Code, InputError

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


# --- ids
# ------------------------------------------------------------


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


# --- columns
# ------------------------------------------------------------


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
