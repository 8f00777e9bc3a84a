"""Trees that are served: the numbers of a prediction, a question a level, and nobody's split but
those on an id's own way.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

import vfl
from tests.harness.errors import raises
from tests.harness.online import Online, numbers, predicted, store_of
from tests.harness.served import NAMES, Served, trained
from tests.integration.test_secureboost import made_table, recipe
from vfl.simulation.federation import Origin
from vfl_common.errors import Code, PeerError
from vfl_common.rpc.serving.stream import EMBEDDED, NOT_ANSWERED, ServingAnswer, Step
from vfl_party.methods.secureboost.forest import SETTLED
from vfl_serve.answering import DailyLimit
from vfl_serve.kinds import StepAnswers

DEPTH, TREES = 3, 5
TASKS: dict[str, dict[str, Any]] = {
    "binary": {"kind": "binary"},
    "multiclass": {"kind": "multiclass", "classes": 3},
    "regression": {"kind": "regression"},
}


def train(folder: Path, task: str, missing: str = "mean") -> vfl.Run:
    data = made_table(folder, 3, task)
    given = {
        name: vfl.Data(
            str(folder / each["source"]),
            id="id",
            label=each.get("label"),
            settings={"columns": each["columns"], "missing": missing},
        )
        for name, each in data.items()
    }
    tables = recipe(3, TASKS[task], depth=DEPTH, trees=TREES)
    return vfl.simulate(tables, data=given, out=folder / "runs", quiet=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> vfl.Run:
    return train(tmp_path_factory.mktemp("trees"), "binary")


@pytest.mark.parametrize("task", TASKS)
def test_online_is_predict_bit_for_bit(task: str, tmp_path: Path) -> None:
    """With numbers and categories, some missing."""
    run = train(tmp_path, task)
    want, online = predicted(run), Online.of(run.folder)
    ids = list(want)
    for group in (ids, ids[5:6], ids[7:25]):
        found = online.score(*group)
        assert set(found.state) == {"scored"}
        assert {each: numbers(found, at) for at, each in enumerate(group)} == {
            each: want[each] for each in group
        }
        assert found.part(0).parties == ("p0", "p1", "p2")
    # The first question asks all, and each further level those that it needs.
    assert len([name for name, *_ in online.asked if name == "p1"]) <= 3 * DEPTH
    assert all(
        bool(asked) for _, asked, step in online.asked if step is not None and not step.first
    )


def test_columns_of_a_caller_take_the_place_of_the_table(run: vfl.Run) -> None:
    online, want = Online.of(run.folder), predicted(run)
    ids = list(want)[:40]
    frame = pd.read_csv(Origin.of(run.folder).data["p0"].source).set_index("id").loc[ids]
    columns = {
        name: [None if pd.isna(each) else each for each in frame[name].tolist()]
        for name in ("x0", "x1", "x2", "w0")
    }
    found = online.score(*ids, columns=columns)
    assert {each: numbers(found, at) for at, each in enumerate(ids)} == {
        each: want[each] for each in ids
    }


def test_a_row_that_needs_a_missing_party_has_no_score(run: vfl.Run) -> None:
    online, want = Online.of(run.folder), predicted(run)
    ids = list(want)
    online.away["p1"] = ("away", 0)
    found = online.score(*ids)
    assert set(found.state) == {"incomplete", "partly"}
    for at, each in enumerate(ids):
        assert found.part(at).missing == {"p1": "away"}
        if found.state[at] == "partly":
            # No tree has led it to a split of p1's.
            assert numbers(found, at) == want[each]
    assert found.has_score == [state == "partly" for state in found.state]


def test_a_party_that_is_late_after_the_first_level_is_named(run: vfl.Run) -> None:
    online, want = Online.of(run.folder), predicted(run)
    ids = list(want)
    online.away["p1"] = ("late", 2)
    found = online.score(*ids)
    assert {*found.state} <= {"incomplete", "scored"}
    late = [at for at, state in enumerate(found.state) if state == "incomplete"]
    assert late
    assert all(found.part(at).missing == {"p1": "late"} for at in late)
    there = [at for at, state in enumerate(found.state) if state == "scored"]
    assert all(numbers(found, at) == want[ids[at]] for at in there)


@pytest.mark.parametrize("later", [NOT_ANSWERED, EMBEDDED])
def test_a_party_that_says_something_else_of_an_id_later_takes_no_part(
    later: int, run: vfl.Run
) -> None:
    """Else a row without a score would miss nobody, or one with a score would miss who gave it."""
    online, ids = Online.of(run.folder), list(predicted(run))
    honest = online.answers["p1"]

    def changed(asked: list[str], until_s: float, step: Step) -> ServingAnswer:
        found: ServingAnswer = honest(asked, until_s, step)
        first = EMBEDDED if later == NOT_ANSWERED else NOT_ANSWERED
        return replace(found, state=bytes([first if step.begins else later]) * len(ids))

    online.answers = {**online.answers, "p1": changed}
    found = online.score(*ids)
    assert "incomplete" in found.state
    for at, state in enumerate(found.state):
        # No tree has led a row to p1 that has a score.
        assert (state == "incomplete") <= ("p1" in found.part(at).missing)
        assert (state == "scored") == (not found.part(at).missing)


def test_of_an_id_that_the_active_party_does_not_know_nobody_is_asked(run: vfl.Run) -> None:
    online = Online.of(run.folder)
    found = online.score("nobody", "r0003")
    assert found.state == ["unknown", "scored"]
    assert (found.part(0).parties, found.part(0).missing) == ((), {"p0": "unknown id"})
    assert all(ids == ["r0003"] for _, ids, _ in online.asked)
    online.asked.clear()
    assert online.score("nobody").state == ["unknown"]
    assert not online.asked


def test_answers_of_a_day_are_counted_by_scoring(run: vfl.Run, tmp_path: Path) -> None:
    limit = DailyLimit(tmp_path / "answers.sqlite", 2)
    online = Online.of(run.folder, limit=None)
    online.answers["p1"]._limit = limit
    for _ in range(2):
        assert online.score("r0001").state == ["scored"]
    found = online.score("r0001", "r0002")
    assert found.part(0).missing == {"p1": "not answered"}
    assert (found.state[1], found.part(1).missing) == ("scored", {})
    limit.close()


def numbers_of(run: vfl.Run, name: str) -> list[str]:
    """Returns the columns of numbers of a party."""
    return [x for x in Origin.of(run.folder).data[name].columns or () if x.startswith("x")]


def asked_of(run: vfl.Run, name: str, path: Path) -> dict[str, Any]:
    """Writes the table of a party into a database; returns what has it asked by id."""
    data = Origin.of(run.folder).data[name]
    with sqlite3.connect(path) as file:
        pd.read_csv(data.source).to_sql("people", file, index=False)
    columns = ", ".join(["id", *(data.columns or ())])
    query = f"SELECT {columns} FROM people WHERE id IN :ids"  # noqa: S608 - the test's own words
    return {"store": {"kind": "database", "source": f"sqlite:///{path}", "query": query}}


def test_databases_that_are_asked_by_id_give_the_same_numbers(run: vfl.Run, tmp_path: Path) -> None:
    """At the active party, too; a row that cannot be used is named, and leaves the others alone."""
    paths = {name: tmp_path / f"{name}.db" for name in ("p0", "p1")}
    serve = {name: asked_of(run, name, path) for name, path in paths.items()}
    online, want = Online.of(run.folder, serve=serve), predicted(run)
    ids = list(want)
    found = online.score(*ids)
    assert set(found.state) == {"scored"}
    assert {each: numbers(found, at) for at, each in enumerate(ids)} == want
    for name, each in (("p0", ids[1]), ("p1", ids[2])):
        column = numbers_of(run, name)[0]
        with sqlite3.connect(paths[name]) as file:
            file.execute(f"UPDATE people SET {column} = 'much' WHERE id = ?", (each,))  # noqa: S608
    found = online.score(*ids[:4], "nobody")
    assert [found.state[at] for at in (0, 1, 3, 4)] == ["scored", "failed", "scored", "unknown"]
    assert found.state[2] in ("incomplete", "partly")
    assert [found.part(at).missing for at in (1, 2, 4)] == [
        {"p0": "failed"},
        {"p1": "not answered"},
        {"p0": "unknown id"},
    ]
    with sqlite3.connect(paths["p0"]) as file:
        file.execute("DROP TABLE people")
    found = online.score(*ids[:2])
    assert found.state == ["failed", "failed"]
    assert found.part(0).missing == {"p0": "failed"}
    online.close()


def test_a_cell_that_is_emptied_is_another_table(tmp_path: Path) -> None:
    """Trees tell it from the number that would fill it."""
    run = train(tmp_path, "binary", "zero")
    path = Path(Origin.of(run.folder).data["p1"].source)
    frame = pd.read_csv(path)
    column = numbers_of(run, "p1")[0]
    frame.loc[0, column] = 0.0
    frame.to_csv(path, index=False)
    store = store_of(run.folder, "p1")
    frame.loc[0, column] = None
    frame.to_csv(path, index=False)
    assert [store.refresh() for _ in range(2)] == [False, True]
    store.close()


def soon() -> float:
    return time.monotonic() + 20.0


def question(level: int, nodes_NT: Any) -> bytes:
    return bytes([level]) + np.asarray(nodes_NT, np.uint8).tobytes()


def test_what_does_not_lie_on_the_way_of_an_id_is_refused(run: vfl.Run) -> None:
    """Who asks for more than a scoring needs learns nothing of it."""
    online = Online.of(run.folder)
    answers = online.answers["p1"]
    assert isinstance(answers, StepAnswers)
    trees = answers._side.online._forest.trees  # type: ignore[attr-defined]
    nobody = np.full((1, len(trees)), SETTLED)
    own = next(
        (number, level, node)
        for number, tree in enumerate(trees)
        for level, node in tree.splits
        if not any((level - up, node >> up) in tree.splits for up in range(1, level + 1))
    )
    number, level, node = own
    asked = nobody.copy()
    asked[0, number] = node

    def ask(number: int, level: int, nodes: Any, *, begins: bool = True) -> Any:
        step = Step(question(level, nodes), number, begins)
        return answers(["r0001"] if begins else [], soon(), step)

    found = ask(1, level, asked)
    assert found.state == bytes([EMBEDDED])
    # Only the bit of that tree may be set.
    bits = np.unpackbits(np.frombuffer(found.answered, np.uint8), count=len(trees))
    assert not np.delete(bits, number).any()
    for wrong in (
        # A level twice, one that is none, a split of another, and other bytes.
        lambda: ask(1, level, asked, begins=False),
        lambda: ask(2, DEPTH, nobody),
        lambda: ask(3, level, np.full((1, len(trees)), 1 if not level else 200)),
        lambda: ask(4, level, asked[:, 1:]),
        lambda: ask(5, level, asked, begins=False),
        lambda: answers(["r0001"], soon(), None),
    ):
        with raises(PeerError, Code.MALFORMED_MESSAGE):
            wrong()
    # An id that it does not know, it says nothing of.
    unknown = answers(["nobody"], soon(), Step(question(level, asked), 9))
    assert not any(unknown.state)
    assert not any(unknown.answered)


# -- the programs


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    phase = {"kind": "secureboost", "trees": 4, "depth": 3, "bins": 8, "encryption": "none"}
    with trained(tmp_path_factory.mktemp("serve"), phase) as found:
        found.start_all()
        yield found


def test_programs_give_the_numbers_of_a_prediction(served: Served) -> None:
    want = predicted(served.run)
    rows = served.rows(*want)
    assert {row["id"]: {name: row[name] for name in ("score_1", "class")} for row in rows} == want
    assert {(row["state"], *row["parties"]) for row in rows} == {("scored", *NAMES)}


def test_a_party_of_trees_that_is_killed_is_named_and_comes_back(served: Served) -> None:
    served.program("p2").kill()
    served.wait_for(("p1",))
    rows = served.rows(*predicted(served.run))
    assert "incomplete" in {row["state"] for row in rows} <= {"incomplete", "partly"}
    assert all(row["missing"] == {"p2": "away"} for row in rows)
    assert all((row["score_1"] is None) == (row["state"] == "incomplete") for row in rows)
    served.start("p2").wait_for("ready")
    began_s = time.monotonic()
    served.wait_for(NAMES[1:])
    assert time.monotonic() - began_s < 2.0
    assert served.rows("K-1")[0]["state"] == "scored"
