"""Numbers in a recipe that no training survives are refused where they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from tests.harness.errors import raises
from tests.unit.lab.test_alone import party_of, tables
from vfl_common.config.base import Section, parse
from vfl_common.config.models import OptimizerSettings
from vfl_common.config.recipe_tables import RunSettings
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.models.metrics import evaluate
from vfl_party.phases.course import load_method
from vfl_party.privacy.plan import DpSettings
from vfl_party.selfsup.settings import AugmentSettings

KINDS: dict[str, dict[str, Any]] = {
    "fedhssl": {"ssl": "moco"},
    "contrastive": {},
    "fedonce": {"objective": "contrastive"},
    "gbdt": {},
    "splitnn": {"steps": 1},
}


@pytest.mark.parametrize(
    ("where", "key", "bad", "good"),
    [
        (OptimizerSettings, "lr", [0.0, -1.0, 1e9, float("inf"), float("nan")], [1e-12, 1000.0]),
        (OptimizerSettings, "clip_norm", [0.0, 1e-300, 1e300], [1e-6, 1e6]),
        (OptimizerSettings, "weight_decay", [-1e-9, 1e9], [0.0, 1.0]),
        (DpSettings, "epsilon", [0.0, 1e-300, 1e300], [1e-3, 1e6]),
        ("fedhssl", "temperature", [0.0, 1e-300, 1e300], [0.07]),
        ("contrastive", "temperature", [0.0, 1e-300, 1e300], [0.07]),
        ("fedonce", "temperature", [0.0, 1e-300, 1e300], [0.07]),
        ("splitnn", "validate_every", [0, 10**9], [1, 1000]),
        ("gbdt", "trees", [0, 10**12], [1]),
        ("gbdt", "lr", [0.0, 1e300], [0.1]),
        (AugmentSettings, "crop_ratio", [(1e-300, 1.0), (1.0, 1e300)], [(0.5, 2.0)]),
    ],
)
def test_what_is_not_sane_is_refused_by_its_key(
    where: type[Section] | str, key: str, bad: list[Any], good: list[Any]
) -> None:
    model = load_method(where).settings if isinstance(where, str) else where
    given = KINDS.get(where, {}) if isinstance(where, str) else {}
    for value in bad:
        with raises(InputError, Code.CONFIG_INVALID):
            parse(model, given | {key: value}, "here")
    for value in good:
        assert getattr(parse(model, given | {key: value}, "here"), key) == value


@pytest.mark.parametrize("norm", [0.0, 1e-300, 1e300, float("inf")])
def test_rows_gradients_are_clipped_at_a_sane_norm(norm: float) -> None:
    with raises(InputError, Code.CONFIG_INVALID, names="max_grad_norm"):
        parse(DpSettings, {"epsilon": 1.0, "max_grad_norm": norm}, "here")
    assert parse(DpSettings, {"epsilon": 1.0, "max_grad_norm": 0.1}, "here").max_grad_norm == 0.1


@pytest.mark.parametrize("kind", ["binary", "multiclass", "regression"])
def test_the_metrics_of_a_task_are_those_of_evaluation(kind: str) -> None:
    task = TaskSettings(kind=kind, classes=3 if kind == "multiclass" else None)  # type: ignore[arg-type]
    targets = (
        torch.arange(6) % task.outputs if kind == "multiclass" else (torch.arange(6.0) % 2)[:, None]
    )
    assert set(evaluate(task, torch.randn(6, task.outputs), targets)) == set(task.all_metrics)


def test_a_run_has_no_more_rounds_than_labels_can_count() -> None:
    party = party_of(tables(1), [{"kind": "splitnn", "epochs": 10**6}])
    with raises(InputError, Code.CONFIG_INVALID, names=("validate_every", "000")):
        party.course.build(party)


def test_a_death_is_noticed_before_a_step_takes_too_long() -> None:
    with raises(ValidationError, names=("server_absent_s", "step_timeout_s")):
        RunSettings(server_absent_s=60.0, step_timeout_s=10.0, lost_after_s=10.0)
    assert RunSettings(step_timeout_s=10.0, lost_after_s=10.0).server_absent_s == 0.0
