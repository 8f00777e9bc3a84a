"""What a recipe's phases say is asked of their methods in one place, and no other package knows a
method's name.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from tests.harness import cases
from tests.harness.errors import raises
from vfl_common.config.recipe import Recipe
from vfl_common.errors import Code, InputError
from vfl_party.phases.course import Course, list_kinds, load_method
from vfl_party.phases.method import Method

REPO = Path(__file__).parents[4]
# The recipe's own word for a phase that only measures: a summary does not count it as a method.
# The trees of ``model.top`` have the word of the baseline's phase: both are boosted trees.
SHARED_WORDS = {
    ("vfl_common/text.py", "evaluate"),
    ("vfl_common/config/models.py", "gbdt"),
}


def course(*phases: dict[str, Any], **more: Any) -> Course:
    return Course(Recipe.model_validate(cases.recipe(2) | {"phases": list(phases)} | more))


def test_no_name_of_a_method_stands_in_what_both_programs_speak_or_in_the_server() -> None:
    names, found, texts = set(list_kinds()), set[tuple[str, str]](), 0
    for package in ("vfl_common", "vfl_server"):
        for file in (REPO / package).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    texts += 1
                    if node.value in names:
                        found.add((file.relative_to(REPO).as_posix(), node.value))
    assert len(names) > 10
    assert texts > 1000
    assert found == SHARED_WORDS


def test_a_phase_is_read_once() -> None:
    made = course({"kind": "splitnn", "epochs": 2}, {"kind": "evaluate"})
    first, last = made.phases
    assert first.settings is first.settings
    assert (first.settings.epochs, first.settings.batch_size) == (2, 64)
    assert (made.evaluated, made.late_policy, made.in_flight) == ({"validation", "test"}, "wait", 1)
    assert last.method is load_method("evaluate")


def test_settings_of_a_phase_that_runs_no_more_are_read_only_if_they_decide_the_encoder() -> None:
    """``start.phases`` says how the encoder is made: the rounds of ``contrastive`` do not."""
    start = {"run": "before", "phases": [{"kind": "contrastive", "rounds": -1}]}
    made = course({"kind": "splitnn", "epochs": 1}, start=start)
    assert (made.protected, made.follows_preset) == ("", True)
    start = {"run": "before", "phases": [{"kind": "splitnn", "mid": -1.0}]}
    with raises(InputError, Code.CONFIG_INVALID):
        _ = course({"kind": "splitnn", "epochs": 1}, start=start).protected


@pytest.mark.parametrize(
    "given", [{"traffic": None}, {"late": None}, {"kept": False}, {"own": None}], ids=list
)
def test_a_method_takes_no_hooks_as_arguments(
    given: dict[str, Any],
) -> None:
    like = load_method("head")
    with raises(TypeError):
        Method(like.settings, like.active, like.passive, **given)
    with raises(TypeError):
        Method(like.settings, like.active, like.passive, None)  # type: ignore[call-arg, arg-type]
