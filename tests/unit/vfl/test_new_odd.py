"""``vfl new`` with tables that need ``--set``, that smell, or whose names would do harm."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from tests.harness.errors import assert_names, raises
from tests.harness.present import present
from tests.unit.vfl.test_new import BANK, ROWS, SHOP, refused, run, table, tables
from vfl.certs.authority import create_authority, issue
from vfl.new.commands import new
from vfl.new.options import find_flags, get_reading_keys, parse_settings
from vfl_common.config.party import load_party
from vfl_common.errors import Code, InputError
from vfl_party.data import load_table


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank's and a shop's table in the working folder."""
    monkeypatch.chdir(tmp_path)
    table("bank.csv", "customer,age,default", lambda n: f"K{n},{n % 50},{('yes', 'no')[n % 2]}")
    table("shop.csv", "client_no,orders", lambda n: f"k{n},{n % 9}")


# --- names


def test_no_party_has_the_recipes_file() -> None:
    Path("bank.csv").rename("recipe.csv")
    args = ["recipe", "--data", "recipe.csv", "--passive", "shop", "--label", "default"]
    for more in (
        [],
        ["--active", "recipe"],
        ["--active", "Recipe"],
        ["--active", "bank", "--passive", "recipe"],
    ):
        refused(*args, *more)
    run(*args, "--active", "bank")
    assert tables("bank.toml")["name"] == "bank"
    Path("recipe.toml").rename("shop.toml")
    refused(*SHOP, "--recipe", "shop.toml", "--force")


def test_names_of_columns_cannot_add_lines() -> None:
    evil = '"a\nwrote       x\x1b[2J"'
    table("bank.csv", f"customer,age,{evil},default", lambda n: f"K{n},{n % 50},{n},{n % 2}")
    said = run(*BANK)
    assert_names(said, "customer", "default")
    assert "\x1b" not in said
    assert not any(line.startswith("wrote       x") for line in said.splitlines())
    table("bank.csv", f"customer,age,{evil},default", lambda n: f"K{n},{n % 50},text {n},{n % 2}")
    said = run(*BANK, "--force")
    assert tables("bank.toml")["data"]["drop"] == ["a\nwrote       x\x1b[2J"]
    text = refused(*BANK, "--force", "--drop", "x", code=Code.DATA_INVALID)
    assert "customer, age, 'a\\nwrote" in text


def test_a_name_with_del_is_valid_toml() -> None:
    table("bank.csv", "customer,age,a\x7fb,default", lambda n: f"K{n},{n % 50},text {n},{n % 2}")
    run(*BANK)
    assert tables("bank.toml")["data"]["drop"] == ["a\x7fb"]


# --- what is said


def test_columns_of_numbers_and_dates_that_are_read_as_text_are_called_so() -> None:
    row = "K{0},{1},{2},31.{3:02}.{4:02},{5}"
    table(
        "bank.csv",
        "customer,income,note,day,default",
        lambda n: row.format(
            n, "unknown" if n == 7 else n * 3, f"text {n}", 1 + n % 12, n // 2, n % 2
        ),
    )
    said = run(*BANK).splitlines()
    assert_names("\n".join(said), "income", "unknown")
    # It is left out anyway.
    assert not any(line.startswith("look at") and "'note'" in line for line in said)


@pytest.mark.parametrize(
    "values", [("yes", "no"), ("Yes", "no"), ("Ja", "Nein"), ("a", "Z"), ("2", "1"), ("0.5", "1.5")]
)
def test_the_class_of_the_scores_is_said(values: tuple[str, str]) -> None:
    table("bank.csv", "customer,age,default", lambda n: f"K{n},{n % 50},{values[n % 2]}")
    assert_names(run(*BANK), "customer", "default")


def test_a_label_with_values_that_are_alike_is_refused() -> None:
    values = ("Ja", "ja", "nein", "nein ")
    table("bank.csv", "customer,age,default", lambda n: f"K{n},{n % 50},{values[n % 4]}")
    for task in ([], ["--task", "binary"]):
        text = refused(*BANK, *task, code=Code.DATA_INVALID)
        assert "nein" not in text
    assert_names(run(*BANK, "--task", "multiclass"), "default", "--task")
    table("bank.csv", "customer,age,default", lambda n: f"K{n},{n % 50},{values[n % 2]}")
    refused(*BANK, "--force", code=Code.DATA_INVALID)


def test_what_is_next_depends_on_the_keys() -> None:
    run(*BANK)
    assert_names(run(*SHOP), "client_no", "--id")
    create_authority(Path("certs"), "f")
    issue(Path("certs"), "shop")
    assert_names(run(*SHOP, "--force"), "client_no", "--id")


def test_help_says_what_is_read() -> None:
    for command in ("recipe", "party"):
        said = " ".join(run(command, "--help").split())
        for kind in (".csv", ".tsv", ".gz", ".xlsx", ".parquet", "URL of a database"):
            assert kind in said


# --- --set


def test_a_query_of_a_database(tmp_path: Path) -> None:
    pytest.importorskip("sqlalchemy")
    database = sqlite3.connect("shop.db")
    with database:
        database.execute("create table clients (client_no text, orders integer, secret text)")
        database.executemany(
            "insert into clients values (?, ?, ?)", [(f"K{n}", n % 9, f"s{n}") for n in range(ROWS)]
        )
    database.close()
    run(*BANK)
    args = ["party", "--name", "shop", "--data", "sqlite:///shop.db"]
    refused(*args, code=Code.DATA_INVALID)
    query = "select client_no, orders from clients"
    run(*args, "--set", f"query={query}")
    assert tables("shop.toml")["data"] == {
        "source": "sqlite:///shop.db",
        "query": query,
        "id": "client_no",
    }
    Path("other").mkdir()
    run(*args, "--set", f"query={query}", "--out", "other")
    found = present(load_party(Path("other/shop.toml")).data)
    assert len(load_table(found, with_label=False)) == ROWS
    assert found.source == f"sqlite:///{tmp_path / 'shop.db'}"


def test_a_query_of_duckdb(tmp_path: Path) -> None:
    pytest.importorskip("duckdb")
    source = "duckdb:SELECT client_no, orders FROM 'shop.csv'"
    run(*BANK)
    args = ["party", "--name", "shop", "--data", source]
    # Nothing takes the first rows.
    assert "ORDER BY" not in run(*args)
    assert tables("shop.toml")["data"] == {"source": source, "id": "client_no"}
    Path("other").mkdir()
    run(*args, "--out", "other", "--set", "memory_mib=64", "--set", "scratch=in")
    assert tables("other/shop.toml")["data"]["memory_mib"] == 64
    assert tables("other/shop.toml")["data"]["scratch"] == "../in"
    # DuckDB has worked in it.
    assert list(Path("in").iterdir()) == []
    for path in ("shop.toml", "other/shop.toml"):
        found = present(load_party(Path(path)).data)
        # Relative paths start at the folder in which the query was given.
        assert found.source.startswith(f"duckdb:SET file_search_path = '{tmp_path}'; SELECT")
        assert len(load_table(found, with_label=False)) == ROWS


def test_a_password_is_not_said() -> None:
    url = "postgresql://ann:hidden@127.0.0.1:1/shop"
    assert "hidden" not in refused(*BANK, "--data", url, code=Code.DATA_INVALID)


def test_a_sheet_of_several() -> None:
    openpyxl = pytest.importorskip("openpyxl")
    book = openpyxl.Workbook()
    for sheet in (book.active, book.create_sheet("2024")):
        sheet.append(["client_no", "orders"])
        for n in range(ROWS):
            sheet.append([f"K{n}", n % 9])
    book.save("shop.xlsx")
    run(*BANK)
    refused(*SHOP, "--data", "shop.xlsx", code=Code.DATA_INVALID)
    run(*SHOP, "--data", "shop.xlsx", "--set", "sheet=2024")
    assert tables("shop.toml")["data"]["sheet"] == "2024"


def test_numbers_of_two_meanings_and_lines_before_the_names() -> None:
    run(*BANK)
    table("shop.csv", "Export of May\n\nclient_no;spent", lambda n: f"K{n};1.{n:03}")
    text = refused(*SHOP, "--id", "client_no", code=Code.DATA_INVALID)
    assert text.endswith("(here: --set skip_lines=2)")
    skip = ["--set", "skip_lines=2"]
    text = refused(*SHOP, *skip, code=Code.DATA_INVALID)
    assert text.endswith("(here: --set decimal=., --set thousands=.)")
    run(*SHOP, *skip, "--set", "decimal=.")
    data = {"source": "shop.csv", "skip_lines": 2, "decimal": ".", "id": "client_no"}
    assert tables("shop.toml")["data"] == data


def test_a_title_is_told_by_the_label_or_by_its_single_cell() -> None:
    for title, line in (("Report of May\n\n", 3), ("Report, by X\n", 2)):
        text = title + Path("bank.csv").read_text()
        Path("titled.csv").write_text(text)
        bank = [
            "recipe",
            "--data",
            "titled.csv",
            "--active",
            "bank",
            "--passive",
            "shop",
            "--label",
            "default",
        ]
        said = refused(*bank, code=Code.DATA_INVALID)
        assert said.endswith(f"(here: --set skip_lines={line - 1})")
    Path("shop.csv").write_text("Report of May\n\n" + Path("shop.csv").read_text())
    run(*BANK)
    text = refused(*SHOP, code=Code.DATA_INVALID)
    assert text.endswith("set data.skip_lines = 2. (here: --set skip_lines=2)")
    run(*SHOP, "--set", "skip_lines=2")


def test_columns_that_are_said_to_be_categories_stay() -> None:
    run(*BANK)
    table("shop.csv", "client_no,orders,word", lambda n: f"K{n},{n % 9},w{n}x")
    said = run(*SHOP, "--set", 'categorical=["orders", "word"]')
    assert_names(said, "client_no", "--id")
    assert "left out" not in said
    assert tables("shop.toml")["data"]["categorical"] == ["orders", "word"]


def test_words_for_missing_are_read_as_such() -> None:
    word = {3: "k.A.", 8: "unbekannt"}
    row = "K{0},{1},{2},{3}".format
    table(
        "bank.csv",
        "customer,age,town,default",
        lambda n: row(n, word.get(n, n % 50), word.get(n, "Graz"), n % 2),
    )
    said = run(*BANK, "--set", 'na=["k.A.", "unbekannt"]')
    assert_names(said, "customer", "default")
    data = tables("bank.toml")["data"]
    assert (data["na"], data["missing"]) == (["k.A.", "unbekannt"], "mean")
    found = load_table(
        load_party(Path("bank.toml")).data or parse_settings("", []), with_label=True
    )
    assert found.categorical is not None
    assert found.categorical.words == (("Graz",),)
    assert (found.categorical.codes_NK == -1).sum() == 2


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ("decimal=,", "decimal", ","),
        ("thousands='", "thousands", "'"),
        ("thousands=", "thousands", ""),
        ('separator="\\t"', "separator", "\t"),
        ("skip_lines=2", "skip_lines", 2),
        ("sheet=2024", "sheet", "2024"),
        ('sheet="2024"', "sheet", "2024"),
        ("data.encoding=cp1252", "encoding", "cp1252"),
        ("categorical=plz", "categorical", ["plz"]),
        ("categorical=2024", "categorical", ["2024"]),
        ("na=k.A.", "na", ["k.A."]),
        ('na=["k.A.", "-1"]', "na", ["k.A.", "-1"]),
        ("query=select 1\nas a", "query", "select 1\nas a"),
    ],
)
def test_values_are_toml_or_plain_text(given: str, key: str, value: object) -> None:
    source = {"sheet": "x.xlsx", "query": "sqlite:///x.db"}.get(key, "x.csv")
    assert get_reading_keys(parse_settings(source, [given])) == {key: value}


@pytest.mark.parametrize(
    "given",
    [
        ["decimals=,"],
        ["x"],
        ["decimal"],
        ["id=customer"],
        ["scale=none"],
        ["decimal=,", "decimal=."],
        ["decimal=;"],
        ["skip_lines=two"],
        ["sheet=a"],
        ["query=select 1"],
    ],
)
def test_wrong_keys_and_values_are_one_sentence(given: list[str]) -> None:
    refused(*BANK, *(word for each in given for word in ("--set", each)))


def test_sentences_about_keys_name_the_flags() -> None:
    assert find_flags("no key") == []
    assert find_flags('set data.encoding = "utf-16-le"') == ["--set encoding=utf-16-le"]
    assert find_flags('Set data.dates to "%d/%m/%Y" or "%m/%d/%Y"') == ["--set dates=…"]
    assert find_flags("data.dates, data.categorical; data.dates") == [
        "--set dates=…",
        "--set categorical=…",
    ]
    assert find_flags("correct data.source, data.id or data.drop; not data.missing") == [
        "--data",
        "--id",
        "--drop",
    ]


def test_errors_keep_their_code() -> None:
    with raises(InputError, Code.FILE_INVALID, names=("--data", "none.csv")):
        new.main([*BANK, "--data", "none.csv"], standalone_mode=False)


def test_an_empty_column_is_left_out() -> None:
    table(
        "bank.csv", "customer,age,old,default", lambda n: f"K{n},{n % 50},,{('yes', 'no')[n % 2]}"
    )
    said = run(*BANK)
    assert_names(said, "customer", "default")
    assert "missing" not in said
    assert tables("bank.toml")["data"] == {
        "source": "bank.csv",
        "id": "customer",
        "label": "default",
        "drop": ["old"],
    }


def test_rows_without_a_label_are_left_out_and_told() -> None:
    table("gaps.csv", "customer,age,buy", lambda n: f"K{n},{n % 50},{'' if n % 8 == 1 else n % 2}")
    said = run("recipe", "--data", "gaps.csv", "--passive", "shop", "--label", "buy")
    (rows,) = [line for line in said.splitlines() if line.startswith("rows ")]
    assert_names(rows, "data.unlabelled", "gaps.toml")
    assert tables("gaps.toml")["data"]["unlabelled"] == "drop"
    # They have an id of their own.
    assert "is this the id?" not in said


def test_an_id_that_many_rows_share_is_told_beside_rows_without_a_label() -> None:
    table("gaps.csv", "customer,age,buy", lambda n: f"K{n},{n % 50},{'' if n % 8 == 1 else n % 2}")
    said = run("recipe", "--data", "gaps.csv", "--passive", "shop", "--label", "buy", "--id", "age")
    (told,) = [line for line in said.splitlines() if "is this the id?" in line]
    assert_names(told, "--id", "50")


def test_a_form_of_dates_for_each_column() -> None:
    table(
        "days.csv",
        "customer,opened,closed,buy",
        lambda n: f"K{n},0{n % 9 + 1}/02/2024,0{n % 9 + 1}/03/2024,{n % 2}",
    )
    forms = 'dates={opened = "%d/%m/%Y", closed = "%m/%d/%Y"}'
    run(*("recipe", "--data", "days.csv", "--passive", "shop", "--label", "buy"), "--set", forms)
    assert tables("days.toml")["data"]["dates"] == {"opened": "%d/%m/%Y", "closed": "%m/%d/%Y"}
