"""Several models that are served side by side, and runs that take each other's place."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest

import vfl
from tests.harness import cases, ports
from tests.harness.errors import raises
from tests.harness.federation import refused
from tests.harness.served import NAMES, Served, federation_of, trained_run
from tests.harness.waiting import wait_until
from vfl_common.config.party import load_party
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.files import write_atomic
from vfl_common.process.logs import Console
from vfl_common.registry import FILE, ModelRegistry
from vfl_party.predict.run import load_joint
from vfl_serve.opening import Opener

pytest.importorskip("fastapi", reason="the extra serve is not installed")

# {id: (score, class)}.
Want = Mapping[str, tuple[float, int]]
# Of p2, which has a folder of its own; p0 and p1 share the other.
APART = "runs-p2"


@dataclass
class Models:
    """Programs that serve two models: ``case``, of which two runs are trained, and ``other``, in
    which p2 has no part. ``want``: {run id: what a prediction gives}.
    """

    served: Served
    first: str
    second: str
    other: str
    want: Mapping[str, Want]

    @property
    def registries(self) -> tuple[ModelRegistry, ModelRegistry]:
        folder = self.served.federation.folder
        return ModelRegistry(folder / "runs"), ModelRegistry(folder / APART)

    def copy(self, run_id: str) -> None:
        """Gives p2 its part of a run."""
        folder = self.served.federation.folder
        shutil.copytree(folder / "runs" / run_id / "p2", folder / APART / run_id / "p2")

    def rows(self, ids: list[str], **more: Any) -> list[dict[str, Any]]:
        """Returns the rows of a prediction of ``case``, whose scores are those that their runs
        predict.
        """
        rows = self.served.rows(*ids, **({"model": "case"} | more))
        for row in rows:
            assert (row["score_1"], row["class"]) == self.want[row["run"]][row["id"]], row
        return rows

    def answers(self) -> str:
        """Returns the run of ``case`` that answers."""
        found: str = self.rows(["K-1"])[0]["run"]
        return found


def predicted(run: vfl.Run) -> Want:
    found = run.predict()
    return dict(zip(found["id"], zip(found["score_1"], found["class"], strict=True), strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    def recipe(parties: int, seed: int) -> dict[str, Any]:
        return cases.recipe(parties, seed=seed, task={"kind": "binary"})

    with federation_of(tmp_path_factory.mktemp("models"), recipe(3, 7)) as federation:
        first, second, other = (
            trained_run(federation, each)
            for each in (recipe(3, 7), recipe(3, 8), recipe(2, 9) | {"name": "other"})
        )
        want = {run.folder.name: predicted(run) for run in (first, second, other)}
        served = Served(federation, first)
        yield Models(served, first.folder.name, second.folder.name, other.folder.name, want)


@pytest.fixture(scope="module")
def followed(models: Models) -> Models:
    """Programs that follow ``production``."""
    models.copy(models.first)
    for each in models.registries:
        each.promote(models.first)
    served = models.served
    served.federation.extra["p2"] = {"out": APART}
    served.runs = ("production", models.other)
    active = served.start("p0")
    served.start("p1")
    served.runs = ("production",)
    served.start("p2")
    served.url = active.wait_for("ready")["http"]
    served.wait_for(NAMES[1:])
    wait_until(lambda: about(models, "other")["versions"][0]["present"] == ["p1"])
    return models


def about(models: Models, name: str) -> Any:
    """Returns what is listed of a model."""
    return next(each for each in models.served.get("/v1/models")["models"] if each["name"] == name)


def test_each_model_answers_as_it_predicts(followed: Models) -> None:
    models = followed
    ids = list(models.want[models.first])

    def ask(number: int) -> None:
        name = ("case", "other")[number % 2]
        part = ids[number : number + 5]
        found = models.rows(part, model=name)
        run_id = (models.first, models.other)[number % 2]
        assert [(row["id"], row["run"], row["state"]) for row in found] == [
            (each, run_id, "scored") for each in part
        ]
        inputs = [{"name": "ids", "shape": [len(part)], "datatype": "BYTES", "data": part}]
        path = (f"/v2/models/{name}", f"/v2/models/{name}/versions/{run_id}")[number % 3 == 0]
        status, answer = models.served.ask(f"{path}/infer", {"inputs": inputs})
        assert (status, answer["model_version"]) == (200, run_id)
        outputs = {each["name"]: each["data"] for each in answer["outputs"]}
        assert outputs["score_1"] == [models.want[run_id][each][0] for each in part]
        assert set(outputs["run"]) == {run_id}
        status, answer = models.served.ask(f"/invocations?model={name}", {"inputs": part})
        assert [row["score_1"] for row in answer["predictions"]] == outputs["score_1"]

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(ask, range(60)))


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/v1/predict", {"ids": ["K-1"]}, 422),
        ("/v1/predict", {"ids": ["K-1"], "model": "none"}, 404),
        ("/v1/predict", {"ids": ["K-1"], "model": "case", "version": "none"}, 404),
        ("/v1/predict", {"ids": ["K-1"], "model": ""}, 404),
        ("/v2/models/none/infer", {"inputs": [{"name": "ids", "shape": [1], "datatype": "BYTES", "data": ["K-1"]}]}, 404),
        ("/v2/models/none", None, 404),
        ("/invocations", {"inputs": ["K-1"]}, 422),
    ],
)  # fmt: skip
def test_who_names_no_model_is_told_so(followed: Models, path: str, body: Any, status: int) -> None:
    found, answer = followed.served.ask(path, body)
    assert (found, list(answer)) == (status, ["error"])


@contextmanager
def load(models: Models) -> Iterator[list[str]]:
    """Asks while the block runs, 4 callers at once; yields the runs that have answered, in order.
    Raises if a request has failed, or if a party was missing from a row.
    """
    over, runs = threading.Event(), list[str]()
    ids = list(models.want[models.first])

    def ask(first: int) -> int:
        count = 0
        while not over.is_set():
            at = (first + count) % (len(ids) - 3)
            rows = models.rows(ids[at : at + 3])
            assert {row["state"] for row in rows} == {"scored"}
            # One request is never answered by two of them.
            (run_id,) = {row["run"] for row in rows}
            runs.append(run_id)
            count += 1
        return count

    with ThreadPoolExecutor(4) as callers:
        asked = [callers.submit(ask, 10 * number) for number in range(4)]
        try:
            yield runs
        finally:
            over.set()
        assert all(each.result() > 0 for each in asked)


def test_a_promoted_run_takes_over_without_a_lost_request(followed: Models) -> None:
    models = followed
    ours, theirs = models.registries
    with load(models) as runs:
        ours.promote(models.second)
        # p2 has not loaded it, so nothing changes.
        said = f"run {models.second} waits until p2 serves it; {models.first} answers"
        models.served.program("p0").wait_for("advice", said=said)
        assert about(models, "case")["waits"] == models.second
        assert set(runs) == {models.first}
        models.copy(models.second)
        theirs.promote(models.second)
        models.served.program("p0").wait_for("switched", run=models.second)
        until = len(runs) + 20
        wait_until(lambda: len(runs) >= until)
    assert runs[-1] == models.second
    listed = about(models, "case")
    assert (listed["run"], listed["waits"]) == (models.second, None)
    # The one before stays ready.
    assert [each["run"] for each in listed["versions"]] == [models.second, models.first]
    assert models.rows(["K-5"], version=models.first)[0]["run"] == models.first


def test_a_rollback_takes_two_seconds_at_most(followed: Models) -> None:
    models = followed
    with load(models):
        began_s = time.monotonic()
        for each in models.registries:
            each.rollback()
        wait_until(lambda: models.answers() == models.first)
        assert time.monotonic() - began_s < 2.0


def test_a_rollback_is_ready_after_a_restart(followed: Models) -> None:
    models = followed
    served = models.served
    for each in models.registries:
        each.promote(models.second)
    wait_until(lambda: models.answers() == models.second)
    for name, *runs in (("p0", "production", models.other), ("p2", "production")):
        served.runs = tuple(runs)
        served.start(name)
    served.url = served.program("p0").wait_for("ready")["http"]
    both = [{"run": run_id, "present": ["p1", "p2"]} for run_id in (models.second, models.first)]

    def listed() -> Any:
        versions = about(models, "case")["versions"]
        return [{key: each[key] for key in ("run", "present")} for each in versions]

    wait_until(lambda: listed() == both)
    for each in models.registries:
        each.rollback()
    wait_until(lambda: models.answers() == models.first)


def test_a_run_that_is_not_here_changes_nothing(followed: Models) -> None:
    models = followed
    path = models.registries[0].out / FILE
    before = path.read_text()
    changes = json.loads(before)
    try:
        write_atomic(path, json.dumps([*changes, changes[0] | {"run": "gone"}]))
        said = models.served.program("p0").wait_for("advice")["said"]
        assert "gone" in said
        assert said.startswith(f"run {models.first} answers as before")
        assert models.answers() == models.first
    finally:
        write_atomic(path, before)


@pytest.mark.parametrize(
    ("name", "given", "options"),
    [
        ("p1", {}, ("--http", "127.0.0.1:0")),
        # In this process nothing is recorded.
        ("p1", {"ids": "aligned"}, ()),
    ],
    ids=["passive", "not aligned"],
)
def test_what_cannot_be_served_so_is_refused(
    models: Models, name: str, given: dict[str, Any], options: tuple[str, ...]
) -> None:
    served = models.served
    served.federation.extra.clear()
    served.options, served.runs = {name: options}, (models.first,)
    served.listen = ports.address()
    refused(served.start(name, **given))


def test_a_model_of_another_active_party_is_refused(models: Models) -> None:
    folder = models.served.federation.folder
    mine = load_joint(folder / "runs" / models.first, "p1")
    roster = mine.recipe.model_dump()["parties"]
    for each, role in zip(roster, ("passive", "active", "passive"), strict=True):
        each["role"] = role
    theirs = replace(
        mine,
        recipe=Recipe.model_validate(
            mine.recipe.model_dump() | {"parties": roster, "name": "theirs"}
        ),
    )
    models.served.federation.write_party("p1")
    path = folder / "p1.toml"
    with raises(InputError, Code.CONFIG_INVALID, names=("p1", "p0")):
        Opener(path, load_party(path), [mine, theirs], Console("vfl-party"), None, None)
    opener = Opener(path, load_party(path), [mine], Console("vfl-party"), None, None)
    with raises(InputError, Code.CONFIG_INVALID, names=("p1", "p0")):
        opener.open(theirs)
