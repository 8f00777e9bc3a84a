"""What a recipe may say of its task."""

from __future__ import annotations

from typing import Any

import pytest

from tests.harness.errors import raises
from vfl_common.config.base import parse
from vfl_common.config.task import TaskSettings, ThresholdRule
from vfl_common.errors import Code, InputError


@pytest.mark.parametrize(
    "table",
    [
        {"kind": "binary", "loss": "Foo"},
        {"kind": "binary", "loss": 3},
        {"kind": "binary", "loss": {"gamma": 3}},
        {"kind": "binary", "loss": {"kind": "focal", "gamma": -1}},
        {"kind": "binary", "loss": "mae"},
        {"kind": "regression", "loss": "focal"},
        {"kind": "regression", "loss": "quantile"},
        {"kind": "regression", "loss": {"kind": "quantile", "q": 1.0}},
        {"kind": "regression", "label_smoothing": 0.1},
        {"kind": "binary", "label_smoothing": 0.1, "loss": "focal"},
        {"kind": "regression", "class_weight": "balanced"},
        {"kind": "multilabel", "classes": 3, "class_weight": "balanced"},
        {"kind": "binary", "class_weight": "even"},
        {"kind": "binary", "class_weight": {}},
        {"kind": "binary", "class_weight": {"yes": -1}},
        {"kind": "binary", "class_weight": [1, 2]},
        {"kind": "binary", "threshold": 1.0},
        {"kind": "binary", "threshold": True},
        {"kind": "binary", "threshold": "f2"},
        {"kind": "binary", "threshold": "cost"},
        {"kind": "binary", "threshold": {"rule": "rate"}},
        {"kind": "binary", "threshold": {"rule": "f1", "rate": 0.1}},
        {"kind": "binary", "threshold": {"rate": 0.1}},
        {"kind": "multiclass", "classes": 3, "threshold": 0.4},
        {"kind": "binary", "metrics": ["r2"]},
        {"kind": "binary", "metrics": ["top_2"]},
        {"kind": "regression", "metrics": ["ks"]},
        {"kind": "multilabel"},
        {"kind": "survival", "loss": "mae"},
        {"kind": "survival", "class_weight": "balanced"},
        {"kind": "survival", "metrics": ["ks"]},
        {"kind": "multilabel", "classes": 2, "positive": "yes"},
    ],
)
def test_what_does_not_fit_is_one_sentence(table: dict[str, Any]) -> None:
    with raises(InputError, Code.CONFIG_INVALID):
        parse(TaskSettings, table, "recipe: task")


def test_names_stand_for_tables() -> None:
    short = parse(TaskSettings, {"kind": "binary", "loss": "focal", "threshold": "f1"}, "")
    long = {"kind": "binary", "loss": {"kind": "focal", "gamma": 2.0}, "threshold": {"rule": "f1"}}
    assert short == parse(TaskSettings, long, "")
    assert isinstance(short.threshold, ThresholdRule)
    assert short.shaped == {"loss"}
    assert TaskSettings.model_validate(short.model_dump(exclude_defaults=True)) == short


def test_metrics_of_ours_are_no_plug_ins() -> None:
    three = parse(
        TaskSettings, {"kind": "multiclass", "classes": 3, "metrics": ["top_2", "mine"]}, ""
    )
    assert (three.own_metrics, three.plugin_metrics) == (("top_2",), ("mine",))
    assert three.all_metrics == ("loss", "accuracy", "auc", "f1", "top_2", "mine")
