"""What ``vfl new`` guesses, rule by rule."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from tests.harness.errors import raises
from vfl.new import rules
from vfl.new.rules import IdGuess, ModelSizes, Task, Values
from vfl_common.errors import Code, InputError


@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (1, ModelSizes(32, 8, 32, 32, 200, 20, 0.2)),
        (999, ModelSizes(32, 8, 32, 32, 200, 20, 0.2)),
        (1_000, ModelSizes(64, 16, 64, 64, 100, 12, 0.15)),
        (10_000, ModelSizes(64, 16, 64, 256, 60, 8, 0.1)),
        (100_000, ModelSizes(128, 32, 64, 1024, 30, 5, 0.1)),
        (1_000_000, ModelSizes(128, 32, 64, 4096, 15, 3, 0.05)),
        (50_000_000, ModelSizes(128, 32, 64, 4096, 15, 3, 0.05)),
    ],
)
def test_sizes_follow_the_number_of_rows(rows: int, sizes: ModelSizes) -> None:
    assert rules.choose_sizes(rows) == sizes


@pytest.mark.parametrize(
    ("rows", "least"), [(5, 10), (100, 10), (600, 60), (1_000, 100), (10**6, 100)]
)
def test_how_many_common_rows_there_must_be(rows: int, least: int) -> None:
    assert rules.compute_min_common_rows(rows) == least


@pytest.mark.parametrize(
    ("labels", "task"),
    [
        (["no"] * 9 + ["yes"], Task("binary")),
        ([0.0, 1.0], Task("binary")),
        ([0.5, 2.5], Task("binary")),
        (["a", "b", "c"] * 2, Task("multiclass", 3)),
        ([1.0, 2.0, 3.0] * 10, Task("multiclass", 3)),
        ([1.0, 2.0, 3.0] * 9, Task("regression")),
        ([0.1, 0.2, 0.3] * 100, Task("regression")),
        ([float(n) for n in range(21)] * 100, Task("regression")),
        ([float(3 * n) for n in range(500)], Task("regression")),
    ],
)
def test_the_task_follows_the_values_of_the_label(labels: list[Any], task: Task) -> None:
    assert rules.choose_task(Counter(labels), "t.csv: label column 'y'", "y") == task


@pytest.mark.parametrize(
    ("labels", "name"),
    [
        (["no"] * 5, "y"),
        ([f"text {n}" for n in range(200)] * 3, "y"),
        (["a", "b", "c", "d", "d"], "y"),
        ([float(n) for n in range(7, 107)], "y"),
        ([float(n * n) for n in range(100)], "account_no"),
    ],
)
def test_a_label_that_cannot_be_learnt_is_refused(labels: list[Any], name: str) -> None:
    with raises(InputError, Code.DATA_INVALID, names="t.csv"):
        rules.choose_task(Counter(labels), f"t.csv: label column {name!r}", name)


@pytest.mark.parametrize(
    ("labels", "wanted", "task"),
    [
        ([float(n) for n in range(100)], "regression", Task("regression")),
        ([1.0, 2.0], "regression", Task("regression")),
        ([1.0, 2.0], "multiclass", Task("multiclass", 2)),
        (["a", "b", "c", "d", "d"], "multiclass", Task("multiclass", 4)),
        (["a", "b"], "binary", Task("binary")),
    ],
)
def test_a_person_knows_the_task_better(labels: list[Any], wanted: str, task: Task) -> None:
    assert rules.choose_task(Counter(labels), "t.csv: label column 'y'", "y", wanted) == task


@pytest.mark.parametrize(
    ("labels", "wanted"), [(["a", "b", "c"], "binary"), (["a", "b"], "regression")]
)
def test_but_not_what_the_values_are(labels: list[Any], wanted: str) -> None:
    with raises(InputError, Code.DATA_INVALID, names=("--task", "t.csv")):
        rules.choose_task(Counter(labels), "t.csv: label column 'y'", "y", wanted)


@pytest.mark.parametrize(
    "name",
    [
        "id",
        "ID",
        "customer",
        "client_no",
        "PatientID",
        "person id",
        "e-mail",
        "kundennr",
        "account.number",
        "pid",
        "row_idx",
    ],
)
def test_names_of_ids(name: str) -> None:
    assert rules.looks_like_id(name)


@pytest.mark.parametrize(
    "name", ["age", "customer_age", "paid", "idle", "number_of_visits", "", "2024", "no_children"]
)
def test_names_of_others(name: str) -> None:
    assert not rules.looks_like_id(name)


def guess(**columns: list[str] | None) -> IdGuess:
    """The guess for columns with these values; None: one that cannot be read as an id."""

    def values(name: str) -> Values | None:
        found = columns[name]
        return None if found is None else Values(len(found), tuple(dict.fromkeys(found)))

    return rules.guess_id(list(columns), values)


EACH = [f"A{n}" for n in range(20)]
SOME = [*EACH[:10], *EACH[:10]]


def test_a_column_that_is_called_so_and_identifies_is_the_id() -> None:
    assert guess(age=EACH, customer=EACH) == IdGuess("customer", True)
    almost = [*EACH[:19], EACH[0]]
    assert guess(age=EACH, customer=almost) == IdGuess("customer", True)


def test_several_are_asked_about() -> None:
    assert guess(email=EACH, customer=EACH) == IdGuess("email", False, ("customer",))


def test_another_name_is_asked_about() -> None:
    assert guess(income=["1.5", *EACH[1:]], ticket=EACH, note=EACH) == IdGuess(
        "ticket", False, ("note",)
    )
    assert guess(customer=SOME, ticket=EACH) == IdGuess("ticket", False)


def test_a_table_may_have_no_id() -> None:
    assert guess(customer=SOME, day=None) == IdGuess("", False)
    assert guess(customer=["1.5", "2.5"]) == IdGuess("", False)


@pytest.mark.parametrize(
    ("ids", "found"),
    [
        (["007", "8"], ("trim",)),
        (["K-1", "K-2"], ("trim", "casefold")),
        ([" k-1", "K-2 "], ("trim", "casefold")),
        (["Jürgen", "Ada"], ("nfkc", "trim", "casefold")),
        (["a@example.org", "B@example.org", "x"], ("email",)),
    ],
)
def test_rules_for_ids(ids: list[str], found: tuple[str, ...]) -> None:
    assert rules.choose_id_rules(ids) == found


def test_columns_of_no_use() -> None:
    def values(different: int, rows: int) -> Values:
        return Values(rows, tuple(f"{n}" for n in range(different)))

    assert not rules.is_useless_text(None)
    assert not rules.is_useless_text(values(50, 50))
    assert rules.is_useless_text(values(51, 500))
    assert not rules.is_useless_text(values(200, 2_000))
    assert rules.is_id_number("account_no", lambda _: values(30, 30))
    assert not rules.is_id_number("account_no", lambda _: values(29, 30))
    assert not rules.is_id_number("income", lambda _: values(30, 30))


def test_names() -> None:
    assert rules.guess_label(["id", "default", "age"], ["age", "x"]) == "default"
    assert rules.guess_label(["id", "age", "x"], ["age"]) == "age"
    assert rules.guess_label(["id", "age", "x"], ["age", "x"]) == ""
    assert rules.make_recipe_name("Paid back?", ("bank", "shop")) == "bank-shop-Paid-back"
    assert rules.make_recipe_name("ß", ("bank", "shop")) == "bank-shop"
    assert rules.make_recipe_name("y", ("bank", *"abcd")) == "bank-y"
    assert rules.make_recipe_name("y" * 100, ("bank", "shop")) == "bank-shop-" + "y" * 50
