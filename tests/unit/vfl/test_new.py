"""``vfl new`` as people use it: with flags, at a terminal, and with tables that cannot be used."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from click.testing import CliRunner, Result

from tests.harness.errors import assert_names, raises
from vfl.certs.authority import create_authority, issue
from vfl.new.commands import new
from vfl_common.config.party import load_party
from vfl_common.config.recipe import load_recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_party.runtime.preflight import check

ROWS = 120
BANK = ["recipe", "--data", "bank.csv", "--passive", "shop", "--label", "default"]
SHOP = ["party", "--data", "shop.csv"]


@pytest.fixture(autouse=True)
def _tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bank's and a shop's table in the working folder."""
    monkeypatch.chdir(tmp_path)
    product = ("loan", "card", "none")
    table(
        "bank.csv",
        "customer,name,age,product,default",
        lambda n: f"K{n},Ada {n},{n % 50},{product[n % 3]},{n % 2}",
    )
    table(
        "shop.csv",
        "client_no,orders,town",
        lambda n: f" k{n + 40},{'' if n == 3 else n % 9},{('', 'Graz')[n % 2]}",
    )


def table(name: str, header: str, row: Callable[[int], str], rows: int = ROWS) -> None:
    Path(name).write_text("\n".join([header, *map(row, range(rows))]) + "\n", encoding="utf-8")


def run(*args: str) -> str:
    """Runs a command that must end well. Returns what it says."""
    result = CliRunner().invoke(new, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def refused(*args: str, code: Code = Code.CONFIG_INVALID) -> str:
    """Runs a command that is refused in one sentence and leaves nothing behind. Returns the
    sentence.
    """
    before = {path: path.read_bytes() for path in Path().iterdir()}
    with raises(InputError, code) as caught:
        CliRunner().invoke(new, args, catch_exceptions=False)
    assert caught.value.exit_code == 2
    assert {path: path.read_bytes() for path in Path().iterdir()} == before
    return str(caught.value)


def typed(monkeypatch: pytest.MonkeyPatch, answers: list[str], *args: str) -> Result:
    """Runs a command at a terminal, where a person types ``answers``."""
    with monkeypatch.context() as terminal:
        terminal.setattr("vfl.new.options.at_terminal", lambda: True)
        return CliRunner().invoke(
            new, args, input="".join(f"{each}\n" for each in answers), catch_exceptions=False
        )


def tables(name: str) -> dict[str, Any]:
    return tomllib.loads(Path(name).read_text())


def test_both_sides_write_files_that_pass_the_check() -> None:
    said = run(*BANK)
    assert "wrote       recipe.toml: send it to shop; digest" in said
    create_authority(Path("certs"), "f")
    for name in ("bank", "shop"):
        issue(Path("certs"), name)
    heard = run(*SHOP)
    digest = load_recipe(Path("recipe.toml")).digest()
    for text in (said, heard):
        assert f"digest {digest} (the same at every party)" in text
    for name in ("bank", "shop"):
        found = list(check(Path(f"{name}.toml"), None, offline=True))
        assert [finding.text for finding in found if not finding.fine] == []
        assert any(f"digest {digest} (the same" in finding.text for finding in found)
        assert len(Path(f"{name}.toml").read_text().splitlines()) <= 12


def test_what_the_files_hold() -> None:
    run(*BANK)
    run(*SHOP)
    recipe = load_recipe(Path("recipe.toml"))
    assert (recipe.name, recipe.task.kind, recipe.server) == (
        "bank-shop-default",
        "binary",
        "server",
    )
    assert [(party.name, party.role, party.features) for party in recipe.parties] == [
        ("bank", "active", True),
        ("shop", "passive", True),
    ]
    assert (recipe.rows.align, recipe.rows.at_least, recipe.rows.split) == ("psi", 12, "random")
    assert recipe.rows.id_rules == ("trim", "casefold")
    assert [phase.kind for phase in recipe.phases] == ["fedonce", "head", "evaluate"]
    tls = {"ca": "certs/ca.pem", "certificate": "certs/bank.pem", "key": "certs/bank.key"}
    assert tables("bank.toml") == {
        "name": "bank",
        "recipe": "recipe.toml",
        "server": "127.0.0.1:7000",
        "tls": tls,
        "policy": {"level": "careful"},
        "data": {"source": "bank.csv", "id": "customer", "label": "default", "drop": ["name"]},
    }
    assert tables("shop.toml")["data"] == {
        "source": "shop.csv",
        "id": "client_no",
        "missing": "mean",
    }


def test_each_guess_is_a_line_with_the_key_that_changes_it() -> None:
    said = run(*BANK).splitlines()
    assert_names("\n".join(said), "customer", "default")
    heard = run(*SHOP)
    assert_names(heard, "client_no", "--id")
    for text in ("\n".join(said), heard):
        # No id.
        assert "k41" not in text.lower()


def test_on_two_machines() -> None:
    run(
        *BANK,
        "--server",
        "fed.example.org:7000",
        "--advertise",
        "bank.example.org:7001",
        "--active",
        "north-bank",
    )
    party = load_party(Path("north-bank.toml"))
    assert (party.server, party.listen) == ("fed.example.org:7000", "0.0.0.0:7001")
    assert party.advertise == "bank.example.org:7001"
    run(*SHOP, "--server", "fed.example.org:7000")
    assert load_party(Path("shop.toml")).server == "fed.example.org:7000"
    refused(*BANK, "--server", "fed.example.org:7000", "--force")


def test_files_in_folders_of_their_own() -> None:
    for name in ("bank", "shop"):
        Path(name).mkdir()
    run(*BANK, "--out", "bank")
    run(*SHOP, "--out", "shop", "--recipe", "bank/recipe.toml")
    found = load_party(Path("shop/shop.toml"))
    assert Path(found.recipe).samefile("bank/recipe.toml")
    assert found.data is not None
    assert Path(found.data.source).samefile("shop.csv")


def test_other_choices() -> None:
    run(
        *BANK,
        "--align",
        "digest",
        "--task",
        "multiclass",
        "--drop",
        "age",
        "--id",
        "customer",
        "--id",
        "product",
    )
    recipe = load_recipe(Path("recipe.toml"))
    assert (recipe.rows.align, recipe.rows.at_least, recipe.task.classes) == ("digest", 1, 2)
    data = tables("bank.toml")["data"]
    assert (data["id"], set(data["drop"])) == (["customer", "product"], {"age", "name"})
    # Nothing is left: it trains the top model on what the shop sends.
    assert not recipe.active.features


def test_a_person_names_the_class_of_the_scores() -> None:
    table("bank.csv", "customer,age,paid", lambda n: f"K{n},{n % 50},{('ja', 'nein')[n % 2]}")
    args = [*BANK[:-1], "paid"]
    said = run(*args, "--positive", "ja")
    line = "'paid' is binary; scores, AUC and f1 are of 'ja', as you say  (--positive, or task.positive in recipe.toml)"
    assert f"label       {line}" in said
    assert load_recipe(Path("recipe.toml")).task.positive == "ja"
    refused(*args, "--positive", "Ja", "--force", code=Code.DATA_INVALID)
    refused(*args, "--positive", "ja", "--task", "multiclass", "--force", code=Code.DATA_INVALID)


def test_a_positive_class_that_is_a_number() -> None:
    run(*BANK, "--positive", "0")
    assert load_recipe(Path("recipe.toml")).task.positive == 0
    assert tables("recipe.toml")["task"] == {"kind": "binary", "positive": 0}


def test_the_label_of_a_regression_is_not_divided_by_classes() -> None:
    table("bank.csv", "customer,age,spent", lambda n: f"K{n},{n % 50},{n * 1.5}")
    run("recipe", "--data", "bank.csv", "--passive", "shop", "--label", "spent")
    recipe = load_recipe(Path("recipe.toml"))
    assert (recipe.task.kind, recipe.rows.split) == ("regression", "random")


def test_a_parquet_file_with_a_column_that_is_neither_number_nor_text() -> None:
    days = [[1, 2]] * ROWS
    columns = {
        "id": range(ROWS),
        "day": days,
        "rate": [0.5] * ROWS,
        "default": [True, False] * (ROWS // 2),
    }
    parquet.write_table(
        pa.table({name: pa.array(values) for name, values in columns.items()}), "bank.parquet"
    )
    args = [*BANK, "--data", "bank.parquet"]
    refused(*args, code=Code.DATA_INVALID)
    said = run(*args, "--drop", "day")
    assert_names(said, "day", "data.categorical")
    assert tables("bank.toml")["data"]["drop"] == ["day"]
    assert load_recipe(Path("recipe.toml")).rows.id_rules == ("trim",)


def test_repeated_ids_are_said_and_settled() -> None:
    table("shop.csv", "client,orders", lambda n: f"{'k1' if n in (5, 9) else f'k{n}'},{n % 9}")
    run(*BANK)
    assert_names(run(*SHOP), "client", "--id")
    assert tables("shop.toml")["data"]["duplicates"] == "first"


def test_the_active_partys_file_from_the_recipe_alone() -> None:
    run(*BANK)
    first = Path("bank.toml").read_text()
    run("party", "--data", "bank.csv", "--name", "bank", "--label", "default", "--force")
    assert Path("bank.toml").read_text() == first


def test_a_column_that_tells_the_label_is_looked_at() -> None:
    table(
        "bank.csv",
        "customer,age,reason,default",
        lambda n: f"K{n},{n % 50},{('', 'moved')[n % 2]},{n % 2}",
    )
    told = "look at     column 'reason' alone determines 'default' in every row. If it is not known when you predict,"
    said = run(*BANK)
    assert_names(said, "reason", "default")
    assert told in run(
        "party", "--data", "bank.csv", "--name", "bank", "--label", "default", "--force"
    )
    assert "look at" not in run(*BANK, "--drop", "reason", "--force")
    assert "look at" not in run(*BANK, "--task", "regression", "--force")


# --- at a terminal


def test_what_is_missing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    # Table, name, parties, label, server: defaults are shown.
    answers = ["bank.csv", "", "shop", "", ""]
    result = typed(monkeypatch, answers, "recipe")
    assert result.exit_code == 0, result.output
    assert_names(result.stderr, "bank.csv", "shop")
    asked = Path("recipe.toml").read_text(), Path("bank.toml").read_text()
    run(*BANK, "--force")
    assert (Path("recipe.toml").read_text(), Path("bank.toml").read_text()) == asked


def test_a_wrong_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        "nothing.csv",
        "bank.csv",
        "my bank",
        "bank",
        "shop, lab",
        "defualt",
        "default",
        "fed.example.org",
    ]
    answers += ["fed.example.org:7000", "bank.example.org:7001"]
    result = typed(monkeypatch, answers, "recipe")
    assert result.exit_code == 0, result.output
    assert_names(result.stderr, "defualt", "fed.example.org")
    assert [party.name for party in load_recipe(Path("recipe.toml")).passives] == ["shop", "lab"]


def test_an_unsure_id_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    run(*BANK)
    table("shop.csv", "email,client_no,orders", lambda n: f"a{n}@example.org,K{n},{n % 9}")
    result = typed(
        monkeypatch, ["", "client_no"], "party", "--data", "shop.csv", "--server", "127.0.0.1:7000"
    )
    assert result.exit_code == 0, result.output
    assert_names(result.stderr, "client_no", "bank")
    assert tables("shop.toml")["data"] == {
        "source": "shop.csv",
        "id": "client_no",
        "drop": ["email"],
    }


# --- refusals


def test_without_a_label_the_columns_of_few_values_are_named() -> None:
    table("bank.csv", "customer,age,stayed,gone", lambda n: f"K{n},{n % 50},{n % 2},{'ab'[n % 2]}")
    without = BANK[:-2]
    refused(*without)
    refused(*without, "--drop", "stayed")
    table("bank.csv", "customer,churn,stayed", lambda n: f"K{n},{n % 2},{n % 2}")
    refused(*without)


def test_a_flag_that_is_proposed_can_be_typed_as_it_stands() -> None:
    table("bank.csv", "Kd Nr,knr,age,default", lambda n: f"K-{n:04},K{n},{n % 50},{n % 2}")
    refused(*BANK)


def test_a_column_that_is_left_out_is_neither_id_nor_label() -> None:
    table("bank.csv", "Kd-Nr,knr,age,default", lambda n: f"K-{n:04},K{n},{n % 50},{n % 2}")
    # Both are good.
    refused(*BANK)
    assert "id          'knr', of 120 rows" in run(*BANK, "--drop", "Kd-Nr")
    assert tables("bank.toml")["data"]["drop"] == ["Kd-Nr"]
    # The label, and the id.
    for name in ("default", "knr"):
        refused(*BANK, "--id", "knr", "--drop", name, "--force")


def test_the_only_good_id_is_left_out() -> None:
    refused(*BANK, "--drop", "customer", code=Code.DATA_INVALID)
    assert "id          'name'" in run(*BANK, "--drop", "customer", "--id", "name")


@pytest.mark.parametrize("flag", ["--data", "--passive", "--label"])
def test_without_a_terminal_a_missing_flag_is_one_sentence(flag: str) -> None:
    at = BANK.index(flag)
    refused(*BANK[:at], *BANK[at + 2 :])


def test_nothing_is_replaced_without_force() -> None:
    run(*BANK)
    refused(*BANK, code=Code.FILE_INVALID)
    Path("recipe.toml").rename("kept.toml")
    refused(*BANK, code=Code.FILE_INVALID)
    Path("kept.toml").rename("recipe.toml")
    run(*SHOP)
    refused(*SHOP, code=Code.FILE_INVALID)
    run(*BANK, "--force")
    run(*SHOP, "--force")


def test_a_failed_write_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, text: str) -> None:
        if path.name == "bank.toml":
            raise InputError(
                Code.FILE_INVALID, f"{path}: cannot be written (No space left on device)"
            )
        write_atomic(path, text)

    monkeypatch.setattr("vfl.new.files.write_atomic", fail)
    refused(*BANK, code=Code.FILE_INVALID)


@pytest.mark.parametrize(
    "args",
    [
        ["--label", "defualt"],
        ["--id", "custmer"],
        ["--drop", "x"],
        ["--label", "name"],
        ["--task", "regression", "--label", "product"],
    ],
)
def test_columns_that_cannot_be_used(args: list[str]) -> None:
    refused(*BANK, *args, code=Code.DATA_INVALID)


@pytest.mark.parametrize("ids", [["default"], ["customer", "default"], ["customer", "customer"]])
def test_columns_with_two_roles(ids: list[str]) -> None:
    args = [word for name in ids for word in ("--id", name)]
    refused(*BANK, *args)


def test_a_label_with_one_value() -> None:
    table("bank.csv", "customer,age,default", lambda n: f"K{n},{n % 50},no")
    refused(*BANK, code=Code.DATA_INVALID)


def test_a_table_without_an_id() -> None:
    table("bank.csv", "age,income,default", lambda n: f"{n % 50},{n}.5,{n % 2}")
    refused(*BANK, code=Code.DATA_INVALID)


def test_a_table_without_rows() -> None:
    Path("bank.csv").write_text("customer,age,default\n")
    refused(*BANK, code=Code.DATA_INVALID)
    refused(*BANK, "--id", "customer", code=Code.DATA_INVALID)
    Path("bank.csv").write_text("default\n1\n")
    refused(*BANK, code=Code.DATA_INVALID)


def test_an_unsure_id_without_a_terminal() -> None:
    table("bank.csv", "ticket,age,default", lambda n: f"T{n},{n % 50},{n % 2}")
    refused(*BANK)


def test_files_that_are_no_tables() -> None:
    Path("x.doc").write_text("a\n")
    Path("x.parquet").write_text("a\n")
    for name in ("x.doc", "x.parquet", "y.csv"):
        refused(*BANK, "--data", name, code=Code.FILE_INVALID)


def test_parties_of_no_recipe() -> None:
    refused(*SHOP, code=Code.FILE_INVALID)
    run(*BANK)
    refused(*SHOP, "--name", "lab", code=Code.NOT_IN_RECIPE)
    refused(*SHOP, "--label", "town")
    refused(*BANK, "--passive", "bank", "--force")
    run(*BANK, "--passive", "lab", "--force")
    refused(*SHOP)


def test_a_passive_party_needs_columns_of_use() -> None:
    run(*BANK)
    table("shop.csv", "client,note", lambda n: f"K{n},note {n}")
    refused(*SHOP, code=Code.DATA_INVALID)


def test_help_has_examples_and_needs_no_torch() -> None:
    for command in ([], ["recipe"], ["party"]):
        assert "vfl new " in run(*command, "--help")
    code = "import sys, vfl.new.commands; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_list_of_commands_needs_neither_recipes_nor_numpy() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from vfl.cli import cli; "
        "assert 'certs' in CliRunner().invoke(cli, ['--help']).output; "
        "assert not {'numpy', 'torch', 'cryptography', 'vfl_common.config.recipe'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_list_of_runs_needs_no_recipe(tmp_path: Path) -> None:
    """A recipe's models take 0.2 s to build; the method of an unfinished run needs none of them."""
    folder = tmp_path / "first" / "bank"
    folder.mkdir(parents=True)
    (folder / "run.json").write_text('{"finished": false}')
    kinds = ("fedonce", "head", "head", "evaluate")
    recipe = {"seed": 7, "phases": [{"kind": kind} for kind in kinds]}
    (folder / "recipe.json").write_text(json.dumps(recipe))
    code = (
        "import sys; from click.testing import CliRunner; from vfl.cli import cli; "
        f"said = CliRunner().invoke(cli, ['runs', '--out', {str(tmp_path)!r}]).output; "
        "assert 'fedonce → head' in said and 'unfinished' in said, said; "
        "assert not {'torch', 'vfl_common.config.recipe'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.slow
def test_the_modules_of_the_check_need_no_scipy() -> None:
    code = "import sys, vfl_party.runtime.preflight; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_an_id_that_few_rows_have_for_themselves_is_doubted() -> None:
    said = run(*BANK, "--id", "age")
    few = r"only \d+ of 120 rows \(\d+ %\) have a unique id, and the others are left out; is this the id\?"
    assert re.search(rf"^look at +{few}  \(--id\)$", said, re.MULTILINE)
    assert "is this the id" not in run(*BANK, "--force")


def test_names_that_nobody_reads_are_cut() -> None:
    table("bank.csv", f"customer,{'x' * 5000},default", lambda n: f"K{n},{n % 9},{n % 2}")
    said = run(*BANK)
    assert "x" * 80 + "…" in said
    assert "x" * 81 not in said
