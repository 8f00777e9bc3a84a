"""What a result says to a person: whose ids it has, of which class a score is, which rows are not
in it.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

import vfl
from tests.harness.errors import assert_names, raises
from tests.integration.test_library import BANK, SHOP, TABLES
from vfl.cli import cli
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Labels, Table, load_table
from vfl_party.data.ids import IdCounts
from vfl_party.data.table import InputRows
from vfl_party.predict.results import (
    KEPT,
    Output,
    Predicted,
    id_names,
    id_values,
    label_name,
    list_all_rows,
    meaning,
)


def settings(**keys: Any) -> DataSettings:
    return DataSettings.model_validate({"source": "a.csv"} | keys)


# -- the ids


@pytest.mark.parametrize(
    ("keys", "names"),
    [
        ({"id": "customer"}, ("customer",)),
        ({"id": ["branch", "number"]}, ("branch", "number")),
        ({"source": "sklearn:digits"}, ("id",)),
        ({"source": "a.npz"}, ("id",)),
        (
            {
                "parts": {
                    "bank": {"source": "b.csv", "id": "who"},
                    "shop": {"source": "s.csv", "id": "mail"},
                }
            },
            ("who",),
        ),
        *(
            ({"id": name}, (f"id_{name}",))
            for name in ("phase", "split", "truth", "score", "class", "value", "state")
        ),
        ({"id": "score_1"}, ("id_score_1",)),
        # All of them, so that they stay different.
        ({"id": ["class", "id_class"]}, ("id_class", "id_id_class")),
    ],
)
def test_ids_have_the_names_of_their_columns(keys: dict[str, Any], names: tuple[str, ...]) -> None:
    assert id_names(settings(**keys)) == names


def test_a_folder_of_images_has_their_files(tmp_path: Path) -> None:
    assert id_names(settings(source=str(tmp_path))) == ("file",)


def test_an_id_of_several_columns_is_divided_again() -> None:
    # A separator in the last column stays there.
    two = id_values(("branch", "number"), ["a\x1f7", "b\x1f9\x1fx"])
    assert {name: column.to_pylist() for name, column in two.items()} == {
        "branch": ["a", "b"],
        "number": ["7", "9\x1fx"],
    }
    assert id_values(("who",), ["a\x1f7"])["who"].to_pylist() == ["a\x1f7"]
    assert [column.to_pylist() for column in id_values(("branch", "number"), []).values()] == [
        [],
        [],
    ]


# -- the numbers


@pytest.mark.parametrize(
    ("labels", "words"),
    [
        (Labels("binary", "a.csv", (0, 1)), "score_1: the probability that default is 1"),
        (
            Labels("binary", "a.csv", ("no", "yes")),
            "score_yes: the probability that default is yes",
        ),
        (
            Labels("multiclass", "a.csv", ("a", "b", "c")),
            "score_…: for each class, the probability that default is this class",
        ),
        (Labels("regression", "a.csv"), "value: the predicted default, in the unit of the data"),
    ],
)
def test_the_numbers_are_explained(labels: Labels, words: str) -> None:
    assert meaning(labels, "default") == words


def test_the_label_has_a_name_everywhere() -> None:
    assert label_name(settings(label="left")) == "left"
    assert label_name(settings(source="sklearn:digits")) == "target"
    assert (
        label_name(settings(parts={"bank": {"source": "b.csv", "id": "who", "label": "left"}}))
        == "left"
    )
    assert label_name(settings()) == "the label"


# -- the rows


@pytest.mark.parametrize(
    ("counts", "written"),
    [(None, 3), (IdCounts(3, 0, 0), 3), (IdCounts(1_203, 1_000, 200), 3), (IdCounts(5, 1, 1), 2)],
)
def test_rows_that_are_left_out_are_counted(counts: IdCounts | None, written: int) -> None:
    told = str(Predicted.of(Table("a.csv", ("a", "b", "c"), counts=counts), written))
    assert_names(told, "predicted")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run whose parties find their common rows, call their ids otherwise, and have
    odd ones.
    """
    folder = tmp_path_factory.mktemp("results")
    bank = BANK.rename(columns={"id": "class"}).head(100)
    bank["class"] = bank["class"].str.upper()
    # Two again, one without an id.
    odd = pd.concat([bank, bank.head(2), bank.tail(1).assign(**{"class": " "})])
    odd.to_csv(folder / "bank.csv", index=False)
    SHOP.tail(90).rename(columns={"id": "mail"}).to_csv(folder / "shop.csv", index=False)
    parties = {
        "bank": {"source": "bank.csv", "id": "class", "label": "target", "duplicates": "first"},
        "shop": {"source": "shop.csv", "id": "mail"},
    }
    rows = {"align": "psi", "id_rules": ["casefold"]}
    recipe = vfl.Recipe.from_dict(
        TABLES | {"rows": rows, "simulate": {"parties": parties}}, base=str(folder)
    )
    vfl.simulate(recipe, quiet=True, out=folder / "runs")
    return folder


def test_a_prediction_says_what_it_has_written(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    said = CliRunner().invoke(
        cli, ["predict", "--out", str(tmp_path / "a.csv")], catch_exceptions=False
    )
    assert_names("\n".join(said.stderr.splitlines()[1:]), "score_1", "70")
    found = pd.read_csv(tmp_path / "a.csv")
    assert list(found.columns) == ["id_class", "matched_id_class", "state", "score_1", "class"]
    own = pd.read_csv("bank.csv")
    # Each row, in its order and spelling.
    assert found["id_class"].tolist() == own["class"].tolist()
    common = set(SHOP["id"].tail(90))
    spelt = [each.lower() if each.lower() in common else "" for each in own["class"]]
    assert found["matched_id_class"].fillna("").tolist() == spelt[:100] + [""] * 3
    states = ["scored" if each else "not at every party" for each in spelt[:100]]
    assert found["state"].tolist() == [
        *states,
        "with a repeated id",
        "with a repeated id",
        "without an id",
    ]
    assert (found["score_1"].notna() == (found["state"] == "scored")).all()
    assert (found["class"].notna() == (found["state"] == "scored")).all()


def test_scores_are_those_of_their_rows_whatever_the_order(folder: Path) -> None:
    (run,) = (vfl.Run.load(each) for each in (folder / "runs").glob("*/"))
    bank, shop = BANK.rename(columns={"id": "class"}), SHOP.rename(columns={"id": "mail"})
    one, other = (
        pd.DataFrame(run.predict({"bank": each, "shop": shop})).set_index("id_class")["score_1"]
        for each in (bank, bank.sample(frac=1.0, random_state=3))
    )
    assert other.index.tolist() != one.index.tolist()
    assert one.notna().sum() == len(shop)
    pd.testing.assert_series_equal(one, other.loc[one.index])


def test_a_result_is_written_like_the_input_if_asked(tmp_path: Path) -> None:
    ids = pa.chunked_array([["KD-01", "KD;02", None, "KD-01"]])
    own = InputRows((ids,), np.array([0, 0, 1, 2], np.uint8), ";", ",")
    table = Table("a.csv", ("kd-01", "kd;02"), own=own, places_N=np.arange(2)).select(
        np.array([1, 0])
    )
    scores = {
        "score_yes": np.array([0.25, 1e-9], np.float32),
        "class": ["no", "yes"],
        "value": [1, 2],
    }
    found = list_all_rows(("customer",), table, scores)
    output = Output(tmp_path / "a.csv", like_input=True)
    output.write(found, own)
    assert output.path.read_text().splitlines() == [
        "customer;matched_customer;state;score_yes;class;value",
        "KD-01;kd-01;scored;1e-9;yes;2",
        '"KD;02";"kd;02";scored;0,25;no;1',
        ";;without an id;;;",
        "KD-01;;with a repeated id;;;",
    ]
    assert stat.S_IMODE(output.path.stat().st_mode) == 0o600


def test_the_command_writes_like_the_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    BANK.to_csv("bank.csv", index=False, sep=";", decimal=",")
    SHOP.to_csv("shop.csv", index=False)
    parties = {
        "bank": {"source": "bank.csv", "id": "id", "label": "target"},
        "shop": {"source": "shop.csv", "id": "id"},
    }
    vfl.simulate(
        vfl.Recipe.from_dict(TABLES | {"simulate": {"parties": parties}}), quiet=True, out="runs"
    )
    for flags, how in ((["--like-input"], {"sep": ";", "decimal": ","}), ([], {})):
        said = CliRunner().invoke(
            cli, ["predict", "--out", f"{len(flags)}.csv", *flags], catch_exceptions=False
        )
        assert said.exit_code == 0, said.output
        found = pd.read_csv(f"{len(flags)}.csv", **how)
        assert found["id"].tolist() == BANK["id"].tolist()
        assert found["score_1"].between(0, 1).all()
    assert found["score_1"].tolist() == pytest.approx(
        pd.read_csv("1.csv", sep=";", decimal=",")["score_1"].tolist()
    )


def test_what_cannot_be_written_like_the_input_is_refused(tmp_path: Path) -> None:
    for flags in ({"like_input": True}, {"spreadsheet": True}):
        with raises(InputError, Code.CONFIG_INVALID):
            Output(tmp_path / "a.parquet", **flags).check(settings())
    with raises(InputError, Code.CONFIG_INVALID):
        Output(tmp_path / "a.csv", like_input=True).check(settings(source="a.parquet"))
    Output(tmp_path / "a.csv", like_input=True).check(settings(source="A.CSV.GZ"))


def test_text_that_a_spreadsheet_computes_is_told_and_guarded_if_asked(tmp_path: Path) -> None:
    odd = ["=1+1", "+A1", "-x", "@y", "\tz", "-17", "+49301234", "K=1", None]
    table = pa.table({"id": odd, "score_1": [-0.5] * 9, "class": ["a"] * 9})
    path = tmp_path / "a.csv"
    text = f"{path}: 5 text cells begin with =, +, -, @ or a tab, which a spreadsheet treats as formulas; add --spreadsheet"
    assert Output(path).advice(table).startswith(text)
    assert Output(tmp_path / "a.parquet").advice(table) == ""
    guarded = Output(path, spreadsheet=True)
    assert guarded.advice(table) == ""
    guarded.write(table, None)
    found = pyarrow.csv.read_csv(
        path, convert_options=pyarrow.csv.ConvertOptions(column_types={"id": pa.string()})
    )
    assert found["id"].to_pylist() == [
        "'=1+1",
        "'+A1",
        "'-x",
        "'@y",
        "'\tz",
        "-17",
        "+49301234",
        "K=1",
        "",
    ]
    assert found["score_1"].to_pylist() == [-0.5] * 9


def test_ids_of_parquet_files_stay_numbers(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [7, 5, 6], "x": [1.0, 2.0, 3.0]}), tmp_path / "a.parquet")
    keeping = settings(source=str(tmp_path / "a.parquet"), id="id").keeping_rows()
    table = load_table(keeping, with_label=False)
    assert table.ids == ("5", "6", "7")
    found = list_all_rows(("id",), table, {"value": np.array([0.5, 0.6, 0.7])})
    assert found.to_pydict() == {
        "id": [7, 5, 6],
        "matched_id": ["7", "5", "6"],
        "state": ["scored"] * 3,
        "value": [0.7, 0.5, 0.6],
    }


def test_ids_of_frames_are_their_own_under_the_name_that_files_have(folder: Path) -> None:
    (run,) = (vfl.Run.load(each) for each in (folder / "runs").glob("*/"))
    bank = BANK.rename(columns={"id": "class"}).iloc[40:50].drop(columns="target")
    bank["class"] = bank["class"].str.upper()
    found = run.predict({"bank": bank, "shop": SHOP.rename(columns={"id": "mail"})})
    assert list(found) == ["id_class", "matched_id_class", "state", "score_1", "class"]
    assert found["id_class"] == bank["class"].tolist()
    assert set(found["class"]) <= {0, 1}


def test_kept_predictions_have_the_same_names(folder: Path) -> None:
    (run,) = (vfl.Run.load(each) for each in (folder / "runs").glob("*/"))
    assert list(run.predictions) == [
        "phase",
        "split",
        "id_class",
        "matched_id_class",
        "truth",
        "score_1",
        "class",
    ]


def test_the_predictions_of_a_run_made_before_are_read_as_they_are(
    folder: Path, tmp_path: Path
) -> None:
    (path,) = (folder / "runs").glob(f"*/bank/{KEPT}")
    before = pd.read_parquet(path).rename(columns={"id_class": "id", "score_1": "score"})
    (run,) = (folder / "runs").glob("*/")
    (tmp_path / "run" / "bank").mkdir(parents=True)
    (tmp_path / "run" / "summary.json").write_bytes((run / "summary.json").read_bytes())
    before.to_parquet(tmp_path / "run" / "bank" / KEPT)
    assert vfl.Run.load(tmp_path / "run").predictions == before.to_dict("list")
