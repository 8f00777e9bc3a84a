"""The rules for the defaults of ``vfl new``. They are pure functions of names, counts and texts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast, get_args

from vfl_common.config.models import class_text
from vfl_common.errors import Code, InputError

Kind = Literal["binary", "multiclass", "regression"]
KINDS: tuple[Kind, ...] = get_args(Kind)
# {value of the label: rows}
Counts = Mapping[str | float, int]

# The number of classes that are integers; a label with more different numbers is a quantity.
MAX_NUMBERED = 20
MAX_CLASSES = 100
# The average number of rows of a class, or of a category.
ROWS_A_CLASS = 10
# The number of different texts that are always categories, however few the rows.
FEW = 50
# The share of different values from which a column with the name of an id is one.
ALMOST_ALL = 0.9
# The number of ids whose spelling is checked.
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
    """The model and the training that suit a number of rows.

    ``hidden``, ``top``: the widths of the hidden layer of an encoder, and of the top model.
    ``validation``: the share of rows for early stopping.
    """

    hidden: int
    embedding_size: int
    top: int
    batch_size: int
    epochs: int
    patience: int
    validation: float


# (upper bound of the active party's rows, sizes). More rows: wider layers, larger batches, fewer
# epochs. The epochs are an upper bound: early stopping ends training and restores the best weights.
_SIZES: tuple[tuple[int, ModelSizes], ...] = (
    (1_000, ModelSizes(32, 8, 32, batch_size=32, epochs=200, patience=20, validation=0.2)),
    (10_000, ModelSizes(64, 16, 64, batch_size=64, epochs=100, patience=12, validation=0.15)),
    (100_000, ModelSizes(64, 16, 64, batch_size=256, epochs=60, patience=8, validation=0.1)),
    (1_000_000, ModelSizes(128, 32, 64, batch_size=1024, epochs=30, patience=5, validation=0.1)),
)
_MANY = ModelSizes(128, 32, 64, batch_size=4096, epochs=15, patience=3, validation=0.05)


def sizes_for(rows: int) -> ModelSizes:
    """Returns the model and the training for a table of ``rows`` rows."""
    return next((sizes for below, sizes in _SIZES if rows < below), _MANY)


def min_in_common(rows: int) -> int:
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


def task_of(counts: Counts, what: str, name: str, wanted: str | None = None) -> Task:
    """Returns the task for the values of a label.

    Args:
        counts: the number of rows of each value.
        what: the place for errors: file and column.
        name: the column's name.
        wanted: the kind of task, instead of a guess.

    Raises InputError if the label cannot be learnt, or not as ``wanted``.
    """
    values, rows = len(counts), sum(counts.values())
    if values == 1:
        raise _unusable(
            f"{what}: has the same value in all rows, so there is nothing to learn. Name "
            "another column."
        )
    text = any(isinstance(value, str) for value in counts)
    if wanted == "binary":
        _refuse_alike(counts, what)
    if wanted is not None:
        return _as_wanted(wanted, values, text, what)
    if values == 2:
        _refuse_alike(counts, what)
        return Task("binary")
    if text:
        if values > MAX_CLASSES or rows < 2 * values:
            raise _unusable(
                f"{what}: looks like an id or free text (got {values:,} different texts in "
                f"{rows:,} rows). Name another column, or give --task multiclass if these are "
                "classes."
            )
        _refuse_alike(counts, what)
        return Task("multiclass", values)
    numbers = cast(Iterable[float], counts)
    whole = all(float(value).is_integer() for value in numbers)
    if (
        whole
        and values == rows
        and (looks_like_id(name) or max(numbers) - min(numbers) == rows - 1)
    ):
        raise _unusable(
            f"{what}: looks like an id, with a different integer in each row. Name another "
            "column, or give --task regression if it is a quantity."
        )
    if whole and values <= MAX_NUMBERED and rows >= ROWS_A_CLASS * values:
        return Task("multiclass", values)
    return Task("regression")


def with_positive(task: Task, counts: Counts, what: str, wanted: str | None) -> Task:
    """Returns the task with the positive class ``wanted``; None: unchanged.

    ``what``: the place for errors. Raises InputError if the label has no such value, or not two.
    """
    if wanted is None:
        return task
    if task.kind != "binary":
        raise _unusable(
            f"{what}: makes a {task.kind} task, and --positive is for a binary one. Remove "
            "--positive."
        )
    positive = next((value for value in counts if class_text(value) == wanted.strip()), None)
    if positive is None:
        raise _unusable(f"{what}: has no value {wanted!r}. Correct --positive.")
    whole = isinstance(positive, float) and positive.is_integer()
    return replace(task, positive=int(positive) if whole else positive)


def _refuse_alike(counts: Counts, what: str) -> None:
    """Raises InputError if values differ only by case or blanks: this is usually a mistake."""
    texts = [value for value in counts if isinstance(value, str)]
    if len({" ".join(text.casefold().split()) for text in texts}) < len(texts):
        raise _unusable(
            f"{what}: has values that differ only by case or blanks. Write them the same way, "
            "or give --task multiclass if they are different classes."
        )


def _as_wanted(wanted: str, values: int, text: bool, what: str) -> Task:
    if wanted == "binary" and values != 2:
        raise _unusable(
            f"{what}: a binary task needs two different values (got {values:,}). Give another "
            "--task."
        )
    if wanted == "regression" and text:
        raise _unusable(f"{what}: holds text, but a regression needs numbers. Give another --task.")
    return Task(cast(Kind, wanted), values if wanted == "multiclass" else None)


def rows_for(
    rows: int, task: Task, align: str, id_rules: tuple[str, ...], *, label_free: bool
) -> dict[str, Any]:
    """Returns the recipe's table ``[rows]``. Splits are stratified if there are classes and
    messages may depend on labels (not ``label_free``).
    """
    table: dict[str, Any] = (
        {"align": "psi", "at_least": min_in_common(rows)} if align == "psi" else {}
    )
    table |= {"id_rules": list(id_rules), "validation": sizes_for(rows).validation}
    # The other parties know the order of a stratified split by the recipe's seed, so the split
    # reveals labels to them.
    at_random = label_free or task.kind == "regression"
    return table if at_random else table | {"split": "stratified"}


# --- ids
# ------------------------------------------------------------


@dataclass(frozen=True)
class Values:
    """A column, or several that are one id together: the number of rows, and the different values
    as text.
    """

    rows: int
    different: Sequence[str]

    @property
    def share(self) -> float:
        """The number of different values for each row."""
        return len(self.different) / self.rows


@dataclass(frozen=True)
class IdGuess:
    """A guess of the id. ``name``: the likely column, '' for none; ``sure``: whether there is no
    need to ask.
    """

    name: str
    sure: bool
    others: tuple[str, ...] = ()


def guess_id(names: Sequence[str], values: Callable[[str], Values | None]) -> IdGuess:
    """Guesses the id column: one with the name of an id and (almost) unique values.

    If there are several, or none, the guess is unsure: the first of them, or else the first other
    column with unique values. Decimal numbers are not ids. ``values`` reads a column; None: it
    cannot be an id.
    """
    likely = [
        name for name in names if looks_like_id(name) and _identifies(values(name), ALMOST_ALL)
    ]
    if likely:
        return IdGuess(likely[0], len(likely) == 1, tuple(likely[1:]))
    unique = [name for name in names if _identifies(values(name), 1.0)]
    return IdGuess(unique[0], False, tuple(unique[1:])) if unique else IdGuess("", False)


def _identifies(values: Values | None, share: float) -> bool:
    if values is None or values.share < share:
        return False
    return not any(_DECIMAL.fullmatch(text) for text in values.different[:_LOOKED_AT])


def looks_like_id(name: str) -> bool:
    """Returns whether a column has the name of an id: ``customer``, ``client_no``, ``PatientID``;
    but not ``customer_age``.
    """
    words = re.findall(r"[^\W\d_]+", re.sub(r"([a-z])([A-Z])", r"\1 \2", name).casefold())
    return bool(words) and (words[-1] in _NUMBERS or all(word in _PEOPLE for word in words))


def likely_label(names: Sequence[str], few: Sequence[str]) -> str:
    """Returns the proposal for the label: a column with the name of a label, or the only one of
    ``few``.
    """
    called = next((name for name in reversed(names) if name.casefold() in _LABELS), "")
    return called or (few[0] if len(few) == 1 else "")


def id_rules_for(ids: Sequence[str]) -> tuple[str, ...]:
    """Returns rules that normalise ids, by their spelling.

    E-mail addresses: ``email``. Others: ``nfkc`` if there is more than ASCII, always ``trim``, and
    ``casefold`` if there are letters, because the other parties' ids may have other blanks and
    case.
    """
    looked_at = ids[:_LOOKED_AT]
    if sum("@" in text for text in looked_at) > len(looked_at) / 2:
        return ("email",)
    rules = ["trim"]
    if not all(text.isascii() for text in looked_at):
        rules.insert(0, "nfkc")
    if any(letter.isalpha() for text in looked_at for letter in text):
        rules.append("casefold")
    return tuple(rules)


# --- columns
# ------------------------------------------------------------


def is_useless_text(values: Values | None) -> bool:
    """Returns whether a column of text has too many different values: names, addresses, notes."""
    return values is not None and len(values.different) > max(FEW, values.rows / ROWS_A_CLASS)


def is_id_number(name: str, values: Callable[[str], Values | None]) -> bool:
    """Returns whether a column of numbers is an id, by its name and unique values."""
    return looks_like_id(name) and _identifies(values(name), 1.0)


def recipe_name(label: str, parties: Sequence[str]) -> str:
    """Returns a name for a recipe and its runs: the parties (at most three) and the label."""
    words = [*parties[: 3 if len(parties) <= 3 else 1], label]
    name = "-".join(re.sub(r"[^A-Za-z0-9]+", "-", word).strip("-") for word in words)
    return name.strip("-")[:60].strip("-")


def _unusable(text: str) -> InputError:
    return InputError(Code.DATA_INVALID, text)
