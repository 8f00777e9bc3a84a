"""The registry of models, and the log of predictions: plain files in a folder of runs."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.harness.cases import recipe
from tests.harness.errors import raises
from vfl.summary.reading import find_runs
from vfl_common import scorings
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_common.registry import FILE, ModelRegistry
from vfl_common.run_folder import create
from vfl_lab.production.upkeep import models, old_scorings


def trained(
    out: Path, run_id: str, *, name: str = "case", party: str = "p0", parties: int = 2, **facts: Any
) -> None:
    """Makes a party's folder of a run as training leaves it."""
    found = Recipe.model_validate(recipe(parties) | {"name": name})
    folder = create(out, run_id, party, found)
    folder.note(**({"job": "train", "trained": True} | facts))
    folder.prepare_finished_note()()
    folder.unlock()


def stages(out: Path) -> dict[str, str]:
    registry = ModelRegistry(out)
    lines = registry.lines()
    return {
        each.run_id: lines[each.recipe].stage(each.run_id) if each.recipe in lines else "candidate"
        for each in registry.list_trained()
    }


A, B, C = (f"2026010{day}-020000-case-aaaa" for day in (1, 2, 3))


def test_one_run_of_a_recipe_is_in_production(tmp_path: Path) -> None:
    for run in (B, A, C):
        trained(tmp_path, run)
    registry = ModelRegistry(tmp_path)
    assert stages(tmp_path) == {C: "candidate", B: "candidate", A: "candidate"}
    assert list(stages(tmp_path)) == [C, B, A]
    assert registry.promote(A) is None
    assert registry.promote(B) == A
    # Again: nothing changes.
    assert registry.promote(B) == B
    assert len(registry.changes()) == 2
    assert stages(tmp_path) == {C: "candidate", B: "production", A: "retired"}
    assert registry.find("production") == registry.find("production", "case") == B
    assert registry.find("latest") == C
    assert registry.promote(C) == B
    assert registry.rollback() == (B, C)
    assert registry.rollback("case") == (A, B)
    assert stages(tmp_path) == {C: "retired", B: "retired", A: "production"}
    with raises(InputError, Code.FILE_INVALID):
        registry.rollback()
    # What was retired can come back.
    assert registry.promote(C) == A
    assert stages(tmp_path) == {C: "production", B: "retired", A: "retired"}


def test_a_baseline_is_the_latest_only_if_there_is_no_other(tmp_path: Path) -> None:
    trained(tmp_path, B, parties=1)
    assert ModelRegistry(tmp_path).find("latest") == B
    trained(tmp_path, A)
    trained(tmp_path, C, parties=1)
    assert (
        ModelRegistry(tmp_path).find("latest") == ModelRegistry(tmp_path, "p0").find("latest") == A
    )


def test_a_run_in_production_can_be_retired_and_the_one_before_comes_back(tmp_path: Path) -> None:
    for run in (A, B):
        trained(tmp_path, run)
        ModelRegistry(tmp_path).promote(run)
    assert ModelRegistry(tmp_path).retire(B) == "production"
    with raises(InputError, Code.FILE_INVALID):
        ModelRegistry(tmp_path).find("production")
    assert ModelRegistry(tmp_path).rollback() == (A, None)
    assert stages(tmp_path) == {B: "retired", A: "production"}


def test_recipes_have_models_of_their_own(tmp_path: Path) -> None:
    trained(tmp_path, A)
    trained(tmp_path, B, name="other")
    registry = ModelRegistry(tmp_path)
    registry.promote(A)
    registry.promote(B)
    assert (registry.find("production", "case"), registry.find("production", "other")) == (A, B)
    assert registry.find("latest", "case") == A
    for act in (registry.find, lambda _word: registry.rollback()):
        with raises(InputError, Code.CONFIG_INVALID):
            act("production")


def test_only_what_was_trained_to_the_end_counts(tmp_path: Path) -> None:
    trained(tmp_path, A)
    trained(tmp_path, B, trained=False)
    trained(tmp_path, C, job="predict")
    assert list(stages(tmp_path)) == [A]
    with raises(InputError, Code.FILE_INVALID):
        ModelRegistry(tmp_path).promote(B)
    # Another party's run is not this one's.
    assert ModelRegistry(tmp_path, "p1").list_trained() == []
    with raises(InputError, Code.FILE_INVALID):
        ModelRegistry(tmp_path, "p1").find("latest", "case")


def test_a_run_with_a_name_of_its_own_began_when_its_recipe_was_written(tmp_path: Path) -> None:
    for at, run in ((30, "nightly-a"), (10, "nightly-b"), (20, "nightly-c")):
        trained(tmp_path, run)
        os.utime(tmp_path / run / "p0" / "recipe.json", (at, at))
    assert list(stages(tmp_path)) == ["nightly-a", "nightly-c", "nightly-b"]


def test_the_newest_of_runs_of_one_second_was_written_last(tmp_path: Path) -> None:
    runs = [f"20260101-020000-case-{end}" for end in ("bbbb", "aaaa", "cccc")]
    for at, run in zip((30, 10, 20), runs, strict=True):
        for party in ("p0", "p1"):
            trained(tmp_path, run, party=party)
            os.utime(tmp_path / run / party / "recipe.json", (at, at))
    assert list(stages(tmp_path)) == [runs[0], runs[2], runs[1]]
    assert ModelRegistry(tmp_path).find("latest") == runs[0]
    assert [each.folder.name for each in find_runs(tmp_path)[0]] == [runs[0], runs[2], runs[1]]


def test_a_run_is_named_by_its_id_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained(tmp_path / "runs", A)
    monkeypatch.chdir(tmp_path)
    registry, by_id = ModelRegistry(Path("runs")), Path("runs") / A
    assert [registry.folder(each) for each in (A, str(by_id), "latest")] == [by_id] * 3
    assert registry.folder("nothing") == Path("nothing")
    # What is here goes before.
    Path(A).mkdir()
    assert registry.folder(A) == Path(A)


def test_a_model_whose_folder_is_gone_is_named(tmp_path: Path) -> None:
    trained(tmp_path, A)
    trained(tmp_path, B)
    ModelRegistry(tmp_path).promote(A)
    (tmp_path / A / "p0" / "run.json").unlink()
    with raises(InputError, Code.FILE_INVALID):
        ModelRegistry(tmp_path).find("production")


CHANGE = {"act": "promote", "run": A, "recipe": "case", "at": "2026", "who": "x"}
DAMAGED = {
    "empty": "",
    "cut": "[",
    "more": "{}x",
    "keys": '[{"run": 1}]',
    "number": "[3]",
    "object": "{}",
    "text": '""',
    "null": "null",
    "deep": "[" * 100_000,
    "act": json.dumps([CHANGE | {"act": "demote"}]),
    "act-list": json.dumps([CHANGE | {"act": []}]),
    "run-list": json.dumps([CHANGE | {"run": [A]}]),
    "run-path": json.dumps([CHANGE | {"run": "../a"}]),
    "recipe-null": json.dumps([CHANGE | {"recipe": None}]),
    "at-number": json.dumps([CHANGE | {"at": 5}]),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_registry_says_so(tmp_path: Path, text: str) -> None:
    trained(tmp_path, A)
    (tmp_path / FILE).write_text(text)
    with raises(InputError, Code.FILE_INVALID, names="models.json"):
        ModelRegistry(tmp_path).promote(A)
    with raises(InputError, Code.FILE_INVALID, names="models.json"):
        models(tmp_path)
    assert (tmp_path / FILE).read_text() == text


def test_changes_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    runs = [f"2026010{day}-020000-case-aaaa" for day in range(1, 9)]
    for run in runs:
        trained(tmp_path, run)
    threads = [threading.Thread(target=ModelRegistry(tmp_path).promote, args=[run]) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {each.run for each in ModelRegistry(tmp_path).changes()} == set(runs)
    assert sum(stage == "production" for stage in stages(tmp_path).values()) == 1


FACTS: dict[str, Any] = {"party": "bank", "recipe": "churn", "rows": 3, "scored": 2, "run": "r"}


def test_the_log_of_predictions_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert scorings.read(tmp_path) == []
    for model in (A, B):
        scorings.note(tmp_path, model=model, **FACTS)
    path = tmp_path / scorings.FILE
    assert path.stat().st_mode & 0o777 == 0o600
    # A crash has cut a line short; a later release knows more.
    later = json.loads(path.read_text().splitlines()[0]) | {"model": C, "more": 1}
    with path.open("a") as file:
        file.write(json.dumps(later) + '\n{"at": "2026')
    found = scorings.read(tmp_path)
    assert [each.model for each in found] == [A, B, C]
    assert {(each.party, each.rows, each.scored, bool(each.who)) for each in found} == {
        ("bank", 3, 2, True)
    }
    scorings.remove(tmp_path, lambda each: each.model == B)
    assert [each.model for each in scorings.read(tmp_path)] == [A, C]
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_line_that_was_cut_takes_no_other_with_it(tmp_path: Path) -> None:
    path = tmp_path / scorings.FILE
    path.write_text('{"at": "2026')
    scorings.note(tmp_path, model=A, **FACTS)
    scorings.note(tmp_path, model=B, **FACTS)
    assert [each.model for each in scorings.read(tmp_path)] == [A, B]
    assert len(path.read_text().splitlines()) == 3


WRONG: list[dict[str, Any]] = [
    {"at": 5}, {"output": 5}, {"party": None}, {"rows": "3"}, {"scored": True}, {"model": [A]},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: next(iter(wrong)))
def test_a_line_with_a_value_of_another_kind_is_left_out(
    tmp_path: Path, wrong: dict[str, Any]
) -> None:
    scorings.note(tmp_path, model=A, **FACTS)
    path = tmp_path / scorings.FILE
    with path.open("a") as file:
        file.write(json.dumps(json.loads(path.read_text()) | wrong) + "\n")
    assert [each.model for each in scorings.read(tmp_path)] == [A]
    assert old_scorings(tmp_path, 0) == scorings.read(tmp_path)


def test_lines_that_stay_are_not_changed(tmp_path: Path) -> None:
    for model in (A, B):
        scorings.note(tmp_path, model=model, **FACTS)
    path = tmp_path / scorings.FILE
    first, second = path.read_bytes().splitlines()
    later = second.replace(b"}", b', "more": 1}')
    stays = [b"\xff no JSON", later, b'{"at": 5}', b'{"at": "2026']
    path.write_bytes(b"\n".join([first, *stays]))
    assert scorings.remove(tmp_path, lambda each: each.model == A) == 1
    assert path.read_bytes() == b"".join(line + b"\n" for line in stays)
    assert scorings.remove(tmp_path, lambda each: each.model == A) == 0


def test_nothing_is_lost_while_old_lines_are_removed(tmp_path: Path) -> None:
    """Writers and a remover at once: each line that is to stay is there at the end."""
    scorings.note(tmp_path, model=A, **FACTS)

    def write() -> None:
        for _ in range(20):
            scorings.note(tmp_path, model=B, **FACTS)
            scorings.note(tmp_path, model=A, **FACTS)

    writers = [threading.Thread(target=write) for _ in range(3)]
    for each in writers:
        each.start()
    while any(each.is_alive() for each in writers):
        scorings.remove(tmp_path, lambda each: each.model == A)
    for each in writers:
        each.join()
    scorings.remove(tmp_path, lambda each: each.model == A)
    assert [each.model for each in scorings.read(tmp_path)] == [B] * 60
