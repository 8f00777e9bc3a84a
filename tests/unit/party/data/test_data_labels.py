"""Labels to targets and back."""

import json
from typing import Any

import numpy as np
import pytest
import torch

from tests.harness.errors import raises
from vfl_common.config.task import TaskSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Labels

BINARY, THREE, NUMBER = (
    TaskSettings(kind="binary"),
    TaskSettings(kind="multiclass", classes=3),
    TaskSettings(kind="regression"),
)


def fit(raw: Any, task: TaskSettings, train: Any = (0, 1)) -> Labels:
    return Labels.fit(array(raw), task, np.array(train, np.int64), source="x.csv")


def array(raw: list[Any]) -> np.ndarray:
    return np.array(raw, object if isinstance(raw[0], str) else np.float64)


@pytest.mark.parametrize("raw", [[1.0, 0.0, 1.0], ["yes", "no", "yes"], [5.0, -2.0, 5.0]])
def test_binary(raw: list[Any]) -> None:
    labels = fit(raw, BINARY)
    y = labels.encode(array(raw))
    assert y.dtype == torch.float32
    assert y.tolist() == [[1], [0], [1]]
    assert labels.decode(y).tolist() == raw
    assert labels.decode(np.array([1, 0, 1])).tolist() == raw


@pytest.mark.parametrize(
    ("raw", "positive"),
    [
        ([1.0, 0.0], 0),
        ([1.0, 0.0], "0"),
        (["yes", "no"], "no"),
        (["true", "false"], False),
        ([0.5, 0.25], 0.25),
    ],
)
def test_the_positive_class_is_the_one_that_the_recipe_names(raw: list[Any], positive: Any) -> None:
    labels = fit(raw, TaskSettings(kind="binary", positive=positive))
    assert labels.encode(array(raw)).tolist() == [[0], [1]]
    assert labels.decode(np.array([1, 0])).tolist() == raw[::-1]
    assert Labels.from_state(json.loads(json.dumps(labels.state()))) == labels
    second = TaskSettings(kind="binary", positive=raw[0])
    assert fit(raw, second) == fit(raw, BINARY)


def test_a_positive_class_that_is_no_label() -> None:
    with raises(InputError, Code.DATA_INVALID, names=("ja", "x.csv")):
        fit(["yes", "no"], TaskSettings(kind="binary", positive="ja"))


def test_multiclass_sorts_numbers_as_numbers() -> None:
    labels = fit([10.0, 9.0, 2.5], THREE)
    assert labels.classes == (2.5, 9, 10)
    y = labels.encode(array([10.0, 2.5]))
    assert y.dtype == torch.int64
    assert y.tolist() == [2, 0]
    assert labels.decode(y).tolist() == [10.0, 2.5]
    whole = fit([3.0, 1.0], THREE)
    assert whole.decode(torch.tensor([0, 1])).dtype.kind == "i"
    assert fit(["b", "a", "c"], THREE).classes == ("a", "b", "c")


def test_regression_scales_by_training_rows() -> None:
    labels = fit([1.0, 3.0, 100.0], NUMBER)
    y = labels.encode(array([1.0, 3.0, 100.0]))
    assert y.dtype == torch.float32
    assert y.tolist() == [[-1], [1], [98]]
    assert labels.unscale(y).tolist() == [[1], [3], [100]]
    np.testing.assert_allclose(labels.decode(y), [1, 3, 100])
    assert fit([2.0, 2.0], NUMBER).encode(array([2.0, 3.0])).tolist() == [[0], [1]]


def test_regression_between_the_least_and_the_greatest_training_label() -> None:
    raw = array([1.0, 3.0, 100.0])
    labels = Labels.fit(raw, NUMBER, np.array([0, 1]), source="x.csv", scale="minmax")
    y = labels.encode(raw)
    assert y.tolist() == [[0], [1], [49.5]]
    assert labels.unscale(y).tolist() == [[1], [3], [100]]
    assert Labels.from_state(json.loads(json.dumps(labels.state()))) == labels


def test_refused() -> None:
    def refused(call: Any, *arguments: Any) -> None:
        with raises(InputError, Code.DATA_INVALID):
            call(*arguments)

    refused(fit, [1, 2, 3], BINARY)
    refused(fit, ["a", "a"], BINARY)
    refused(fit, [1, 2, 3, 4], THREE)
    refused(fit, ["1", "2"], NUMBER)
    refused(fit, [1, 2], NUMBER, [])
    refused(fit, [1e308, -1e308, 1.7e308], NUMBER, [0, 1, 2])
    refused(fit(["a", "b"], BINARY).encode, array(["a", "secret", "secret"]))
    refused(fit([0, 1], BINARY).encode, array(["0", "1"]))
    refused(fit([0, 1], NUMBER).encode, array(["0", "1"]))
    with raises(InputError, Code.DATA_INVALID):
        Labels.fit(None, BINARY, np.array([0]), source="x.csv")


@pytest.mark.parametrize(
    ("raw", "task"), [([1.0, 0.0], BINARY), (["b", "a"], THREE), ([0.1, 1 / 3], NUMBER)]
)
def test_state_survives_json(raw: list[Any], task: TaskSettings) -> None:
    labels = fit(raw, task)
    assert Labels.from_state(json.loads(json.dumps(labels.state()))) == labels
