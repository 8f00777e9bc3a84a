"""Which run of a model answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.errors import raises
from vfl_common.errors import Code, InputError
from vfl_common.registry import FILE, Change, ModelRegistry
from vfl_serve.models import STEPS_BEHIND, Follower, Lineage
from vfl_serve.scored import Counts, RequestPart, ServedScores
from vfl_serve.scorer import RequestColumns
from vfl_serve.tokens import Denied, Tokens, add_token

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tests.harness.serving import FakeRun, catalog, made_served
from vfl_serve.served import Catalog, ServedModel

Events = list[tuple[str, dict[str, Any]]]


def scores(values: Sequence[float], run_id: str = "", parties: str = "bank") -> ServedScores:
    n = len(values)
    part = RequestPart(tuple(parties.split()), {}, run=run_id)
    columns = {"score": np.array(values), "class": np.array([int(each > 0.5) for each in values])}
    return ServedScores(columns, ["scored"] * n, [part], np.zeros(n, np.int64))


def run(run_id: str, *there: str, factor: float = 1.0, **more: Any) -> FakeRun:
    """Makes a run that scores the id ``7`` with ``0.07 * factor``."""

    def score(
        ids: Sequence[str], _least: float | None, columns: RequestColumns | None
    ) -> ServedScores:
        given = columns["x"] if columns is not None else ids
        return scores([float(each) / 100 * factor for each in given], run_id)

    served = made_served(score, run_id=run_id, present=lambda: there, **more)
    return FakeRun(served, list(there))


def line_of(
    *runs: FakeRun, keep: int = 1, before: Sequence[str] = ()
) -> tuple[Lineage[FakeRun], Events]:
    told: Events = []
    return Lineage(
        "case", runs, before, keep, lambda event, **facts: told.append((event, facts))
    ), told


def no_load() -> FakeRun:
    raise AssertionError("it is loaded already")


def test_the_next_run_answers_when_all_attend_it() -> None:
    old, new = run("old", "north", "south"), run("new", "north")
    line, told = line_of(old)
    line.want("new", lambda: new)
    for _ in range(3):
        line.step()
        assert (line.now, line.next) == (old, new)
    ((event, facts),) = told
    assert (event, facts["said"]) == ("advice", "run new waits until south serves it; old answers")
    new.there.append("south")
    line.step()
    assert (line.now, line.next, line.runs) == (new, None, (new, old))
    assert told[1] == ("switched", {"model": "case", "run": "new", "before": "old"})


def test_a_party_that_attends_neither_holds_nothing_up() -> None:
    line, _ = line_of(run("old", "north"))
    line.want("new", lambda: run("new", "north"))
    line.step()
    assert line.now.run_id == "new"


def test_a_party_that_starts_with_the_run_before_brings_it_back_until_it_has_promoted() -> None:
    old, new = run("old", "north"), run("new", "north")
    line, told = line_of(old)
    line.want("new", lambda: new)
    line.step()
    assert line.now is new
    # It was starting when the others promoted.
    old.there.append("south")
    for _ in range(STEPS_BEHIND):
        assert line.now is new
        line.step()
    assert (line.now, line.next) == (old, new)
    line.want("new", no_load)
    line.step()
    assert line.now is old
    new.there.append("south")
    line.step()
    assert (line.now, line.next) == (new, None)
    assert [facts.get("run") for event, facts in told if event == "switched"] == [
        "new",
        "old",
        "new",
    ]
    line.step()
    # A party that has attended it, and is away for a moment, changes nothing.
    new.there.remove("south")
    for _ in range(2 * STEPS_BEHIND):
        line.step()
        assert line.now is new


def test_as_many_runs_stay_as_are_kept() -> None:
    runs = [run(str(number)) for number in range(4)]
    line, _ = line_of(runs[0], keep=2)
    for each in runs[1:]:
        line.want(each.run_id, lambda each=each: each)  # type: ignore[misc]
        line.step()
    assert [each.closed for each in runs] == [True, False, False, False]
    assert line.find("0") is None
    # A rollback loads nothing.
    line.want("2", no_load)
    line.step()
    assert line.now is runs[2]
    assert not any(each.closed for each in runs[1:])
    line.close()
    assert all(each.closed for each in runs)


def test_runs_that_were_chosen_stay() -> None:
    line, _ = line_of(run("first"), fixed := run("fixed"), last := run("last"), before=["last"])
    for number in range(3):
        line.want(f"new{number}", lambda number=number: run(f"new{number}"))  # type: ignore[misc]
        line.step()
    assert (fixed.closed, last.closed) == (False, True)
    assert [each.run_id for each in line.runs] == ["new2", "fixed", "new1"]


def test_who_goes_back_before_the_switch_keeps_what_answers() -> None:
    old, new = run("old", "north"), run("new")
    line, told = line_of(old)
    line.want("new", lambda: new)
    line.step()
    line.want("old", no_load)
    line.step()
    assert (line.now, line.next, new.closed) == (old, None, True)
    assert [event for event, _ in told] == ["advice"]


def write(out: Path, *runs: str) -> None:
    changes = [Change("promote", each, "case", "now", "me").__dict__ for each in runs]
    # Another file, so that it is seen even within one tick of the clock.
    (out / "new.json").write_text(json.dumps(changes))
    (out / "new.json").replace(out / FILE)


def test_a_line_follows_the_registry(tmp_path: Path) -> None:
    asked: list[str] = []

    def load(run_id: str) -> FakeRun:
        asked.append(run_id)
        if run_id == "bad":
            raise InputError(Code.FILE_INVALID, "bad: has no run of bank")
        return run(run_id)

    line, told = line_of(run("old"))
    follower = Follower(ModelRegistry(tmp_path), [line], load, lambda e, **f: told.append((e, f)))
    # Without a file nothing changes; nor if none is in production.
    follower.look()
    write(tmp_path)
    follower.look()
    assert line.now.run_id == "old"
    write(tmp_path, "new")
    for _ in range(3):
        follower.look()
    assert (line.now.run_id, asked) == ("new", ["new"])
    write(tmp_path, "new", "bad")
    for _ in range(3):
        follower.look()
    assert (line.now.run_id, asked) == ("new", ["new", "bad"])
    assert told[-1] == ("advice", {"said": "run new answers as before (bad: has no run of bank)"})
    # A file that is damaged is told of, and nothing else.
    (tmp_path / FILE).write_text("{")
    follower.look()
    assert (line.now.run_id, told[-1][0]) == ("new", "advice")
    write(tmp_path, "new", "bad", "old")
    follower.look()
    assert line.now.run_id == "old"


def test_a_token_opens_the_models_that_it_is_for(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    secrets = {
        name: f"Bearer {add_token(path, name, models=models)}"
        for name, models in {"churn": ("churn",), "run": ("run-b",), "any": ("*",)}.items()
    }
    tokens = Tokens(path)
    served = [
        made_served(scores, name=name, run_id=run_id, tokens=tokens)
        for name, run_id in (("churn", "run-a"), ("fraud", "run-b"), ("fraud", "run-c"))
    ]
    found = catalog(tokens, Counts(), *served)

    def status(who: str, *asked: str | None) -> int:
        try:
            found.open(secrets.get(who), *asked)
        except Denied as why:
            return why.status
        return 200

    # Of what it is not for, a token does not hear whether it is here.
    assert [status("churn", *of) for of in (("churn",), ("run-a",), ("churn", "run-a"))] == [
        200
    ] * 3
    assert [status("churn", *of) for of in (("fraud",), ("none",), ("run-b",))] == [403] * 3
    assert [status("churn", *of) for of in (("churn", "none"), ("churn", "run-b"))] == [404, 404]
    assert [status("run", *of) for of in (("fraud",), ("fraud", "run-c"))] == [200, 403]
    assert [status("any", *of) for of in (("none",), ("run-c",), ("run-c", "run-b"))] == [
        404,
        200,
        404,
    ]
    assert [status(who, None) for who in ("churn", "any")] == [422, 422]
    assert status("nobody", "churn") == 401
    names = {who: [each["name"] for each in found.list_models(secrets[who])] for who in secrets}
    assert names == {"churn": ["churn"], "run": ["fraud"], "any": ["churn", "fraud"]}
    with pytest.raises(Denied):
        found.allow("Bearer vfl_wrong")


def test_a_token_for_a_run_is_not_answered_by_another(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    secret = {name: add_token(path, name, models=(name,)) for name in ("case", "a", "b", "*")}
    tokens = Tokens(path)
    runs = [run("a", tokens=tokens), run("b", factor=2.0, tokens=tokens)]
    line, _ = line_of(*runs)
    found = Catalog({"case": ServedModel(line)}, tokens, Counts())

    def answered(who: str) -> str:
        served, token = found.open(f"Bearer {secret[who]}", "case")
        return asyncio.run(served.score(["7"], token)).part(0).run

    assert [answered(who) for who in ("case", "*", "a")] == ["a", "a", "a"]
    with pytest.raises(Denied):
        answered("b")
    line.want("b", no_load)
    line.step()
    assert [answered(who) for who in ("case", "*", "b")] == ["b", "b", "b"]
    with pytest.raises(Denied):
        answered("a")


def test_words_that_stand_for_a_run_name_a_recipe(tmp_path: Path) -> None:
    from vfl_serve.models import ChosenRun, choose

    registry = ModelRegistry(tmp_path)
    (tmp_path / "run-a").mkdir()
    assert choose(registry, "run-a", lambda: "case") == ChosenRun(tmp_path / "run-a")
    for given in ("production", "other:production", "other:latest"):
        with raises(InputError, Code.FILE_INVALID):
            choose(registry, given, lambda: "case")


def test_a_request_between_two_promotions_is_answered_by_the_run_of_now() -> None:
    """Its run has ended between its finding and its turn."""
    old, new = run("old"), run("new", factor=2.0)
    line, _ = line_of(old, keep=0)
    held = ServedModel(line).served
    assert held.run_id == "old"
    old.served.batcher.close()
    line.want("new", lambda: new)
    line.step()
    assert asyncio.run(held.score(["7"], None)).columns["score"].tolist() == [0.14]
    # Who asks for that run by its name gets no other.
    with pytest.raises(Denied):
        asyncio.run(old.served.score(["7"], None))
    new.served.batcher.close()
