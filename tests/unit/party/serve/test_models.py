"""Which run of a model answers, and how requests are shared among runs."""

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
from vfl_common.production.registry import FILE, Change, ModelRegistry
from vfl_party.serve.batching import Given
from vfl_party.serve.counts import Counts
from vfl_party.serve.models.compare import Disagreement, shares
from vfl_party.serve.models.follow import Follower
from vfl_party.serve.models.lineage import STEPS_BEHIND, Lineage
from vfl_party.serve.scored import RequestPart, ServedScores
from vfl_party.serve.tokens import Denied, Tokens, add_token

pytest.importorskip("fastapi", reason="the extra serve is not installed")

from tests.harness.serving import FakeRun, catalog, made_served
from vfl_party.serve.http.catalog import Catalog, ServedModel
from vfl_party.serve.http.routed import Routed
from vfl_party.serve.http.served import Served

Events = list[tuple[str, dict[str, Any]]]


def scores(values: Sequence[float], run_id: str = "", parties: str = "bank") -> ServedScores:
    n = len(values)
    part = RequestPart(tuple(parties.split()), {}, run=run_id)
    columns = {"score": np.array(values), "class": np.array([int(each > 0.5) for each in values])}
    return ServedScores(columns, ["scored"] * n, [part], np.zeros(n, np.int64))


def run(run_id: str, *there: str, factor: float = 1.0, **more: Any) -> FakeRun:
    """Makes a run that scores the id ``7`` with ``0.07 * factor``."""

    def score(ids: Sequence[str], _least: float | None, columns: Given | None) -> ServedScores:
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
    assert (event, facts["said"]) == (
        "advice",
        "run new waits until south serves it; old answers",
    )
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
    assert told[-1] == (
        "advice",
        {"said": "run new answers as before (bad: has no run of bank)"},
    )
    # A file that is damaged is told of, and nothing else.
    (tmp_path / FILE).write_text("{")
    follower.look()
    assert (line.now.run_id, told[-1][0]) == ("new", "advice")
    write(tmp_path, "new", "bad", "old")
    follower.look()
    assert line.now.run_id == "old"


def test_an_id_always_has_the_same_run() -> None:
    ids = [f"K-{number}" for number in range(4000)]
    of_N = shares(ids, {"b": 0.1, "c": 0.3}, "case")
    assert np.bincount(of_N + 1) / len(ids) == pytest.approx([0.6, 0.1, 0.3], abs=0.03)
    assert shares(ids[::-7], {"b": 0.1, "c": 0.3}, "case").tolist() == of_N[::-7].tolist()
    # Whoever had it keeps it if it gets more; of another model they are others.
    more_N = shares(ids, {"b": 0.3}, "case")
    assert (more_N[of_N == 0] == 0).all()
    assert (shares(ids, {"b": 0.3}, "other") != more_N).mean() > 0.3
    assert (shares(ids, {"b": 1.0}, "case") == 0).all()


def ask(
    routed: Routed, now: Served, ids: Sequence[str], columns: Given | None = None
) -> ServedScores:
    return asyncio.run(routed.score(now, ids, None, columns))


def routed_of(*runs: FakeRun, **more: Any) -> Routed:
    known = {each.run_id: each.served for each in runs}
    return Routed("case", known.get, lambda ids: ids, **more)


def test_rows_that_go_to_several_runs_stay_in_order() -> None:
    a, b = run("a"), run("b", factor=2.0)
    ids = [str(number) for number in range(30)]
    of_N = shares(ids, {"b": 0.5}, "case")
    for columns in (None, {"x": [float(each) for each in ids]}):
        found = ask(routed_of(a, b, weights={"b": 0.5}), a.served, ids, columns)
        want = [number / 100 * (1 + (of + 1)) for number, of in zip(range(30), of_N, strict=True)]
        assert found.columns["score"].tolist() == pytest.approx(want)
        runs = [found.part(at).run for at in range(30)]
        assert runs == ["ab"[of + 1] for of in of_N.tolist()]
    # Each counts its own rows.
    assert a.served.counts.rows["scored"] == 2 * int((of_N < 0).sum())
    assert b.served.counts.rows["scored"] == 2 * int((of_N == 0).sum())


@pytest.mark.parametrize(
    "other",
    [run("b", "north"), run("b", "north", "south", columns={"value": np.dtype(float)})],
    ids=["a party lacks it", "other columns"],
)
def test_a_run_that_cannot_stand_in_gets_no_rows(other: FakeRun) -> None:
    now = run("a", "north", "south")
    for known in ((now, other), (now,)):
        found = ask(routed_of(*known, weights={"b": 1.0}), now.served, ["1", "2"])
        assert [found.part(at).run for at in range(2)] == ["a", "a"]


def test_a_shadow_scores_copies_and_changes_no_answer() -> None:
    now, shadow = run("a"), run("b", factor=2.0)
    routed = routed_of(now, shadow, weights={}, shadow="b")
    ids = [str(number) for number in range(40)]
    found = ask(routed, now.served, ids)
    assert {part.run for part in found.parts} == {"a"}
    shadow.served.batcher.close()
    said = routed.disagreement
    assert (said.rows, said.others) == (40, 0)
    # 0.26 to 0.39 become more than a half.
    assert said.decided == 14
    assert said.difference == pytest.approx(sum(range(40)) / 100)
    # It has ended, and the answer is there nevertheless.
    assert ask(routed, now.served, ids[:5]).columns["score"].tolist() == pytest.approx(
        [0, 0.01, 0.02, 0.03, 0.04]
    )
    assert (said.rows, said.others) == (40, 5)
    # The run in production is no shadow of itself.
    ask(routed, shadow_as_now := run("b").served, ids[:5])
    assert (said.rows, said.others, shadow_as_now.run_id) == (40, 5, "b")


def test_rows_are_compared_if_the_same_parties_took_part() -> None:
    said = Disagreement()
    said.compare(scores([0.1, 0.2], parties="bank shop"), scores([0.4, 0.2]))
    assert (said.rows, said.others) == (0, 2)
    none = ServedScores(
        scores([0.0]).columns, ["unknown"], [RequestPart((), {})], np.zeros(1, np.int64)
    )
    said.compare(none, none)
    assert (said.rows, said.others, said.difference) == (0, 3, 0.0)


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
    names = {who: [each["name"] for each in found.listed(secrets[who])] for who in secrets}
    assert names == {"churn": ["churn"], "run": ["fraud"], "any": ["churn", "fraud"]}
    with pytest.raises(Denied):
        found.allow("Bearer vfl_wrong")


def test_a_token_for_a_run_is_not_answered_by_another(tmp_path: Path) -> None:
    path = tmp_path / "tokens.json"
    secret = {name: add_token(path, name, models=(name,)) for name in ("case", "a", "b", "*")}
    tokens = Tokens(path)
    runs = [run("a", tokens=tokens), run("b", factor=2.0, tokens=tokens)]
    line, _ = line_of(*runs)
    model = ServedModel(line, routed_of(*runs, weights={"b": 1.0}))
    found = Catalog({"case": model}, tokens, Counts())

    def answered(who: str) -> str:
        served, token = found.open(f"Bearer {secret[who]}", "case")
        return asyncio.run(served.score(["7"], token)).part(0).run

    assert [answered(who) for who in ("case", "*", "a")] == ["b", "b", "a"]
    with pytest.raises(Denied):
        answered("b")


def test_words_that_stand_for_a_run_name_a_recipe(tmp_path: Path) -> None:
    from vfl_party.serve.models.chosen import Chosen, choose

    registry = ModelRegistry(tmp_path)
    (tmp_path / "run-a").mkdir()
    assert choose(registry, "run-a", lambda: "case") == Chosen(tmp_path / "run-a")
    for given in ("production", "other:production", "other:latest"):
        with raises(InputError, Code.FILE_INVALID):
            choose(registry, given, lambda: "case")


def test_a_request_between_two_promotions_is_answered_by_the_run_of_now() -> None:
    """Its run has ended between its finding and its turn; without a share, and with one."""
    old, new = run("old"), run("new", factor=2.0)
    line, _ = line_of(old, keep=0)
    routed = Routed("case", lambda _: old.served, lambda ids: ids, {"old": 1.0})
    for model in (ServedModel(line), ServedModel(line, routed)):
        held = model.served
        assert held.run_id == line.now.run_id
        old.served.batcher.close()
        line.want("new", lambda: new)
        line.step()
        assert asyncio.run(held.score(["7"], None)).columns["score"].tolist() == [0.14]
    # Who asks for that run by its name gets no other.
    with pytest.raises(Denied):
        asyncio.run(old.served.score(["7"], None))
    new.served.batcher.close()
