"""``vfl study`` as a person starts it: real federations, stopped in the middle and gone on with."""

from __future__ import annotations

import contextlib
import csv
import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.errors import assert_names
from tests.harness.federation import BIN, Program, toml
from tests.harness.here import vfl_here
from tests.harness.sharing import FRESH
from vfl_party.base.checkpoint import CheckpointStore

DATA = {"source": "sklearn:digits", "label": "target", "limit": 200}


def write(folder: Path, **changes: Any) -> Path:
    recipe = cases.recipe(2) | {"simulate": {"scheme": "halves", "data": DATA}}
    (folder / "base.toml").write_text(toml(recipe))
    study = {
        "name": "tiny",
        "recipe": "base.toml",
        "seeds": [1, 2],
        "labels": [40, 80],
        "finetune": [{"kind": "splitnn", "epochs": 2, "batch_size": 20}, {"kind": "evaluate"}],
        "methods": [
            {"name": "plain"},
            {"name": "pre", "pretrain": [{"kind": "splitnn", "epochs": 2, "batch_size": 20}]},
        ],
    }
    (folder / "study.toml").write_text(toml(study | changes))
    return folder / "study.toml"


def events(lines: list[str]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in lines]


@pytest.mark.slow
def test_a_study_that_was_stopped_goes_on(tmp_path: Path) -> None:
    path, folder = write(tmp_path), tmp_path / "runs" / "tiny"
    words = [str(BIN / "vfl"), "study", str(path), "--out", "runs", "--json"]
    with contextlib.closing(Program("study", words, tmp_path, fresh=FRESH)) as first:
        first.wait_for("begin", run="tiny.pre.s1.n40")
        # In the middle of its fourth run.
        first.signal(signal.SIGTERM)
        assert first.wait(30) == 130
        done = [event["run"] for event in first.events if event["event"] == "done"]
    assert done == ["tiny.plain.s1.n40", "tiny.plain.s1.n80", "tiny.pre.s1"]
    assert len((folder / "results.csv").read_text().splitlines()) == 3
    before = {run: (folder / run / "summary.json").read_bytes() for run in done}

    second = vfl_here("study", path, "--out", "runs", "--json", cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    told = events(second.stdout.splitlines())
    assert (told[0]["runs"], told[0]["left"]) == (10, 7)
    assert next(event["run"] for event in told if event["event"] == "done") == "tiny.pre.s1.n40"
    assert [event["event"] for event in told].count("result") == 8
    # Not run again.
    assert {run: (folder / run / "summary.json").read_bytes() for run in done} == before

    lines = list(csv.DictReader((folder / "results.csv").read_text().splitlines()))
    assert [(line["method"], line["seed"], line["labels"]) for line in lines] == [
        (method, seed, labels)
        for seed in "12"
        for method in ("plain", "pre")
        for labels in ("40", "80")
    ]
    assert all(
        0.0 <= float(line["test_accuracy"]) <= 1.0 and int(line["finetune_bytes"]) > 0
        for line in lines
    )
    assert [line["pretrain_run"] for line in lines][:4] == ["", "", "tiny.pre.s1", "tiny.pre.s1"]
    assert [int(line["pretrain_bytes"]) > 0 for line in lines] == [
        line["method"] == "pre" for line in lines
    ]
    assert (folder / "results.png").exists()
    assert {found.parts[-3] for found in folder.glob("*/p1/checkpoints")} == {
        "tiny.pre.s1",
        "tiny.pre.s2",
    }
    assert CheckpointStore(folder / "tiny.pre.s1" / "p1" / "checkpoints", keep=2).labels()


@pytest.mark.slow
def test_a_run_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    gone = {"simulate.devices": {"p1": "cuda:99"}}
    bad = {"name": "bad", "pretrain": [{"kind": "splitnn", "epochs": 2}], "overrides": gone}
    heir = {"name": "heir", "pretrain_of": "bad", "overrides": gone}
    # Two at a time, but the pretraining that two share is tried once.
    path = write(tmp_path, seeds=[1], labels=[40], methods=[bad, heir, {"name": "plain"}])
    # And is tried again, the others are not.
    for _ in range(2):
        ended = vfl_here("study", path, "--out", "runs", "--jobs", "2", cwd=tmp_path)
        errors = ended.stderr
        assert ended.returncode == 2, errors
        assert "plain" in ended.stdout
        failed = errors[errors.index("error: ") :]
        assert failed.startswith("error: 3 runs ")
        assert "cuda:99" in failed
        for run in (
            "bad, seed 1, pretraining",
            "bad, seed 1, 40 labels",
            "heir, seed 1, 40 labels",
        ):
            assert f"{run}: " in failed
        assert_names(failed, "p1", "99")
        assert "Traceback" not in errors
    assert "4 runs, 1 already " in errors


@pytest.mark.parametrize(
    ("method", "names"),
    [
        ({"finetune": [{"kind": "splitnn", "epoks": 2}]}, ["bad, seed 1, 40 labels", "'epoks'"]),
        (
            {"pretrain": [{"kind": "contrastive", "ssl": "moco", "queue": 5000, "batch_size": 50}]},
            ["bad, seed 1, pretraining", "5000"],
        ),
        ({"finetune": [{"kind": "splitnn", "epochs": 2}]}, ["bad, seed 1, 40 labels"]),
        ({"overrides": {"rows.test": 0.0}}, ["bad, seed 1, 40 labels"]),
    ],
    ids=["key", "queue", "evaluation", "rows"],
)
def test_what_a_party_would_refuse_is_told_before_the_first_run(
    method: dict[str, Any], names: list[str], tmp_path: Path
) -> None:
    path = write(tmp_path, methods=[{"name": "plain"}, {"name": "bad", **method}])
    ended = vfl_here("study", path, "--out", "runs", cwd=tmp_path)
    errors = ended.stderr
    assert ended.returncode == 2, errors
    assert all(name in errors for name in names), errors
    assert errors.count("error: ") == 1
    assert_names(errors, "finished")
    assert ended.stdout == ""
    assert not list((tmp_path / "runs" / "tiny").glob("tiny.*"))
