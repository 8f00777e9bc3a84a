"""Models in production: promoted at each party, compared, watched for drift, predicted with, pruned; a
person's deletion.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import roc_auc_score

import vfl
from tests.harness.cases import recipe
from tests.harness.errors import assert_names, raises
from tests.harness.federation import Federation, Program, refused
from tests.harness.here import vfl_here
from tests.integration.test_library import BANK, RECIPE, SHOP, run
from vfl_common import scorings
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_common.registry import ModelRegistry
from vfl_common.run_folder import RunFolder
from vfl_party.data.inputs import profile
from vfl_party.predict.forget import FileWithId, Trace, outputs, person, trace
from vfl_party.predict.results import KEPT

# -- on one machine


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs of the same test rows in the folder runs: one has learnt little, one more."""
    folder = tmp_path_factory.mktemp("production")
    for name, frame in (("bank", BANK), ("shop", SHOP)):
        frame.to_csv(folder / f"{name}.csv", index=False)
    bank, shop = (vfl.Data(str(folder / f"{name}.csv"), id="id") for name in ("bank", "shop"))
    bank = vfl.Data(bank.frame, id="id", label="target")
    for epochs in (1, 30):
        changed = RECIPE.replace({"phases.splitnn.epochs": epochs, "rows.test": 0.4})
        made = run(bank, shop, changed, out=folder / "runs")
        # Their ids tell which is younger by the second.
        while time.strftime("%Y%m%d-%H%M%S", time.gmtime()) in made.folder.name:
            time.sleep(0.02)
    return folder


def runs(place: Path) -> list[str]:
    """The ids of the trained runs, the oldest first."""
    return [each.run_id for each in reversed(ModelRegistry(place / "runs").list_trained())]


def test_the_test_rows_of_two_runs_are_compared(place: Path) -> None:
    old, new = (vfl.Run.load(place / "runs" / name) for name in runs(place))
    found = vfl.compare(old, new)
    assert found.rows == 48
    auc = found.measures[0]
    assert auc.metric == "auc"
    assert auc.old == pytest.approx(old.metrics["test"]["auc"], abs=1e-6)
    assert auc.new == pytest.approx(new.metrics["test"]["auc"], abs=1e-6)
    accuracy = next(each for each in found.measures if each.metric == "accuracy")
    assert accuracy.new == pytest.approx(new.metrics["test"]["accuracy"], abs=1e-6)
    assert found.outcome == "better"

    done = vfl_here("compare", *(f"runs/{name}" for name in runs(place)), cwd=place)
    assert done.returncode == 0
    assert found.verdict in done.stdout.replace("\n", " ").replace("  ", " ")
    back = vfl_here("compare", *(f"runs/{name}" for name in reversed(runs(place))), cwd=place)
    assert back.returncode == 5
    assert "is worse than" in back.stdout


def test_new_rows_are_scored_by_both(place: Path) -> None:
    names = runs(place)
    for party, frame in (("bank", BANK), ("shop", SHOP)):
        frame.tail(50).to_csv(place / f"new-{party}.csv", index=False)
    data = [f"--data={name}=new-{name}.csv" for name in ("bank", "shop")]
    paths = [f"runs/{name}" for name in names]
    done = vfl_here("compare", *paths, *data, "--json", "--picture", "c.png", cwd=place)
    said = json.loads(done.stdout)
    new = {"bank": BANK.tail(50), "shop": SHOP.tail(50)}
    truth = dict(zip(BANK["id"], BANK["target"], strict=True))
    for key, name in zip(("old", "new"), names, strict=True):
        scored = vfl.Run.load(place / "runs" / name).predict(new)
        true = [truth[each] for each in scored["id"]]
        auc = roc_auc_score(true, scored["score_1"])
        assert said["measures"]["auc"][key] == pytest.approx(auc, abs=1e-6)
    assert said["rows"] == 50
    assert (place / "c.png").stat().st_size > 10_000


def test_new_rows_without_a_label_are_left_out(place: Path) -> None:
    new = {"bank": BANK.tail(20).astype({"target": float}), "shop": SHOP.tail(20)}
    new["bank"].iloc[:3, new["bank"].columns.get_loc("target")] = np.nan
    old, later = (place / "runs" / name for name in runs(place))
    found = vfl.compare(old, later, new)
    assert (found.rows, found.unlabelled) == (17, 3)


def test_words_stand_for_runs(place: Path) -> None:
    old, new = runs(place)
    assert vfl_here("models", "promote", f"runs/{old}", cwd=place).returncode == 0
    done = vfl_here("compare", "production", "latest", "--json", cwd=place)
    assert [json.loads(done.stdout)[key] for key in ("old", "new")] == [old, new]
    assert vfl_here("models", "promote", "latest", cwd=place).stdout == (
        f"{new} is in production; {old} is retired\n"
    )
    lines = vfl_here("models", "--json", cwd=place).stdout.splitlines()
    assert [json.loads(line)["stage"] for line in lines] == ["production", "retired"]
    assert vfl_here("models", "rollback", cwd=place).stdout.startswith(f"{old} is in production")
    assert old in vfl_here("models", cwd=place).stdout
    assert vfl_here("models", "retire", new, cwd=place).stdout == f"{new} is retired\n"
    assert vfl_here("models", "promote", new, cwd=place).returncode == 0
    assert_names(vfl_here("models", "promote", "nothing", cwd=place).stderr, "trained")


def test_a_prediction_is_noted_and_replaced_on_demand(place: Path) -> None:
    old, new = runs(place)
    for _ in range(2):
        done = vfl_here("predict", f"runs/{old}", "--out", "s.csv", "--replace", cwd=place)
        assert done.returncode == 0, done.stderr
    found = scorings.read(place / "runs")[-2:]
    assert {(each.model, each.rows, each.scored, each.party) for each in found} == {
        (old, 120, 120, "bank")
    }
    assert {each.output for each in found} == {str(place / "s.csv")}
    before = (place / "s.csv").read_bytes()
    done = vfl_here("predict", f"runs/{new}", "--out", "s.csv", cwd=place)
    assert_names(done.stderr, "--out", "--replace")
    (place / "folder.csv").mkdir()
    done = vfl_here("predict", f"runs/{new}", "--out", "folder.csv", "--replace", cwd=place)
    assert_names(done.stderr, "--out", "folder.csv")
    assert done.returncode == 2
    assert (place / "s.csv").read_bytes() == before


def drift(place: Path, *words: str) -> tuple[int, dict[str, str]]:
    done = vfl_here("drift", *words, "--json", cwd=place)
    lines = map(json.loads, done.stdout.splitlines())
    return done.returncode, {each["name"]: each["verdict"] for each in lines}


def test_input_drift_is_found_in_the_column_that_has_moved(place: Path) -> None:
    new = runs(place)[1]
    same = drift(place, f"runs/{new}", "--data", "bank.csv")
    assert same == (0, {"mean radius": "stable", "mean area": "stable"})
    BANK.assign(**{"mean area": BANK["mean area"] * 1.5}).to_csv(place / "moved.csv", index=False)
    moved = drift(place, f"runs/{new}", "--data", "moved.csv", "--picture", "d.png")
    assert moved == (5, {"mean area": "drifted", "mean radius": "stable"})
    assert (place / "d.png").stat().st_size > 10_000
    assert drift(place, f"runs/{new}", "--data", "shop.csv", "--party", "shop")[0] == 0
    assert "mean area" in vfl_here("drift", f"runs/{new}", "--data", "moved.csv", cwd=place).stdout
    for words in (
        (),
        ("--data", "shop.csv"),
        ("--data", "none.csv"),
        ("--scores", "bank.csv"),
        ("--data", "bank.csv", "--party", "nobody"),
    ):
        done = vfl_here("drift", f"runs/{new}", *words, cwd=place)
        assert done.returncode == 2
        assert_names(done.stderr, "error: ")


def test_scores_are_compared_with_those_of_the_test_rows(place: Path) -> None:
    new = runs(place)[1]
    vfl_here("predict", f"runs/{new}", "--out", "own.csv", cwd=place)
    assert drift(place, f"runs/{new}", "--scores", "own.csv") == (0, {"score_1": "stable"})
    scores = pd.read_csv(place / "own.csv")
    scores.assign(score_1=scores["score_1"] / 3).to_csv(place / "low.csv", index=False)
    assert drift(place, f"runs/{new}", "--scores", "low.csv") == (5, {"score_1": "drifted"})


def test_the_profile_is_that_of_the_training_rows(place: Path) -> None:
    folder = place / "runs" / runs(place)[1]
    tested = set(pq.read_table(folder / "bank" / KEPT).column("id").to_pylist())
    trained = BANK[~BANK["id"].isin(tested)]
    radius = next(each for each in profile.load(folder / "bank") if each.name == "mean radius")
    counts = np.histogram(
        trained["mean radius"].astype(np.float32), [-np.inf, *radius.edges, np.inf]
    )[0]
    assert radius.counts == (*counts.tolist(), 0)
    assert (folder / "bank" / profile.FILE).stat().st_mode & 0o777 == 0o600


def test_a_run_of_an_earlier_release_has_no_profile(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "runs" / runs(place)[0], tmp_path / "run")
    (tmp_path / "run" / "bank" / profile.FILE).unlink()
    done = vfl_here("drift", "run", "--data", place / "bank.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert_names(done.stderr, "profile.json", "bank")
    assert vfl.Run.load(tmp_path / "run").predict()["id"]


def test_a_profile_of_other_columns_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "runs" / runs(place)[0], tmp_path / "run")
    path = tmp_path / "run" / "bank" / profile.FILE
    path.write_text(path.read_text().replace("mean area", "mean weight"))
    done = vfl_here("drift", "run", "--data", place / "bank.csv", cwd=tmp_path)
    assert done.returncode == 2
    assert_names(done.stderr, "profile.json", "bank")


def test_old_runs_go_and_what_is_needed_stays(place: Path, tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    old, new = runs(place)
    names = [f"2025010{day}-020000-two-aaaa" for day in range(1, 6)]
    for name, source in zip(names, (old, old, old, old, new), strict=True):
        shutil.copytree(place / "runs" / source, tmp_path / "runs" / name)
    for name in names[1:4:2]:
        vfl_here("models", "promote", name, cwd=tmp_path)
    vfl_here("predict", f"runs/{names[0]}", cwd=tmp_path)
    done = vfl_here("prune", "--older-than", "30", "--dry-run", cwd=tmp_path)
    assert done.stdout.count("to remove") == 2
    assert len([*(tmp_path / "runs").glob("2*")]) == 5
    vfl_here("prune", "--older-than", "30", "--log-older-than", "30", cwd=tmp_path)
    # Before production, in production, the newest.
    assert {path.name for path in (tmp_path / "runs").glob("2*")} == {
        names[1], names[3], names[4],
    }  # fmt: skip
    assert len(scorings.read(tmp_path / "runs")) == 1
    done = vfl_here("prune", "--log-older-than", "0", cwd=tmp_path)
    assert done.stdout == "predictions.jsonl: 1 line removed\n"
    assert scorings.read(tmp_path / "runs") == []
    assert vfl_here("models", "rollback", cwd=tmp_path).stdout.startswith(names[1])
    assert_names(vfl_here("prune", cwd=tmp_path).stderr, "--older-than", "--log-older-than")


def test_a_run_stays_whose_alignment_another_names(place: Path, tmp_path: Path) -> None:
    """The other is as old, and stays as the newest of its recipe; it names one that names a third."""
    (tmp_path / "runs").mkdir()
    names = [f"2025010{day}-020000-two-aaaa" for day in range(1, 5)]
    for name in names:
        shutil.copytree(place / "runs" / runs(place)[0], tmp_path / "runs" / name)
    for name, of in ((names[3], names[1]), (names[1], names[0])):
        for path in (tmp_path / "runs" / name).glob("*/recipe.json"):
            tables = json.loads(path.read_text())
            tables["rows"] |= {"align": "psi", "alignment": of}
            path.write_text(json.dumps(tables))
    said = vfl_here("prune", "--older-than", "30", cwd=tmp_path).stdout
    assert {path.name for path in (tmp_path / "runs").glob("2*")} == {*names} - {names[2]}
    for name, of in ((names[3], names[1]), (names[1], names[0])):
        assert re.search(rf"{of} \(.*\): kept, because {name} uses its alignment\n", said)


def test_failed_predictions_go_and_failed_trainings_stay(place: Path, tmp_path: Path) -> None:
    for second, job in enumerate(("predict", "train")):
        folder = tmp_path / "runs" / f"20250101-02000{second}-{job}-aaaa"
        shutil.copytree(place / "runs" / runs(place)[0], folder)
        (folder / "summary.json").unlink()
        for path in folder.glob("*/run.json"):
            facts = json.loads(path.read_text()) | {"job": job, "finished": False}
            path.write_text(json.dumps(facts))
            (path.parent / "log.jsonl").write_text('{"event": "failed", "message": "x"}\n')
    said = vfl_here("prune", "--older-than", "30", cwd=tmp_path).stdout.splitlines()
    assert [line.split(": ")[1] for line in said] == ["removed", "kept, because it has failed"]
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["20250101-020001-train-aaaa"]


@pytest.mark.parametrize("days", ["nan", "inf", "-1"])
@pytest.mark.parametrize("option", ["--older-than", "--log-older-than"])
def test_days_are_a_number(place: Path, option: str, days: str) -> None:
    done = vfl_here("prune", option, days, "--dry-run", cwd=place)
    assert done.returncode == 2
    assert_names(done.stderr, "--help")


# -- between processes


def tables(folder: Path) -> dict[str, dict[str, Any]]:
    """Writes p0's and p1's tables; each knows some people whom the other does not."""
    found = {}
    for name, frame, keys in (
        ("p0", BANK.iloc[:-5], {"label": "target"}),
        ("p1", SHOP.iloc[5:], {}),
    ):
        frame.to_csv(folder / f"{name}.csv", index=False)
        found[name] = {"source": str(folder / f"{name}.csv"), "id": "id"} | keys
    return found


@pytest.fixture(scope="module")
def between(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """A federation of two that has trained twice; each party has a folder of runs of its own."""
    folder = tmp_path_factory.mktemp("between")
    found = recipe(
        2, task={"kind": "binary"}, rows={"align": "psi", "test": 0.3}, phase={"epochs": 4}
    )
    found["phases"].append({"kind": "evaluate"})
    extra = {name: {"out": f"runs-{name}"} for name in ("p0", "p1")}
    made = Federation(folder, found, tables(folder), extra=extra)
    for _ in range(2):
        with made:
            made.start_all()
            for name, program in made.programs.items():
                assert program.wait() == 0, f"{name}: {program.stderr}"
        made.programs.clear()
    return made


def trained(made: Federation) -> list[str]:
    """The ids of the trained runs, the oldest first; the same at both parties."""
    found = [
        ModelRegistry(made.folder / f"runs-{name}", name).list_trained() for name in ("p0", "p1")
    ]
    assert [each.run_id for each in found[0]] == [each.run_id for each in found[1]]
    return [each.run_id for each in reversed(found[0])]


def predicting(made: Federation, **said: str) -> dict[str, Program]:
    """Starts a joint prediction; ``said``: {party: its --run}."""
    made.programs.clear()
    made.server_options = ("--predict",)
    made.start_server()
    for name, run_ in said.items():
        path = made.write_party(name).name
        words = ("--run", run_, "--out", "scores.csv", "--replace")
        made.start(name, "vfl-party", "predict", path, *words)
    return made.programs


def test_parties_predict_with_what_each_has_promoted(between: Federation) -> None:
    old, new = trained(between)
    for name in ("p0", "p1"):
        ModelRegistry(between.folder / f"runs-{name}").promote(old)
    for word, run_id in (("production", old), ("latest", new)):
        with between:
            for name, program in predicting(between, p0=word, p1=word).items():
                assert program.wait(60) == 0, f"{name}: {program.stderr}"
        for name in ("p0", "p1"):
            events = between.programs[name].seen()
            (model,) = [each for each in events if each["event"] == "model"]
            assert (model["run_id"], model["meant"]) == (run_id, word)
            last = scorings.read(between.folder / f"runs-{name}")[-1]
            facts = (last.model, last.party, last.rows, last.scored)
            assert facts == (run_id, name, 115, 110)
            assert bool(last.output) == (name == "p0")
            assert len(last.data) == 64
    assert (pd.read_csv(between.folder / "scores.csv")["state"] == "scored").sum() == 110
    listed = vfl_here("runs", "--out", "runs-p1", "--json", cwd=between.folder).stdout
    found = [json.loads(line) for line in listed.splitlines()]
    assert [(each["job"], each["model"]) for each in found][:2] == [
        ("predict", new),
        ("predict", old),
    ]
    assert (
        f"prediction with {old}" in vfl_here("runs", "--out", "runs-p0", cwd=between.folder).stdout
    )


def test_parties_that_promoted_different_runs_are_told_both(between: Federation) -> None:
    old, new = trained(between)
    ModelRegistry(between.folder / "runs-p0").promote(new)
    ModelRegistry(between.folder / "runs-p1").promote(old)
    before = (between.folder / "scores.csv").read_bytes()
    with between:
        programs = predicting(between, p0="production")
        programs["server"].wait_for("joined", party="p0")
        path = between.write_party("p1").name
        between.start("p1", "vfl-party", "predict", path, "--run", "production")
        refused(programs["p1"], f"p1 predicts with run {old}, but the others with {new}")
    assert (between.folder / "scores.csv").read_bytes() == before


def test_a_party_that_promoted_nothing_is_told_so(between: Federation) -> None:
    path = between.write_party("p1")
    (between.folder / "runs-p1" / "models.json").unlink(missing_ok=True)
    with between:
        program = between.start("p1", "vfl-party", "predict", path.name, "--run", "production")
        refused(program, "runs-p1", "recipe case", "vfl models promote")


def forget(made: Federation, name: str, *words: str, code: int = 0) -> str:
    path = made.write_party(name).name
    made.programs.clear()
    with made:
        program = made.start("forget", "vfl-party", "forget", path, *words)
        assert program.wait(60) == code, program.stderr
        return "".join(each.get("text", "") for each in program.seen()) + program.stderr


def test_a_person_is_forgotten_and_the_models_that_knew_them_are_named(between: Federation) -> None:
    old, new = trained(between)
    # The test before has written it, if it ran here.
    if not (between.folder / "scores.csv").exists():
        with between:
            for name, program in predicting(between, p0="latest", p1="latest").items():
                assert program.wait(60) == 0, f"{name}: {program.stderr}"
    kept = between.folder / "runs-p0" / new / "p0" / KEPT
    table = pq.read_table(kept)
    splits = dict(zip(*(table.column(key).to_pylist() for key in ("id", "split")), strict=True))
    tested = next(each for each, split in splits.items() if split == "test")
    common = set(BANK["id"][:-5]) & set(SHOP["id"][5:])
    in_training = sorted(common - set(splits))[0]
    alone = BANK["id"].iloc[0]

    said = forget(between, "p0", tested, "--all", "--dry-run")
    assert said.count("was not trained with the row, which was for test") == 2
    assert said.count("would be removed") == 2
    assert pq.read_table(kept).equals(table)
    said = forget(between, "p0", tested, "--run", f"runs-p0/{new}")
    assert (old in said, said.count("; removed")) == (False, 1)
    left = pq.read_table(kept)
    assert left.num_rows == table.num_rows - 1
    assert tested not in left.column("id").to_pylist()
    # The file that was handed out is named, and stays.
    assert "scores.csv: contains the row" in said
    assert tested in (between.folder / "scores.csv").read_text()

    said = forget(between, "p0", in_training, "--all")
    assert said.count("was trained with the row. Train again without it.") == 2
    assert said.count("was trained with the row") == forget(
        between, "p1", in_training, "--all"
    ).count("was trained with the row")
    assert "only if a phase learns" in forget(between, "p0", alone, "--run", "latest")
    # An id of nobody gets no all-clear.
    said = forget(between, "p1", "nobody", "--run", "latest", code=2)
    assert "no run or prediction of p1 contains it. Check the spelling" in said
    assert "p1.csv has this id, and this run does not know it. Check the spelling." in said
    assert "was not trained" not in said
    assert "remove the row there" not in said

    # Once the table has changed, the record says which runs had the row.
    path = between.folder / "p0.csv"
    before = path.read_text()
    path.write_text(before.replace(f"{alone},", "zzz,"))
    said = forget(between, "p0", in_training, "--all")
    assert said.count("had the row for training, validation or test, by its record") == 2
    said = forget(between, "p0", "zzz", "--all")
    assert said.count("was not trained with the row") == 2
    said = forget(between, "p0", "nobody", "--all", code=2)
    assert "may have been trained" not in said
    # Without the record nobody knows.
    record = between.folder / "runs-p0" / ".record-p0"
    record.rename(between.folder / "away")
    said = forget(between, "p0", in_training, "--run", "latest")
    assert "may have been trained with the row" in said
    (between.folder / "away").rename(record)
    path.write_text(before)


@pytest.fixture(scope="module")
def spelt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose rules make C-0001 and c0001 one id, with rows for validation; and bank's file."""
    folder = tmp_path_factory.mktemp("spelt")
    BANK.assign(id=" " + BANK["id"].str.upper()).to_csv(folder / "bank.csv", index=False)
    changed = RECIPE.replace({
        "phases.splitnn.epochs": 2, "rows.test": 0.2, "rows.validation": 0.2,
        "rows.id_rules": ["trim", "casefold"],
    })  # fmt: skip
    SHOP.to_csv(folder / "shop.csv", index=False)
    bank, shop = (vfl.Data(str(folder / f"{name}.csv"), id="id") for name in ("bank", "shop"))
    data = {"bank": vfl.Data(bank.frame, id="id", label="target"), "shop": shop}
    made = vfl.simulate(changed, data, out=folder / "runs", quiet=True)
    done = vfl_here("predict", made.folder, "--out", "s.csv", "--spreadsheet", cwd=folder)
    assert done.returncode == 0, done.stderr
    return folder


def traced(folder: Path, cell: str, *, remove: bool = False) -> tuple[Trace, list[FileWithId]]:
    settings = DataSettings(source=str(folder / "bank.csv"), id=("id",), label="target")
    who = person([cell], settings)
    (run_,) = ModelRegistry(folder / "runs").list_trained()
    path = folder / "runs" / run_.run_id / "bank"
    found = trace(RunFolder(path, run_.run_id), "bank", who, remove=remove)
    return found, outputs(folder / "runs", "bank", who)


def test_a_person_is_found_in_every_spelling_that_the_rules_make_one(spelt: Path) -> None:
    (kept,) = (spelt / "runs").glob(f"*/bank/{KEPT}")
    table = pq.read_table(kept)
    splits = dict(zip(*(table.column(key).to_pylist() for key in ("id", "split")), strict=True))
    own = next(each for each, split in splits.items() if split == "test")
    for cell in (own, own.strip(), own.strip().lower()):
        found, handed_out = traced(spelt, cell)
        assert (found.part, len(found.held), len(handed_out)) == ("test", 1, 1), cell
        assert not found.lacks_it
    for cell in ("c-0001", "nobody"):
        found, handed_out = traced(spelt, cell)
        assert (found.part, found.held, handed_out) == ("none", (), [])
        assert "does not know it. Check the spelling." in found.verdict
    # A file that has this text has it for another reason.
    found, _ = traced(spelt, "splitnn")
    assert found.held
    assert "does not know it. Check the spelling." in found.verdict
    # The table that nobody has any more says nothing.
    (spelt / "bank.csv").rename(spelt / "away.csv")
    assert (traced(spelt, own.lower())[0].part, len(traced(spelt, own.lower())[1])) == ("test", 1)
    assert "may have been trained with the row" in traced(spelt, "nobody")[0].verdict
    (spelt / "away.csv").rename(spelt / "bank.csv")
    traced(spelt, own.strip().lower(), remove=True)
    assert pq.read_table(kept).num_rows == table.num_rows - 1


def test_validation_rows_may_have_chosen_what_was_trained(spelt: Path) -> None:
    found = [traced(spelt, each)[0] for each in BANK["id"][:40]]
    said = {each.part: each.verdict for each in found}
    assert set(said) == {"training", "validation", "test"}
    assert "may have chosen the threshold and the end of training" in said["validation"]


def test_forgetting_wants_to_know_where(between: Federation) -> None:
    path = between.write_party("p0").name
    between.programs.clear()
    with between:
        for words in (("c0001",), ("c0001", "--all", "--run", "latest"), ("a", "b", "--all")):
            program = between.start("forget", "vfl-party", "forget", path, *words)
            refused(program, "id" if "b" in words else "--all")
            between.programs.pop("forget").close()


def test_a_word_needs_a_folder_of_runs(tmp_path: Path) -> None:
    with raises(InputError, Code.FILE_INVALID):
        ModelRegistry(tmp_path / "none").promote("a")
    for words in (("report", "production"), ("models", "rollback"), ("models", "promote", "x")):
        done = vfl_here(*words, cwd=tmp_path)
        assert done.returncode == 2
        assert_names(done.stderr, "error: ")
