"""From tables to encoder inputs: statistics of the training rows, categories, images, new files."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.preprocessing import QuantileTransformer

from tests.harness.errors import raises
from vfl_common.config.data import DataSettings
from vfl_common.errors import Code, InputError
from vfl_party.data import Preprocessor, Table
from vfl_party.data.table import Categories
from vfl_party.models import InputSpec

NAN = float("nan")
TRAIN = np.array([0, 1, 2])


def table(values: Any = None, words: Any = None, names: str = "abcdef", **more: Any) -> Table:
    numeric = None if values is None else np.array(values, np.float32)
    text = None if words is None else np.array(words, object)
    n = len(values if values is not None else words)
    return Table(
        "x.csv",
        tuple(map(str, range(n))),
        numeric_NF=numeric,
        numeric_names=() if numeric is None else tuple(names[: numeric.shape[1]]),
        categorical=None if text is None else categories(text),
        categorical_names=() if text is None else tuple(f"k{k}" for k in range(text.shape[1])),
        **more,
    )


def categories(text: Any) -> Categories:
    words = tuple(
        tuple(dict.fromkeys(each for each in column if each is not None)) for column in text.T
    )
    places = [
        [own.index(each) if each else -1 for each in row]
        for own, row in zip(words, text.T, strict=True)
    ]
    return Categories(np.array(places, np.int32).T, words)


def images(pixels: Any) -> Table:
    array = np.array(pixels, np.float32)
    return Table("x.npz", tuple(map(str, range(len(array)))), images_NCHW=array)


def fit(
    rows: Table, *, one_hot: bool = True, flatten: bool = False, train: Any = TRAIN, **settings: Any
) -> Preprocessor:
    return Preprocessor.fit(
        rows,
        train,
        one_hot=one_hot,
        flatten=flatten,
        settings=DataSettings(source="x.csv", **settings),
    )


def refused(call: Any, *arguments: Any, **named: Any) -> None:
    with raises(InputError, Code.DATA_INVALID):
        call(*arguments, **named)


def test_standard_uses_training_rows_only() -> None:
    rows = table([[1, 5], [2, 5], [3, 5], [1000, 6]])
    features = fit(rows).transform(rows)
    std = np.sqrt(2 / 3)
    assert features.x.dtype == torch.float32
    np.testing.assert_allclose(features.x[:, 0], [-1 / std, 0, 1 / std, 998 / std], rtol=1e-6)
    # Constant in training: shifted only.
    assert features.x[:, 1].tolist() == [0, 0, 0, 1]
    assert features.spec == InputSpec((2,))


def test_constant_columns_of_any_size_stay_finite() -> None:
    rows = table([[0.1, 1e38, -3e-38]] * 3)
    assert fit(rows).transform(rows).x.tolist() == [[0, 0, 0]] * 3


def test_statistics_are_taken_in_double_precision() -> None:
    values = (1e4 + np.random.default_rng(0).normal(size=(20_000, 1))).astype(np.float32)
    rows = table(values)
    x = fit(rows, train=np.arange(20_000)).transform(rows).x.double()
    assert abs(float(x.mean())) < 1e-5
    assert abs(float(x.std(correction=0)) - 1) < 1e-5


def test_minmax_and_none() -> None:
    rows = table([[1, 7], [2, 7], [3, 7], [5, 8]])
    assert fit(rows, scale="minmax").transform(rows).x.tolist() == [
        [0, 0],
        [0.5, 0],
        [1, 0],
        [2, 1],
    ]
    assert fit(rows, scale="none").transform(rows).x.tolist() == [[1, 7], [2, 7], [3, 7], [5, 8]]


@pytest.mark.parametrize(("policy", "filled"), [("mean", 4.0), ("median", 3.0), ("zero", 0.0)])
def test_missing_numbers_are_filled_from_training_rows(policy: str, filled: float) -> None:
    rows = table([[1, NAN], [3, NAN], [8, NAN], [NAN, NAN], [100, 9]])
    x = fit(rows, train=np.array([0, 1, 2, 3]), missing=policy, scale="none").transform(rows).x
    assert x.tolist() == [[1, 0], [3, 0], [8, 0], [filled, 0], [100, 9]]


def test_missing_numbers_without_a_policy() -> None:
    rows = table([[1], [2], [3]])
    refused(fit(rows).transform, table([[NAN]]))
    refused(fit, table([[1], [NAN], [3]]))


def test_categories_as_codes() -> None:
    words = [["b", None], ["a", "x"], [None, "x"], ["new", "x"], ["a", None]]
    rows = table([[1]] * 5, words)
    features = fit(rows, one_hot=False).transform(rows)
    assert features.categories is not None
    assert features.categories.dtype == torch.int64
    assert features.categories.tolist() == [[4, 1], [3, 3], [1, 3], [0, 3], [3, 1]]
    assert features.cardinalities == (5, 4)
    assert features.spec == InputSpec((1,), (5, 4))


def test_categories_as_columns() -> None:
    rows = table([[1], [2], [3], [4]], [["b"], ["a"], [None], ["new"]])
    features = fit(rows, scale="none").transform(rows)
    assert features.categories is None
    assert features.cardinalities == ()
    assert features.x.tolist() == [[1, 0, 0, 1], [2, 0, 1, 0], [3, 1, 0, 0], [4, 0, 0, 0]]


def test_categories_alone() -> None:
    rows = table(words=[["b"], ["a"], ["a"]])
    assert fit(rows).transform(rows).spec == InputSpec((3,))
    features = fit(rows, one_hot=False).transform(rows)
    assert features.spec == InputSpec((0,), (5,))
    assert [tensor.shape for tensor in features.inputs(TRAIN[:2])] == [(2, 0), (2, 1)]
    silent = table(words=[[None], [None], [None]])
    assert fit(silent).transform(silent).x.tolist() == [[1], [1], [1]]


def test_too_many_categories_for_columns() -> None:
    rows = table(words=[[str(row)] for row in range(5000)])
    refused(fit, rows, train=np.arange(5000))
    assert fit(rows, one_hot=False, train=np.arange(5000)).transform(rows).cardinalities == (5003,)


def test_images_by_channel() -> None:
    pixels = np.random.default_rng(0).uniform(size=(4, 3, 2, 2)) * [[[[0.2]], [[0.5]], [[1.0]]]]
    rows = images(pixels)
    x = fit(rows).transform(rows).x
    assert x.shape == (4, 3, 2, 2)
    np.testing.assert_allclose(x[:3].double().mean(dim=(0, 2, 3)), [0, 0, 0], atol=1e-6)
    np.testing.assert_allclose(
        x[:3].double().std(dim=(0, 2, 3), correction=0), [1, 1, 1], rtol=1e-6
    )
    for scale in ("minmax", "none"):
        np.testing.assert_array_equal(fit(rows, scale=scale).transform(rows).x, rows.images_NCHW)
    flat = fit(rows, flatten=True).transform(rows)
    assert flat.spec == InputSpec((12,))
    np.testing.assert_array_equal(flat.x, x.reshape(4, 12))


def test_images_of_other_ranges_and_missing_pixels() -> None:
    rows = images([[[[0, 8]]], [[[16, 4]]], [[[2, NAN]]]])
    x = fit(rows, scale="minmax", missing="mean").transform(rows).x
    assert x.flatten().tolist() == [0, 0.5, 1, 0.25, 0.125, 0.375]


def test_new_files() -> None:
    rows = table([[1, 2], [3, 4], [5, 6]], [["x"], ["y"], ["x"]])
    preprocessor = fit(rows)
    # An additional column, another order.
    shuffled = table([[9, 2, 1]], [["x"]], names="zba")
    first = preprocessor.transform(rows).x[0].tolist()
    assert preprocessor.transform(shuffled).x[0].tolist() == first
    refused(preprocessor.transform, table([[1]], [["x"]]))
    refused(preprocessor.transform, table([[1, 2]]))
    text = Table(
        "y.csv",
        ("0",),
        np.ones((1, 1), np.float32),
        ("a",),
        categories(np.array([["x", "y"]], object)),
        ("k0", "b"),
    )
    refused(preprocessor.transform, text)
    number = Table("y.csv", ("0",), np.ones((1, 3), np.float32), ("a", "b", "k0"))
    refused(preprocessor.transform, number)
    refused(preprocessor.transform, images([[[[1]]]]))
    on_images = fit(images([[[[1, 2]]]] * 3))
    refused(on_images.transform, rows)
    refused(on_images.transform, images([[[[1], [2]]]]))
    tiny = fit(table([[0], [1e-30], [0]]))
    refused(tiny.transform, table([[1e30]]))


def test_nothing_to_learn_from() -> None:
    refused(fit, table([[1]]), train=np.array([], np.int64))
    refused(fit, Table("x.csv", ("a", "b", "c")))


@pytest.mark.parametrize("one_hot", [True, False])
def test_state_survives_json(one_hot: bool) -> None:
    rows = table([[0.1, NAN], [1 / 3, 4], [5, 6]], [["x"], [None], ["é"]])
    before = fit(rows, one_hot=one_hot, missing="mean")
    after = Preprocessor.from_state(json.loads(json.dumps(before.state())))
    assert after == before
    assert torch.equal(after.transform(rows).x, before.transform(rows).x)
    on_images = fit(images(np.random.default_rng(0).uniform(size=(3, 1, 2, 2))), flatten=True)
    assert Preprocessor.from_state(json.loads(json.dumps(on_images.state()))) == on_images


def test_inputs_pick_rows() -> None:
    rows = table([[1], [2], [3]], [["x"], ["y"], ["x"]])
    plain = fit(rows).transform(rows)
    coded = fit(rows, one_hot=False).transform(rows).to("cpu")
    for index in (np.array([2, 0]), torch.tensor([2, 0])):
        (x_B,) = plain.inputs(index)
        assert torch.equal(x_B, plain.x[[2, 0]])
        x_B, categories_B = coded.inputs(index)
        assert torch.equal(x_B, coded.x[[2, 0]])
        assert coded.categories is not None
        assert torch.equal(categories_B, coded.categories[[2, 0]])


def test_quantiles_are_those_of_scikit_learn() -> None:
    """Ties, ends and values beyond them; also after JSON, as a prediction reads the statistics."""
    drawn = np.random.default_rng(3)
    values = np.stack(
        [drawn.lognormal(size=1500), drawn.integers(0, 4, 1500), drawn.normal(size=1500) * 1e6], 1
    ).astype(np.float32)
    values[1200:] *= 3
    rows, train = table(values), np.arange(1200)
    found = fit(rows, train=train, scale="quantile")
    reference = QuantileTransformer(
        output_distribution="normal", n_quantiles=1000, subsample=None
    ).fit(values[train].astype(np.float64))
    want = reference.transform(values.astype(np.float64)).astype(np.float32)
    assert torch.equal(found.transform(rows).x, torch.from_numpy(want))
    again = Preprocessor.from_state(json.loads(json.dumps(found.state())))
    assert torch.equal(again.transform(rows).x, torch.from_numpy(want))


def test_quantiles_of_few_constant_and_missing_values() -> None:
    rows = table([[1, 7, NAN], [2, 7, 4], [3, 7, 6], [9, 8, NAN]])
    x = fit(rows, scale="quantile", missing="mean").transform(rows).x
    assert x[1].tolist() == [0, 0, x[1, 2]]
    # The mean of 4 and 6 is between the two, and a constant column is only shifted.
    assert x[0, 2] == x[3, 2] == 0
    assert x[3].tolist() == [x[2, 0], 1, 0]
    assert x[2, 0] == -x[0, 0] > 5
    with raises(InputError, Code.DATA_INVALID):
        fit(images(np.zeros((3, 1, 2, 2))), scale="quantile")
