"""A prediction in which another party is away: what the active party writes without it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.csv
import pytest
import torch

import vfl
from tests.harness import cases
from tests.harness.errors import assert_names
from tests.harness.federation import Federation, Program, refused
from tests.harness.here import vfl_here

ROWS, NEW = 60, 30


def ages(count: int, *, labels: bool) -> str:
    head = "who,age,y\n" if labels else "who,age\n"
    lines = (
        f"u{row:03},{row % 7 + 0.5}" + (f",{row % 2}" if labels else "") for row in range(count)
    )
    return head + "".join(f"{line}\n" for line in lines)


def orders(count: int) -> str:
    return "who,orders\n" + "".join(f"u{row:03},{row % 5}\n" for row in range(count))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Federation, str, str]:
    """A federation that has trained, with the folders of its run and of p0's run alone."""
    folder = tmp_path_factory.mktemp("alone") / "f"
    data = {
        "p0": {"source": "p0.csv", "id": "who", "label": "y"},
        "p1": {"source": "p1.csv", "id": "who"},
    }
    recipe = cases.recipe(2, task={"kind": "binary"}, run={"join_deadline_s": 60.0})
    federation = Federation(folder, recipe, data)
    with federation:
        (folder / "p0.csv").write_text(ages(ROWS, labels=True))
        (folder / "p1.csv").write_text(orders(ROWS))
        federation.start_all()
        federation.finish()
        joint = federation.run_folder
        # One row has no id, and one the id of another.
        (folder / "new0.csv").write_text(f"{ages(NEW, labels=False)},3.5\nu000,4.5\n")
        (folder / "new1.csv").write_text(orders(NEW))
        made = vfl_here("simulate", "p0.toml", "--baseline", "alone", cwd=folder)
        assert made.returncode == 0, made.stderr
    (alone,) = (each for each in joint.parent.glob("[!.]*/") if each != joint)
    federation.programs.clear()
    federation.server_options = ("--predict",)
    return federation, f"runs/{joint.name}", f"runs/{alone.name}"


@pytest.fixture
def federation(trained: tuple[Federation, str, str]) -> Iterator[Federation]:
    found, _, _ = trained
    found.programs.clear()
    found.extra.clear()
    found.data["p0"]["duplicates"] = "first"
    with found:
        yield found
    for path in found.folder.glob("*predictions.csv"):
        path.unlink()


def predicting(federation: Federation, name: str, run: str, *options: str) -> Program:
    path, new = federation.write_party(name).name, f"new{name[1]}.csv"
    args = ("predict", path, "--run", run, "--data", new, *options)
    return federation.start(name, "vfl-party", *args)


def written(federation: Federation, name: str = "predictions.csv") -> pa.Table:
    return pyarrow.csv.read_csv(federation.folder / name)


def test_the_scores_are_those_of_the_active_party_s_own_model(
    trained: tuple[Federation, str, str], federation: Federation
) -> None:
    _, joint, alone = trained
    federation.extra["p0"] = {"predict": {"alone": alone, "deadline_s": 2.0}}
    federation.start_server()
    active = predicting(federation, "p0", joint)
    assert active.wait(60) == 5, active.stderr
    told = active.wait_for("predicted")
    assert (told["written"], told["rows"], told["state"]) == (0, NEW + 2, "alone")
    assert_names(told["said"], "predict.deadline_s", "p1")
    found = written(federation)
    states = found["state"].to_pylist()
    assert states == ["alone"] * NEW + ["without an id", "with a repeated id"]

    # In plain torch, without a prediction.
    model = vfl.Model.load(federation.folder / alone)
    table = pyarrow.csv.read_csv(federation.folder / "new0.csv").slice(0, NEW)
    assert model.top is not None
    with torch.no_grad():
        want = model.top(model.embed(table)).sigmoid().reshape(-1)
    got = torch.tensor(found["score_1"].to_pylist()[:NEW])
    torch.testing.assert_close(got, want, rtol=0.0, atol=1e-7)
    assert found["class"].to_pylist()[:NEW] == [int(each > 0.5) for each in want]


def test_without_such_a_model_the_rows_wait(
    trained: tuple[Federation, str, str], federation: Federation
) -> None:
    _, joint, _ = trained
    active = predicting(federation, "p0", joint, "--deadline", "2")
    # No server answers, either.
    assert active.wait(60) == 5, active.stderr
    assert_names(
        re.sub(r"127.0.0.1:\d+", "ADDRESS", active.wait_for("predicted")["said"]),
        "predict.deadline_s",
        "30",
    )
    found = written(federation)
    assert found.column_names == ["who", "matched_who", "state", "score_1", "class"]
    assert found["state"].to_pylist()[:NEW] == ["waiting"] * NEW
    assert found["score_1"].null_count == NEW + 2


def test_a_party_that_is_lost_in_the_prediction_is_away_too(
    trained: tuple[Federation, str, str], federation: Federation
) -> None:
    _, joint, alone = trained
    federation.extra["p0"] = {"predict": {"alone": alone, "deadline_s": 3.0}}
    federation.start_server()
    passive = predicting(federation, "p1", joint)
    federation.programs["server"].wait_for("joined", party="p1")
    passive.kill()
    federation.programs["server"].wait_for("lost", party="p1")
    active = predicting(federation, "p0", joint)
    assert active.wait(60) == 5, active.stderr
    assert written(federation)["state"].to_pylist()[0] == "alone"
    # The server and who comes later hear that nobody waits any more.
    assert federation.programs["server"].wait(60) == 3


def test_if_all_are_there_in_time_the_scores_are_joint(
    trained: tuple[Federation, str, str], federation: Federation
) -> None:
    _, joint, alone = trained
    federation.extra["p0"] = {"predict": {"alone": alone, "deadline_s": 60.0}}
    federation.start_server()
    active = predicting(federation, "p0", joint)
    predicting(federation, "p1", joint)
    for name, program in federation.programs.items():
        assert program.wait(60) == 0, f"{name}: {program.stderr}"
    assert written(federation)["state"].to_pylist()[:NEW] == ["scored"] * NEW
    assert "state" not in active.wait_for("predicted")


def test_a_passive_party_waits_no_longer_than_its_deadline(
    trained: tuple[Federation, str, str], federation: Federation
) -> None:
    _, joint, _ = trained
    federation.extra["p1"] = {"predict": {"deadline_s": 2.0}}
    federation.start_server()
    refused(predicting(federation, "p1", joint), "p0", code=3)
    assert not (federation.folder / "predictions.csv").exists()


def test_a_model_that_others_have_trained_too_is_refused(
    trained: tuple[Federation, str, str], federation: Federation
) -> None:
    _, joint, alone = trained
    federation.extra["p0"] = {"predict": {"alone": joint}}
    ended = predicting(federation, "p0", joint)
    assert ended.wait(60) == 2
    assert_names(ended.stderr.replace(Path(joint).name, "RUN"), "predict")
    federation.extra["p0"] = {"predict": {"alone": "runs/none"}}
    refused(predicting(federation, "p0", joint), "predict.alone", "runs/none")
    federation.extra["p0"] = {"predict": {"deadline_s": 0}}
    refused(predicting(federation, "p0", joint), "deadline_s")
    assert json.loads((federation.folder / alone / "p0" / "run.json").read_text())["trained"]
