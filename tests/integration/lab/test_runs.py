"""``vfl runs``, the newest run where a command wants one, and ``vfl predict``."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sqlite3
import stat
import zipfile
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner, Result

import vfl
from tests.harness.errors import assert_names, raises
from tests.integration.test_library import BANK, RECIPE, SHOP, TABLES
from tests.unit.lab.test_report import summary_of
from vfl.cli import cli
from vfl.simulation.federation import FILE, Origin
from vfl.summary.reading import find_newest_run, find_runs
from vfl_common.errors import Code, InputError


def invoke(*args: object) -> Result:
    return CliRunner().invoke(cli, list(map(str, args)), standalone_mode=False)


def sentence(result: Result) -> str:
    """The one sentence that a person would read."""
    assert isinstance(result.exception, InputError), result.exception
    return str(result.exception)


# -- listing

# 2026-01-01 12:00 UTC.
BEGAN_S = 1_767_268_800


def process(folder: Path, at: int, *events: str, **facts: Any) -> Path:
    """One process's folder in a run that began ``at`` minutes after noon."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(
        json.dumps({"job": "train", "run_id": folder.parent.name} | facts)
    )
    (folder / "recipe.json").write_text(
        json.dumps({"name": "case", "method": "splitnn", "seed": 7})
    )
    if events:
        lines = [json.dumps({"event": event, "message": event}) + "\n" for event in events]
        (folder / "log.jsonl").write_text("".join(lines))
    os.utime(folder / "recipe.json", (BEGAN_S + 60 * at,) * 2)
    return folder


def finish(folder: Path, task: str = "multiclass", **more: Any) -> None:
    summary = summary_of(2, task)
    (folder / "summary.json").write_text(summary.model_copy(update=more).model_dump_json())


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder ``runs`` beside a person, with runs of every state and other things."""
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs"
    process(out / "first" / "bank", 0, "completed", finished=True)
    finish(out / "first")
    process(out / "second" / "bank", 10, "completed", finished=True)
    finish(out / "second", "binary")
    process(out / "foretold" / "bank", 20, job="predict", finished=True)
    finish(out / "foretold", job="predict", metrics={})
    process(out / "broken" / "bank", 30, "round", "failed")
    process(out / "broken" / "server", 30, "stopped")
    process(out / "ended" / "bank", 31, "failed", "stopped")
    # It was started again.
    process(out / "going" / "bank", 32, "failed", "round")
    process(out / "silent" / "bank", 33)
    process(out / "torn" / "bank", 34)
    (out / "torn" / "summary.json").write_text('{"run_id": 3')
    (out / "torn" / "bank" / "run.json").write_text("[" * 100_000)
    process(out / "of-a-passive-party" / "shop", 5, finished=True)
    process(out / "sweep" / "one" / "bank", 40, finished=True)
    process(out / "sweep" / "two" / "bank", 40, finished=True)
    os.utime(out / "sweep", (BEGAN_S - 60,) * 2)
    (out / "charts").mkdir()
    (out / "notes.txt").write_text("a file")
    return out


def test_every_folder_is_one_line(runs: Path) -> None:
    done = invoke("runs")
    assert done.exception is None
    lines = {line.split()[0]: line for line in done.output.splitlines() if line}
    order = [name for name in lines if name in {path.name for path in runs.iterdir()} | {"sweep/"}]
    assert order == [
        *(
            "torn",
            "silent",
            "going",
            "ended",
            "broken",
            "foretold",
            "second",
            "of-a-passive-party",
            "first",
            "sweep/",
        )
    ]
    states = {
        "torn": "damaged",
        "silent": "unfinished",
        "going": "unfinished",
        "ended": "stopped",
        "broken": "failed",
    }
    assert all(state in lines[name] for name, state in states.items())
    assert "2026-01-01 12:10" in lines["second"]
    assert lines["run"].split() == [
        "run",
        "began",
        "(UTC)",
        "method",
        "seed",
        "state",
        "accuracy",
        "auc",
        "bytes",
        "seconds",
    ]
    assert lines["second"].split()[3:] == [
        "splitnn",
        "3",
        "finished",
        "0.85",
        "0.9",
        "10",
        "MB",
        "3.9",
    ]
    assert lines["first"].split()[6:8] == ["0.97", "0.999"]
    assert "prediction" in lines["foretold"]
    assert "2 runs" in lines["sweep/"]
    assert "finished" in lines["of-a-passive-party"]
    assert "folders without a run: charts" in done.output
    assert "unfinished: running, killed, or pruned or failed in a search" in done.output


def test_a_long_name_cuts_no_number(runs: Path) -> None:
    process(runs / ("long-" * 11) / "bank", 50, "completed", finished=True)
    finish(runs / ("long-" * 11), "binary")
    (line,) = (line for line in invoke("runs").output.splitlines() if line.startswith("long-"))
    assert line.split()[-5:] == ["0.85", "0.9", "10", "MB", "3.9"]


def test_a_run_began_when_its_id_says_and_failed_if_a_process_says_so(runs: Path) -> None:
    copied = runs / "20251231-235900-case-1f2e"
    process(copied / "bank", 99)
    (copied / "shop").mkdir()
    (copied / "shop" / "stderr").write_text("a warning\nerror: shop.csv: no such file\n")
    (copied / "bank" / "stderr").write_text("stopped\n")
    found = next(each for each in find_runs(runs)[0] if each.folder == copied)
    assert (found.state, found.as_json()["began"]) == ("failed", "2025-12-31T23:59:00.000Z")


def test_json_has_a_line_a_run(runs: Path) -> None:
    found = {
        each["run"]: each for each in map(json.loads, invoke("runs", "--json").output.splitlines())
    }
    assert list(found)[-2:] == ["first", "sweep"]
    second = found["second"]
    assert second["folder"] == "runs/second"
    assert (second["state"], second["job"], second["seed"]) == ("finished", "train", 3)
    assert second["metrics"]["test"]["auc"] == 0.9
    assert second["message_bytes"] > second["payload_bytes"] > 0
    assert second["seconds"] > 0
    assert (found["broken"]["method"], found["broken"]["seconds"]) == ("splitnn", None)
    assert (found["torn"]["state"], found["sweep"]["runs"]) == ("damaged", 2)
    inner = invoke("runs", "--out", "runs/sweep", "--json").output.splitlines()
    assert {json.loads(each)["run"] for each in inner} == {"one", "two"}


def test_a_folder_without_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sentence(invoke("runs"))
    (tmp_path / "runs").mkdir()
    assert_names(invoke("runs").output, "no runs")
    assert invoke("runs", "--json").output == ""
    sentence(invoke("report"))


def test_the_newest_finished_run_is_taken_and_named(runs: Path) -> None:
    assert find_newest_run(runs).folder == runs / "second"
    done = invoke("report")
    assert_names(done.stderr, "runs/second")
    assert "bytes.png" in done.stdout
    sentence(invoke("export", "tensorboard"))
    given = invoke("report", "runs/first")
    assert (given.exception, given.stderr) == (None, "")


def test_a_baseline_is_not_taken_for_the_newest_run(runs: Path) -> None:
    process(runs / "alone" / "bank", 50, "completed", finished=True)
    finish(
        runs / "alone", parties=[each for each in summary_of(2).parties if each.role != "passive"]
    )
    assert_names(invoke("report").stderr, "federation")
    for name in ("first", "second", "of-a-passive-party"):
        shutil.rmtree(runs / name)
    said = "using the newest finished run (of one party): runs/alone\n"
    assert invoke("report").stderr == said


def test_a_folder_that_cannot_be_listed_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with raises(InputError, Code.FILE_INVALID):
        find_runs(tmp_path / "file")


# -- predicting


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the parties' files, new rows of both, and ``runs`` with one run of them."""
    folder = tmp_path_factory.mktemp("simulated")
    BANK.to_csv(folder / "bank.csv", index=False)
    SHOP.to_csv(folder / "shop.csv", index=False)
    BANK.drop(columns="target").tail(9).assign(more=1).to_csv(folder / "new-bank.csv", index=False)
    SHOP.tail(9).to_parquet(folder / "new-shop.parquet")
    SHOP[["id", "worst area"]].to_csv(folder / "less.csv", index=False)
    where = {
        "bank": {"source": "bank.csv", "id": "id", "label": "target"},
        "shop": {"source": "shop.csv", "id": "id"},
    }
    recipe = vfl.Recipe.from_dict(TABLES | {"simulate": {"parties": where}}, base=str(folder))
    vfl.simulate(recipe, quiet=True, out=folder / "runs")
    return folder


@pytest.fixture
def here(simulated: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(simulated)
    return simulated


def test_a_run_predicts_its_own_rows_again(here: Path, tmp_path: Path) -> None:
    # But it is taken.
    assert "--output" not in invoke("predict", "--help").output
    done = invoke("predict", "--output", tmp_path / "again.csv")
    assert done.exception is None
    assert done.stdout == f"{tmp_path / 'again.csv'}\n"
    assert_names(done.stderr, "score_1", "120")
    assert_names("\n".join(done.stderr.splitlines()[1:]), "score_1", "120")
    found = pd.read_csv(tmp_path / "again.csv").set_index("id")["score_1"]
    assert len(found) == len(BANK)
    run = vfl.Run.load(find_newest_run(here / "runs").folder)
    kept = pd.DataFrame(run.predictions).set_index("id")["score_1"]
    assert found[kept.index].tolist() == pytest.approx(kept.tolist(), abs=1e-6)
    assert run.predict()["id"] == list(found.index)


def test_new_rows_of_files(here: Path, tmp_path: Path) -> None:
    run, output = find_newest_run(here / "runs").folder, tmp_path / "new.parquet"
    options = ("--data", "bank=new-bank.csv", "--data", "shop=new-shop.parquet", "--output", output)
    assert invoke("predict", run, *options).exception is None
    found = pd.read_parquet(output)
    want = vfl.Run.load(run).predict(
        {"bank": BANK.drop(columns="target").tail(9), "shop": SHOP.tail(9)}
    )
    pd.testing.assert_frame_equal(found, pd.DataFrame(want), check_dtype=False)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    sentence(invoke("predict", run, *options))


def test_new_categories_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    towns = SHOP.assign(town=["Graz", "Linz"] * (len(SHOP) // 2))
    towns.to_csv("shop.csv", index=False)
    BANK.to_csv("bank.csv", index=False)
    parties = {
        "bank": {"source": "bank.csv", "id": "id", "label": "target"},
        "shop": {"source": "shop.csv", "id": "id"},
    }
    vfl.simulate(
        vfl.Recipe.from_dict(TABLES | {"simulate": {"parties": parties}}, base="."),
        quiet=True,
        out="runs",
    )
    assert "never had" not in invoke("predict").stderr
    towns.assign(town=["SECRET", *towns["town"][1:]]).to_csv("new.csv", index=False)
    done = invoke(
        "predict", "--data", "bank=bank.csv", "--data", "shop=new.csv", "--out", "new-scores.csv"
    )
    assert_names(done.stderr, "town", "score_1")
    assert "SECRET" not in done.stderr
    with zipfile.ZipFile("new.zip", "w") as archive:
        archive.write("new.csv")
    packed = ("--data", "bank=bank.csv", "--data", "shop=new.zip/new.csv", "--out", "packed.csv")
    assert invoke("predict", *packed).exit_code == 0
    assert Path("packed.csv").read_bytes() == Path("new-scores.csv").read_bytes()


def test_a_query_gives_the_rows_of_a_database(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    BANK.to_csv("bank.csv", index=False)
    with contextlib.closing(sqlite3.connect("shop.db")) as opened:
        SHOP.to_sql("clients", opened, index=False)
    parties = {
        "bank": {"source": "bank.csv", "id": "id", "label": "target"},
        "shop": {"source": "sqlite:///shop.db", "query": "select * from clients", "id": "id"},
    }
    vfl.simulate(
        vfl.Recipe.from_dict(TABLES | {"simulate": {"parties": parties}}, base="."),
        quiet=True,
        out="runs",
    )
    invoke(
        "predict", "--data", "bank=bank.csv", "--data", "shop=sqlite:///shop.db", "--out", "all.csv"
    )
    few = sorted(SHOP["id"])[:7]
    BANK[BANK["id"].isin(few)].to_csv("few.csv", index=False)
    query = "shop=select * from clients order by id limit 7"
    done = invoke("predict", "--data", "bank=few.csv", "--query", query, "--out", "few-scores.csv")
    assert done.exit_code == 0, done.stderr
    whole, some = (
        pd.read_csv("all.csv", dtype={"id": str}),
        pd.read_csv("few-scores.csv", dtype={"id": str}),
    )
    assert sorted(some["id"]) == few
    pd.testing.assert_frame_equal(some, whole[whole["id"].isin(few)].reset_index(drop=True))


@pytest.mark.parametrize(
    "options",
    [
        ["--data", "bank"],
        ["--data", "bank=gone.csv"],
        ["--data", "bank=sqlite:///gone.db", "--data", "shop=new-shop.parquet"],
        ["--query", "bank"],
        ["--query", "bnk=select 1"],
        ["--data", "bank=bank.csv", "--query", "bank=select 1"],
        ["--data", "bank=bank.csv", "--data", "bank=bank.csv"],
        ["--data", "bnk=bank.csv"],
        ["--data", "bank=bank.csv"],
        ["--data", "bank=bank.csv", "--data", "shop=less.csv"],
        ["--out", "out.txt"],
        ["--output", "gone/out.csv"],
    ],
)
def test_a_prediction_that_cannot_be_made(options: list[str], here: Path) -> None:
    sentence(invoke("predict", find_newest_run(here / "runs").folder, *options))
    assert not (here / "predictions.csv").exists()


def test_a_run_of_which_only_one_party_is_here(here: Path, tmp_path: Path) -> None:
    run = find_newest_run(here / "runs").folder
    alone = tmp_path / run.name
    shutil.copytree(run, alone, ignore=shutil.ignore_patterns("shop", FILE))
    sentence(invoke("predict", alone))
    shutil.copy(run / FILE, alone / FILE)
    sentence(invoke("predict", alone))


def test_parties_of_two_runs_do_not_predict_together(here: Path, tmp_path: Path) -> None:
    mixed = Path(shutil.copytree(find_newest_run(here / "runs").folder, tmp_path / "mixed"))
    facts = json.loads((mixed / "shop" / "run.json").read_text())
    (mixed / "shop" / "run.json").write_text(json.dumps(facts | {"run_id": "another"}))
    with raises(InputError, Code.CHECKPOINT_INVALID, names=("bank", "shop")):
        vfl.Run.load(mixed).predict(output=tmp_path / "mixed.csv")
    assert not (tmp_path / "mixed.csv").exists()


@pytest.mark.parametrize(
    "content",
    ["", "[]", '{"base": "/", "data": {"bank": {"source": 3}}}', '{"base": "/", "data": 3}'],
)
def test_a_damaged_note_of_the_data_is_one_sentence(content: str, tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(content)
    with raises(InputError, Code.FILE_INVALID, names="simulated.json"):
        Origin.of(tmp_path)


def test_rows_that_were_in_memory_must_be_given_again(tmp_path: Path) -> None:
    run = vfl.simulate(
        RECIPE, {"bank": vfl.Data(BANK, label="target"), "shop": SHOP}, quiet=True, out=tmp_path
    )
    with raises(InputError, Code.DATA_INVALID, names=("bank", "shop")):
        run.predict()
    rows = {"bank": BANK.head(3), "shop": SHOP.head(3)}
    assert (
        len(run.predict(rows, output=tmp_path / "some.csv")["score_1"])
        == len(pd.read_csv(tmp_path / "some.csv"))
        == 3
    )


def test_own_rows_of_a_party_with_labels_only_and_of_a_part_of_a_set(tmp_path: Path) -> None:
    parties = [TABLES["parties"][0] | {"features": False}, TABLES["parties"][1]]
    where = {"data": {"source": "sklearn:breast_cancer", "limit": 60}, "scheme": "columns"}
    run = vfl.simulate(TABLES | {"parties": parties, "simulate": where}, quiet=True, out=tmp_path)
    kept = pd.DataFrame(run.predictions).set_index("id")["score_1"]
    found = pd.DataFrame(run.predict()).set_index("id")["score_1"]
    assert len(found) == 60
    assert found[kept.index].tolist() == pytest.approx(kept.tolist(), abs=1e-6)
