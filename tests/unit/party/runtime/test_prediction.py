"""What a prediction reads, the trained run, and what it writes: whole, and for its owner's eyes."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet
import pytest

from tests.harness import cases
from tests.harness.errors import assert_names, raises
from vfl_common.config.base import parse
from vfl_common.config.data import DataSettings
from vfl_common.config.recipe import Recipe
from vfl_common.config.sources import FRAME
from vfl_common.errors import Code, InputError
from vfl_common.process.program import run_for_status
from vfl_common.run_folder import create
from vfl_common.stages import Planned
from vfl_party.base.checkpoint import CheckpointStore
from vfl_party.cli import cli
from vfl_party.data import Preprocessor, Table, load_table, make_loader
from vfl_party.predict.results import write_table
from vfl_party.predict.run import TrainedRun, load_trained, prediction_data, unseen

TABLE = pa.table({"id": ["a", "b"], "score": [0.25, 0.75]})


@pytest.mark.parametrize(
    ("name", "read"),
    [("out.csv", pyarrow.csv.read_csv), ("out.parquet", pyarrow.parquet.read_table)],
)
def test_only_the_owner_may_read_the_scores(
    name: str, read: Callable[[Path], pa.Table], tmp_path: Path
) -> None:
    path = tmp_path / name
    (tmp_path / f".{name}.{os.getpid()}").write_text(
        "left by a killed process that had this number"
    )
    write_table(path, TABLE)
    assert read(path).equals(TABLE)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_has_gone_is_one_sentence(tmp_path: Path) -> None:
    with raises(InputError, Code.FILE_INVALID, names="out.csv"):
        write_table(tmp_path / "gone" / "out.csv", TABLE)


# -- the rows

STATE = {"preprocessor": None}


def test_rows_may_come_from_any_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    asked = DataSettings(source="sqlite:////old.db", query="select 1", id=("who",))
    for given, found in (
        ("new.csv", f"{tmp_path}/new.csv"),
        ("../new.csv", f"{tmp_path.parent}/new.csv"),
        ("sqlite:///new.db", f"sqlite:///{tmp_path}/new.db"),
        ("SQLite:///new.db", f"sqlite:///{tmp_path}/new.db"),
        ("postgresql://ada@db.example.org/x", "postgresql://ada@db.example.org/x"),
        ("sklearn:iris", "sklearn:iris"),
    ):
        assert prediction_data(asked, given, STATE).source == found
    assert prediction_data(asked, None, STATE, "select 2").query == "select 2"
    file = DataSettings(source="a.csv", id=("who",))
    assert prediction_data(file, "sqlite:///new.db", STATE, "select 2").query == "select 2"
    with raises(InputError, Code.CONFIG_INVALID, names=("--data", "--query")):
        prediction_data(file, "postgresql://a:hidden@h/x", STATE)
    with raises(InputError, Code.CONFIG_INVALID, names=("--query", "--data")):
        prediction_data(file, None, STATE, "select 2")


def test_advice_about_new_rows_names_no_setting_of_the_program(tmp_path: Path) -> None:
    rows = {"who": ["a", "b", "c", "d"], "age": [1.0, 2.0, 3.0, 4.0], "town": ["x", "y", "x", "y"]}
    pyarrow.csv.write_csv(pa.table(rows), tmp_path / "old.csv")
    settings = DataSettings(source=str(tmp_path / "old.csv"), id=("who",))
    old = load_table(settings, with_label=False)
    made = Preprocessor.fit(old, np.arange(4), one_hot=True, flatten=True, settings=settings)
    for changed in (
        {"age": ["1", "2", "SECRET", "4"]},
        {"age": ["1", "2", "", "4"]},
        {"age": None},
        {"age": None, "Age": [1, 2, 3, 4]},
    ):
        new = {name: values for name, values in (rows | changed).items() if values is not None}
        pyarrow.csv.write_csv(pa.table(new), tmp_path / "new.csv")
        read = prediction_data(settings, str(tmp_path / "new.csv"), {"preprocessor": made.state()})
        with raises(InputError, Code.DATA_INVALID, names=("age", "new.csv")) as caught:
            load_table(read, with_label=False)
        assert not re.search(
            r"data\.(numeric|columns|categorical|missing)|SECRET", str(caught.value)
        )


def test_categories_that_training_never_had_are_counted(tmp_path: Path) -> None:
    def read(towns: list[str]) -> Table:
        rows = {
            "who": [str(row) for row in range(len(towns))],
            "town": towns,
            "kind": ["k"] * len(towns),
        }
        pyarrow.csv.write_csv(pa.table(rows), tmp_path / "rows.csv")
        return load_table(settings, with_label=False)

    settings = DataSettings(source=str(tmp_path / "rows.csv"), id=("who",))
    made = Preprocessor.fit(
        read(["x", "y", ""]), np.arange(3), one_hot=True, flatten=True, settings=settings
    )
    assert made.unseen(read(["z", "y", "", "z", "v", "x"])) == {"town": 3}
    assert made.unseen(read(["y", "", "x"])) == {}


def numbers(rows: int, seed: int = 0) -> dict[str, pa.Array]:
    """Columns as tables have them: ages, incomes of a few rich people, a rare flag, an empty and a
    constant column.
    """
    drawn = np.random.default_rng(seed)
    columns = {
        "age": drawn.integers(18, 90, rows),
        "income": drawn.lognormal(10, 0.7, rows),
        "flag": (drawn.random(rows) < 0.005).astype(int),
        "empty": [None] * rows,
        "one": [1] * rows,
    }
    return {"who": pa.array([f"u{row}" for row in range(rows)])} | {
        name: pa.array(values, pa.float64()) for name, values in columns.items()
    }


@pytest.fixture(scope="module")
def spanned() -> Preprocessor:
    table = make_loader({"p": pa.table(numbers(2_000))})(SPANNED, False)
    fitted = Preprocessor.fit(table, np.arange(1_500), one_hot=True, flatten=True, settings=SPANNED)
    return Preprocessor.from_state(json.loads(json.dumps(fitted.state())))


SPANNED = DataSettings(source=f"{FRAME}p", id=("who",), missing="mean")


@pytest.mark.parametrize(
    ("column", "change", "outside"),
    [
        ("age", lambda x: x, 0),
        # Cents.
        ("income", lambda x: x * 100, 1_000),
        # Thousands: none is beyond the numbers of training.
        ("income", lambda x: x / 1000, 1_000),
        ("age", lambda x: np.where(np.arange(1_000) == 7, 999, x), 1),
        ("age", lambda x: np.where(np.arange(1_000) == 7, np.nan, x), 0),
        ("flag", lambda x: x * 100 + 100, 1_000),
        ("one", lambda x: x + 1, 1_000),
        # Nothing is known.
        ("empty", lambda x: x * 0 + 5, 0),
    ],
)
def test_numbers_outside_those_of_training_are_counted(
    column: str, change: Callable[[np.ndarray], np.ndarray], outside: int, spanned: Preprocessor
) -> None:
    new = numbers(1_000, seed=1)
    before = np.zeros(1_000) if column == "empty" else new[column].to_numpy()
    new[column] = pa.array(change(before), pa.float64())
    found = spanned.outside(make_loader({"p": pa.table(new)})(SPANNED, False))
    assert found == (
        {column: pytest.approx(outside, abs=0.02 * 1_000 if outside == 1_000 else 0)}
        if outside
        else {}
    )


def test_a_few_rows_may_all_be_rare(spanned: Preprocessor) -> None:
    new = {name: column[:4] for name, column in numbers(1_000, seed=1).items()} | {
        "age": pa.array([18.0, 89, 89, 18])
    }
    assert spanned.outside(make_loader({"p": pa.table(new)})(SPANNED, False)) == {}


def test_a_run_from_before_spans_were_kept_predicts(spanned: Preprocessor) -> None:
    state = {key: value for key, value in spanned.state().items() if key != "spans"}
    new = numbers(1_000, seed=1) | {"income": pa.array(np.full(1_000, 1e9))}
    assert (
        Preprocessor.from_state(state).outside(make_loader({"p": pa.table(new)})(SPANNED, False))
        == {}
    )


def test_too_many_numbers_outside_are_refused_if_the_recipe_says_so(spanned: Preprocessor) -> None:
    new = numbers(1_000, seed=1)
    income = new["income"].to_numpy()
    new["income"] = pa.array(np.where(np.arange(1_000) < 300, income * 1e6, income))
    table = make_loader({"p": pa.table(new)})(SPANNED, False)

    def told(**predict: float) -> list[str]:
        recipe = Recipe.model_validate(cases.recipe(2) | {"predict": predict})
        state = {"preprocessor": spanned.state()}
        return unseen(TrainedRun("one", recipe, recipe.model.encoder, state, Path(), {}), table)

    assert told() == told(refuse_outside=0.3)
    assert_names(
        "\
    ".join(told()),
        "income",
        "300",
    )
    with raises(InputError, Code.DATA_INVALID, names=("income", "predict.refuse_outside")):
        told(refuse_outside=0.29)


def test_what_a_prediction_refuses_changes_the_digest_only_if_it_is_named() -> None:
    plain, given = cases.recipe(2), cases.recipe(2) | {"predict": {"refuse_outside": 0.1}}
    assert "predict" not in json.loads(Recipe.model_validate(plain).canonical_json())
    assert (
        Recipe.model_validate(plain | {"predict": {}}).digest()
        == Recipe.model_validate(plain).digest()
    )
    assert Recipe.model_validate(given).digest() != Recipe.model_validate(plain).digest()


# -- the trained run

PARTY = """
name = "p1"
recipe = "recipe.toml"
server = "localhost:1"
tls = { ca = "ca.pem", certificate = "p1.pem", key = "p1.key" }
"""
DAMAGE = {
    "empty": b"",
    "garbage": b"\xff\x00garbage",
    "cut": b'{"phases": [',
    "deep": b"[" * 100_000,
    "list": b"[]",
    "another": b'{"phases": 3}',
}


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """The folder of ``p1`` in a finished run of three rounds."""
    folder = create(tmp_path, "one", "p1", parse(Recipe, cases.recipe(2), "recipe"))
    folder.note(job="train", plan=[asdict(Planned("splitnn", 3, None))])
    store = CheckpointStore(folder.path / "checkpoints", keep=2)
    for number in (1, 2, 3):
        store.save(f"00000{number}.splitnn.{number}", {"job": {"number": number}})
    folder.note(trained=True)
    (tmp_path / "party.toml").write_text(PARTY)
    return folder.path


def predicting(trained: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[str]]:
    """Returns exit code and standard error of ``vfl-party predict``, which fails before it asks
    anybody.
    """
    args = ["predict", str(trained.parents[1] / "party.toml"), "--run", str(trained.parent)]
    return run_for_status(
        lambda: cli(args, standalone_mode=False)
    ), capsys.readouterr().err.splitlines()


def test_a_whole_run_gives_its_last_checkpoint(trained: Path) -> None:
    assert (
        load_trained(trained.parent, "p1").state
        == load_trained(trained, "p1").state
        == {"number": 3}
    )


def test_a_run_from_before_the_phases_named_the_method_predicts(trained: Path) -> None:
    path = trained / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"method": "splitnn"}))
    assert load_trained(trained, "p1").recipe == parse(Recipe, cases.recipe(2), "recipe")


@pytest.mark.parametrize("name", ["run.json", "recipe.json"])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_run_is_one_sentence(
    name: str, damage: bytes, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / name).write_bytes(damage)
    code, (told,) = predicting(trained, capsys)
    assert code == 2
    # And its run.json or recipe.json; one that says nothing: unfinished.
    assert told.startswith(f"error: {trained}")


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_without_the_last_checkpoint_no_older_one_predicts(
    damage: bytes, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = max((trained / "checkpoints").iterdir())
    newest.write_bytes(damage)
    code, (told,) = predicting(trained, capsys)
    assert code == 2
    assert_names(told, "splitnn.2", "p1")


@pytest.mark.parametrize("name", ["recipe.json", "checkpoints"])
@pytest.mark.parametrize("there", [True, False])
def test_something_else_in_a_file_s_place_is_one_sentence(
    name: str, there: bool, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (trained / name).rename(trained / "away")
    if there and name == "checkpoints":
        (trained / name).write_text("a file")
    elif there:
        (trained / name).mkdir()
    code, (told,) = predicting(trained, capsys)
    assert code == 2
    assert str(trained) in told
